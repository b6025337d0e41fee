"""A study as data: one TOML file with its settings, its grid of rows and methods, the paper's numbers and what to show.

    title, about     what a reader sees first
    first_seed       the first of its seeds [0]; the settings of a study that confirms something were chosen on seeds before it
    like             another study, whose settings, small scale, rows, methods and paper this one takes where it has none itself
    [settings]       fields of a run's config, over the recipe `paper`
    [small]          fields of a run's config at `--scale small`, over the settings; [that of table1]
    [rows]           NAME = { fields …, small = { fields … }, methods = [names it is paired with; all where left out],
                     seeds = how many it has unless `--seeds` is given [3] }
    [methods]        NAME = { fields …, small = { fields … }, rows = [names it is paired with] }; `method` is NAME where left out
    [paper]          ROW = { loss = { METHOD = … }, source = { SOURCE = { METHOD = … } }, gain, time_gain, time_s }
    [[tables]]       see `TableSpec`
    [[figures]]      see `FigureSpec`

A method's fields come over its row's. `workers = K` repeats the pattern of the paces up to K workers. `equal_steps = true` goes
on until `arrivals` × `inner_steps` inner steps are done: with DyLU, slow workers' rounds are shorter.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from heloco.errors import UserError, nearest
from heloco.run.config import Settings

Scale = Literal["paper", "small"]
SCALES: tuple[str, ...] = get_args(Scale)
Axis = Literal["rows", "methods", "sources"]
SEEDS = 3
SMALL_RUN: Settings = {"inner_steps": 4, "arrivals": 80, "batch_size": 4, "eval_every": 8}
SMALL_MODEL: Settings = {
    "preset": "1m", "tokenizer": "bytes", "width": 32, "layers": 1, "heads": 2, "context": 32, "lr": 3e-3, "lr_min": 1e-5,
    "eval_windows": 8,
}  # fmt: skip
"""With `SMALL_RUN`, the small scale of a study that is not `like` another: a second per run on two CPU cores. Tasks and models
of other kinds have no such settings, and only their runs are made short."""
PAPERS_NAME = {"heloco-ramp": "heloco"}
"""The paper has one HeLoCo: its numbers stand next to both variants."""


@dataclass(frozen=True)
class GridPart:
    """A row or a method of the grid."""

    name: str
    settings: Mapping[str, object]
    small: Mapping[str, object]
    only: tuple[str, ...]
    """The methods (of a row) or rows (of a method) it is paired with; empty: all."""
    seeds: int = SEEDS
    """How many seeds a row has."""

    def at(self, scale: str) -> Settings:
        return {**self.settings, **(self.small if scale == "small" else {})}


@dataclass(frozen=True, kw_only=True)
class TableSpec:
    """A table of a study, as its TOML file describes it."""

    kind: Literal["losses", "sources", "budget", "order"]
    """What the table shows. losses: final losses, rows × methods; sources: final measures per source; budget: the paper's
    Table 1; order: the order of the methods in each row."""
    title: str
    caption: str = ""
    lines: Literal["rows", "methods"] = "rows"
    """What goes down the page, in `losses`."""
    baseline: str = ""
    """The method that the others' losses are compared with, in `losses`."""
    measure: str = "loss"
    """The measure that a table of kind `sources` shows."""
    methods: list[str] = field(default_factory=list)
    """The methods that tables of kind `losses` and `sources` show; empty: all."""
    variants: list[str] = field(default_factory=list)
    """The methods that stand where the paper has HeLoCo, in `budget` and `order`."""
    against: list[str] = field(default_factory=list)
    """The methods that `variants` are compared with, in `budget` and `order`."""


@dataclass(frozen=True, kw_only=True)
class FigureSpec:
    """A figure of a study, as its TOML file describes it."""

    name: str
    title: str
    caption: str = ""
    x: Literal["inner_steps", "time_s"] = "inner_steps"
    panels: list[Axis]
    """The axes of the grid with a panel for each combination of their values."""
    lines: Axis
    rows: list[str] = field(default_factory=list)
    """The rows that the figure shows; empty: all."""
    methods: list[str] = field(default_factory=list)
    """The methods that the figure shows; empty: all."""
    sources: list[str | int] = field(default_factory=list)
    """The sources that the figure shows, by name or by number (-1 is the last); empty: all."""
    columns: int = 2


@dataclass(frozen=True)
class Study:
    """A study as read from its TOML file; the module says what each field means."""

    name: str
    title: str
    about: str
    settings: Mapping[str, object]
    small: Mapping[str, object]
    rows: Mapping[str, GridPart]
    methods: Mapping[str, GridPart]
    paper: Mapping[str, Any]
    tables: Sequence[TableSpec]
    figures: Sequence[FigureSpec]
    first_seed: int = 0

    def paper_number(self, row: str, *keys: str) -> float | None:
        """The paper's number at [paper.ROW] under these keys, if it has one."""
        entry: Any = self.paper.get(row, {})
        for key in keys:
            entry = entry.get(PAPERS_NAME.get(key, key), {}) if isinstance(entry, dict) else {}
        return float(entry) if isinstance(entry, int | float) else None


def names() -> list[str]:
    """The studies that come with the package, in the paper's order."""
    stems = {path.name.removesuffix(".toml") for path in resources.files(__package__).iterdir() if path.name.endswith(".toml")}
    order = ("table1", "convergence", "languages", "staleness", "flexible", "dropping", "ablation", "sensitivity")
    return [name for name in order if name in stems] + sorted(stems - set(order))


def find_study(name: str) -> Study:
    """A study by its name, or by the path of a TOML file of one's own."""
    if name.endswith(".toml"):
        try:
            return _study(Path(name).stem, Path(name).read_text(encoding="utf-8"), name)
        except OSError as error:
            raise UserError(f"The study {name} cannot be read ({error.strerror}): check the path.") from error
        except UnicodeDecodeError as error:
            raise UserError(f"The study {name} is not text in UTF-8 ({error}): give a TOML file.") from error
    if name not in names():
        raise UserError(f"There is no study {name!r}; {nearest(name, names())} `heloco study --list` describes them.")
    return _study(name, resources.files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8"), f"{name}.toml")


KEYS: dict[str, type] = {
    "title": str, "about": str, "like": str, "first_seed": int, "settings": dict, "small": dict, "rows": dict, "methods": dict,
    "paper": dict, "tables": list, "figures": list,
}  # fmt: skip
KIND_NAMES = {str: "text", int: "whole number", dict: "table", list: "list"}


def _study(name: str, text: str, where: str) -> Study:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{where} is not valid TOML ({error}): fix that line.") from error
    for key, value in document.items():
        if key not in KEYS:
            raise UserError(f"{where}: a study has no {key!r}; {nearest(key, list(KEYS))}")
        if not isinstance(value, KEYS[key]):
            raise UserError(f"{where}: {key} must be a {KIND_NAMES[KEYS[key]]}.")
    base = find_study(document["like"]) if "like" in document else None
    study = Study(
        name,
        document.get("title", name),
        document.get("about", ""),
        {**(base.settings if base else {}), **document.get("settings", {})},
        {**(base.small if base else _default_small(document.get("settings", {}))), **document.get("small", {})},
        _parts(document["rows"], "methods", where) if "rows" in document else base.rows if base else {},
        _parts(document["methods"], "rows", where) if "methods" in document else base.methods if base else {},
        document.get("paper", base.paper if base else {}),
        [_built(TableSpec, entries, f"{where}: a table") for entries in document.get("tables", [])],
        [_built(FigureSpec, entries, f"{where}: a figure") for entries in document.get("figures", [])],
        document.get("first_seed", 0),
    )
    _check_names(study, where)
    return study


def _default_small(settings: Settings) -> Settings:
    is_tiny_gpt = settings.get("task", "language") == "language" and not settings.get("hf")
    return {**(SMALL_MODEL if is_tiny_gpt else {}), **SMALL_RUN}


def _parts(entries: dict[str, Any], partners: str, where: str) -> dict[str, GridPart]:
    parts = {}
    for name, entry in entries.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("small", {}), dict):
            raise UserError(f"{where}: {name!r} must be a table of settings.")
        seeds = entry.get("seeds", SEEDS)
        if not isinstance(seeds, int) or seeds < 1:
            raise UserError(f"{where}: seeds of {name!r} must be a whole number ≥ 1.")
        settings = {key: value for key, value in entry.items() if key not in ("small", "seeds", partners)}
        if partners == "rows":
            settings.setdefault("method", name)
        parts[name] = GridPart(name, settings, entry.get("small", {}), tuple(entry.get(partners, ())), seeds)
    return parts


def _built(kind: Any, entries: Any, where: str) -> Any:
    """A TableSpec or FigureSpec from its TOML table; what it does not know or lacks is named."""
    hints = get_type_hints(kind)
    if not isinstance(entries, dict):
        raise UserError(f"{where} must be a table.")
    for key, value in entries.items():
        if key not in hints:
            raise UserError(f"{where} has no {key!r}; {nearest(key, list(hints))}")
        many = get_origin(hints[key]) is list
        [hint] = get_args(hints[key]) if many else [hints[key]]
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        if isinstance(value, list) != many:
            raise UserError(f"{where}: {key} must be {'a list' if many else 'one value'}.")
        for item in value if many else [value]:
            if choices and item not in choices:
                raise UserError(f"{where}: {key} cannot be {item!r}; {nearest(str(item), list(choices))}")
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
    missing_entries = [name for name in required if name not in entries]
    if missing_entries:
        raise UserError(f"{where} has no {missing_entries[0]}: give one.")
    return kind(**entries)


def _check_names(study: Study, where: str) -> None:
    """Rows and methods that are mentioned must be there."""
    if not study.rows or not study.methods:
        raise UserError(f"{where}: a study needs [rows] and [methods], its own or those of the study it is `like`.")
    mentions = [("row", name, study.rows) for part in study.methods.values() for name in part.only]
    mentions += [("method", name, study.methods) for part in study.rows.values() for name in part.only]
    mentions += [("row", name, study.rows) for figure in study.figures for name in figure.rows]
    mentions += [("method", name, study.methods) for figure in study.figures for name in figure.methods]
    for table in study.tables:
        method_names = [*table.methods, *table.variants, *table.against, *([table.baseline] if table.baseline else [])]
        mentions += [("method", name, study.methods) for name in method_names]
    for what, name, parts in mentions:
        if name not in parts:
            raise UserError(f"{where}: there is no {what} {name!r}; {nearest(name, list(parts))}")
