"""A run's configuration: what is trained, by whom, under which rule. TOML on disk, one flag per field on the command line."""

import hashlib
import json
import math
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_type_hints

from heloco.errors import UserError, nearest
from heloco.inner import InnerOptions
from heloco.methods import get_method
from heloco.outer.heloco import CONSTANTS as HELOCO_CONSTANTS
from heloco.policy import CHOICES, STEPS, WEIGHTS, Drop, make_guard
from heloco.run.values import convert
from heloco.task.gpt import GPTConfig, preset


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    task: Literal["language", "images", "external"] = "language"
    """What is trained: a language model on text, an image classifier on shapes drawn by code, or whatever machines bring."""
    data: str = "builtin"
    """builtin (languages made by code), a folder of text with one file or sub-folder per shard, or hf:DATASET."""
    tokenizer: str = ""
    """bytes, gpt2, or the path of a tokenizer.json or .tiktoken file; unset: the hf model's own, else bytes."""
    languages: list[str] = field(default_factory=list)
    """Which sources of the data to use, in this order; empty: all."""
    split: Literal["source", "iid", "dirichlet"] = "source"
    """How training data is dealt to shards: one source each (non-IID), mixed (IID), or Dirichlet(alpha)."""
    alpha: float = 0.5
    """The Dirichlet split's concentration: small is uneven, large is even."""
    field: str = "text"
    """The field of .jsonl rows, the column of .parquet files, that holds the text."""
    limit_mb: float = 20.0
    """How much text to stream per source from hf: datasets."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    preset: str = "1m"
    """The TinyGPT size: 1m, 5m, paper, 30m, 60m, 124m."""
    width: int = 0
    """Embedding width; 0: the preset's."""
    layers: int = 0
    """Transformer blocks; 0: the preset's."""
    heads: int = 0
    """Attention heads; 0: the preset's."""
    vocab_size: int = 0
    """0: the tokenizer's."""
    context: int = 0
    """Tokens per sample; 0: the preset's, or of an hf model 128, at most its positions."""
    eval_windows: int = 64
    """Samples per source in an evaluation."""
    hf: str = ""
    """A folder or hub name (NAME, NAME@REVISION) of a Hugging Face causal language model to train instead of TinyGPT: from its
    weights, or from scratch where the folder has only a config.json."""


@dataclass(frozen=True, kw_only=True)
class WorkersConfig:
    paces: list[float] = field(default_factory=lambda: [1.0, 1.0, 2.0, 3.0, 6.0])
    """Seconds per inner step of each worker, e.g. 1,1,6,6,6."""
    workers: int = 0
    """How many workers; 0: as many as paces. A single pace is then everybody's."""
    inner_steps: int = 10
    """H, the inner steps of a round."""
    steps: Literal["constant", "dylu"] = "constant"
    """H for all, or DyLU: in proportion to a worker's speed."""
    assign: Literal["fixed", "flexible", "liu"] = "fixed"
    """Which shard a round takes: the worker's own, the least visited, or Liu's probability."""
    grace_s: float = 0.0
    """Virtual seconds after an arrival in which others may still join before anybody starts again."""


@dataclass(frozen=True, kw_only=True)
class OuterConfig:
    method: str = "heloco-ramp"
    """The outer method; `heloco methods` lists them with their knobs."""
    outer_lr: float | None = None
    """η. This and the knobs below: unset means the method's own."""
    momentum: float | None = None
    """μ."""
    lookahead: bool | None = None
    """Whether workers start from θ − ημm."""
    reorient: Literal["printed", "ramp"] | None = None
    """Which λ turns weakly aligned blocks."""
    weigh: Literal["after", "before"] | None = None
    """Whether ρ comes after or before the correction."""
    c_ok: float | None = None
    k_s: float | None = None
    k_d: float | None = None
    kappa: float | None = None
    beta_max: float | None = None
    eps: float | None = None
    c_bad: float | None = None
    delay: int | None = None
    """N of delayed Nesterov."""
    c: float | None = None
    """c of delayed Nesterov."""
    weight: Literal["base", "average", "polynomial", "share", "constant", "annealed", "discounted"] | None = None
    """The arrival weight ρ; unset: the method's own."""
    weight_value: float | None = None
    """ρ of the constant weight."""
    weight_exponent: float | None = None
    """The polynomial weight's exponent."""
    weight_floor: float | None = None
    """The share weight's lower clip."""
    weight_ceiling: float | None = None
    """The share weight's upper clip."""
    weight_correlation: float | None = None
    """The annealed and discounted weights' c at the start of the run."""
    drop: Literal["never", "zero", "skip"] = "never"
    """What happens to contributions staler than drop_above: applied, set to zero (the paper), or skipped."""
    drop_above: int = 0
    """The largest staleness that is still applied."""
    norm_limit: float | Literal["off"] = 10.0
    """How many times the usual norm a pseudo-gradient may have, as a whole and in each block; off: any."""
    norm_policy: Literal["clip", "refuse"] = "clip"
    """What happens to a pseudo-gradient above norm_limit: it is scaled down to the usual norm, or refused."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    arrivals: int = 120
    """How many contributions the run takes in."""
    seed: int = 0
    """Everything random comes from it."""
    eval_every: int = 10
    """Arrivals between evaluations; 0: only at the start and the end."""
    checkpoint_every: int = 20
    """Arrivals between checkpoints; 0: only at the start and the end."""
    max_refusals: int = 5
    """Refused contributions (NaN, Inf) in a row after which the run stops."""
    device: str = "auto"
    """cpu, cuda, cuda:1, or auto: a GPU where there is one."""


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Of runs on real machines. These settings may be changed when a run is taken up again."""

    min_workers: int = 1
    """How many machines must take part; with fewer the run pauses."""
    give_up_after_s: float = 3600.0
    """How long a pause may last before the run ends."""
    participation: int = 0
    """Arrivals over which it is counted who takes part; 0: four times the workers."""
    beat_s: float = 2.0
    """Seconds between a machine's signs of life."""
    patience: float = 10.0
    """A machine is lost after this many times its usual time between two signs of progress (at least a beat), and a round is
    given to another after this many times what the machine's rounds usually take."""
    round_limit_s: float = 3600.0
    """The longest that any round may take, in seconds from handing out; the first round of a machine is measured by it alone."""
    model_limit_gb: float = 0.0
    """The largest model that a machine may bring to an external run; 0: half of the free space."""
    journal_gb: float = 10.0
    """Contributions are kept for a replay from the start as long as they fit; then those behind the last checkpoints go."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    outer: OuterConfig = field(default_factory=OuterConfig)
    inner: InnerOptions = field(default_factory=lambda: InnerOptions(batch_size=4, lr=1.5e-3, lr_min=1e-4))
    run: RunSettings = field(default_factory=RunSettings)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    def digest(self) -> str:
        sections = {section: values for section, values in asdict(self).items() if section != "cluster"}
        unused = unused_settings(self)
        deciding = {
            section: {name: value for name, value in values.items() if name not in unused} for section, values in sections.items()
        }
        return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


PAPER: dict[str, Any] = {
    "preset": "paper", "tokenizer": "gpt2", "inner_steps": 80, "arrivals": 300, "batch_size": 2,
    "lr": 2e-4, "lr_min": 1e-6, "eval_every": 30, "checkpoint_every": 60, "eval_windows": 128, "norm_limit": "off",
}  # fmt: skip
"""The paper's setting, over the defaults: `heloco train --recipe paper`. Studies are over it too."""
RECIPES: dict[str, dict[str, Any]] = {"default": {}, "paper": PAPER}

SECTIONS: dict[str, Any] = {section.name: section.type for section in fields(RunConfig)}
FIELDS: dict[str, str] = {f.name: section for section, kind in SECTIONS.items() for f in fields(kind)}
"""Field name -> section. Names are unique over the sections, so a flag needs no prefix."""


GUARD = ("norm_limit", "norm_policy")
_RULE = tuple(f.name for f in fields(OuterConfig) if f.name not in ("method", "drop", "drop_above", *GUARD))
DERIVED: dict[str, tuple[str, ...]] = {
    "preset": ("width", "layers", "heads", "context", "hf"),
    "hf": ("preset", "width", "layers", "heads", "context", "vocab_size", "tokenizer"),
    "data": ("languages", "vocab_size"),
    "tokenizer": ("vocab_size",),
    "paces": ("schedule_steps",),
    "inner_steps": ("schedule_steps",),
    "arrivals": ("schedule_steps",),
    "method": _RULE,
}
"""Field -> the fields whose values `resolve` or the data fill in from it, or whose place it takes."""
WRITTEN_BEFORE: dict[str, Any] = {"norm_limit": "off"}
"""What an effective config means that has no such setting: it was written by a version without it."""
YOUNGER = ("weight_correlation", "second_moment", "inner_momentum")
"""Settings that came after runs were kept, and are unset where they are not used."""


def unused_settings(config: RunConfig) -> set[str]:
    """Settings that came after runs were kept and that this one does not use: its digest is the one it had without them."""
    unused = set() if config.model.hf else {"hf"}
    unused |= {"inner_optimizer"} if config.inner.inner_optimizer == "adamw" else set()
    young = {name: getattr(config.outer, name, getattr(config.inner, name, None)) for name in YOUNGER}
    unused |= {name for name, value in young.items() if value in (None, "")}
    return unused | (set(GUARD) if config.outer.norm_limit == "off" else set())


def field_types() -> dict[str, Any]:
    return {name: hint for kind in SECTIONS.values() for name, hint in get_type_hints(kind).items()}


def with_fields(config: RunConfig, values: dict[str, Any]) -> RunConfig:
    """The config with fields replaced by name, whatever section they are in."""
    for name in values:
        if name not in FIELDS:
            raise UserError(f"There is no setting {name!r}; {nearest(name, list(FIELDS))}")
    types = field_types()
    for section in SECTIONS:
        changes = {name: convert(name, value, types[name]) for name, value in values.items() if FIELDS[name] == section}
        if changes:
            config = replace(config, **{section: replace(getattr(config, section), **changes)})
    return config


def read_toml(path: Path, overridden: Iterable[str] = ()) -> dict[str, Any]:
    """The fields of a TOML file with the sections of RunConfig.

    A run's own config.toml is effective: it also holds what was derived from other fields. What was derived from a field that
    is `overridden` is left out, to be derived anew.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"There is no config file {path}: check the path.") from None
    except OSError as error:
        raise UserError(
            f"The config file {path} cannot be read ({error.strerror}): give a TOML file that you may read."
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid TOML ({error}): fix that line.") from error
    return parse_toml(text, str(path), overridden)


def parse_toml(text: str, path: str, overridden: Iterable[str] = ()) -> dict[str, Any]:
    """The fields of TOML text; `path` is what it is called where it is wrong."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML ({error}): fix that line.") from error
    values: dict[str, Any] = {}
    effective = document.pop("effective", False) is True
    for section, entries in document.items():
        if section not in SECTIONS or not isinstance(entries, dict):
            raise UserError(f"{path}: there is no section [{section}]; {nearest(section, list(SECTIONS))}")
        for name, value in entries.items():
            if FIELDS.get(name) != section:
                known = [n for n, s in FIELDS.items() if s == section]
                raise UserError(f"{path}: [{section}] has no setting {name!r}; {nearest(name, known)}")
            values[name] = value
    return without_derived(WRITTEN_BEFORE | values, overridden) if effective else values


def without_derived(values: dict[str, Any], given: Iterable[str]) -> dict[str, Any]:
    """The values that are not derived from something that was given."""
    stale = {derived for name in given for derived in DERIVED.get(name, ())}
    return {name: value for name, value in values.items() if name not in stale}


def to_toml(config: RunConfig) -> str:
    """The config as TOML. Its values are numbers, booleans, strings and lists of them, which TOML writes as JSON does."""
    lines = ["effective = true", ""]
    for section, entries in asdict(config).items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {_toml(value)}" for name, value in entries.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")  # the one that JSON leaves as it is


def outer_knobs(config: OuterConfig) -> dict[str, Any]:
    """The rule's settings that were given, by the rule's own names."""
    names = (*HELOCO_CONSTANTS, "outer_lr", "momentum", "lookahead", "delay", "c")
    given = {name: getattr(config, name) for name in names if getattr(config, name) is not None}
    return {"lr" if name == "outer_lr" else name: value for name, value in given.items()}


def weight_options(config: OuterConfig) -> dict[str, float]:
    """The arrival weight's settings that were given; one that the weight does not have is refused."""
    weight = config.weight or get_method(config.method).weight
    known = {f.name for f in fields(WEIGHTS[weight])}  # type: ignore[arg-type]
    names = ("value", "exponent", "floor", "ceiling", "correlation")
    given = {name: getattr(config, f"weight_{name}") for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in known:
            raise UserError(f"The {weight} weight has no weight_{name}: leave it out or choose another --weight.")
    return given


def gpt_config(model: ModelConfig) -> GPTConfig:
    sizes = ("width", "layers", "heads", "context", "vocab_size")
    return preset(model.preset, **{name: getattr(model, name) for name in sizes})


def resolve(config: RunConfig) -> RunConfig:
    """The effective config: checked, and with every value that was left to a method or a preset filled in."""
    if not config.data.tokenizer and not (config.model.hf and config.data.task == "language"):
        config = replace(config, data=replace(config.data, tokenizer="bytes"))
    workers = _resolve_workers(config.workers)
    method = get_method(config.outer.method)
    settings = config.run
    if settings.arrivals < 1:
        raise UserError(f"arrivals is {settings.arrivals}: a run takes in at least one contribution.")
    if settings.seed < 0:
        raise UserError(f"seed is {settings.seed}: give a number ≥ 0.")
    for name in ("eval_every", "checkpoint_every"):
        if getattr(settings, name) < 0:
            raise UserError(f"{name} is {getattr(settings, name)}: give a number ≥ 0 (0: only at the start and the end).")
    if settings.max_refusals < 1:
        raise UserError(f"max_refusals is {settings.max_refusals}: give a number ≥ 1.")
    for name in ("limit_mb", "alpha"):
        if not 0 < getattr(config.data, name) < math.inf:
            raise UserError(f"{name} is {getattr(config.data, name)}: give a finite number above 0.")
    _check_cluster(config.cluster)
    Drop(config.outer.drop, config.outer.drop_above)
    make_guard(config.outer.norm_limit, config.outer.norm_policy)
    weight_options(config.outer)
    method.check(outer_knobs(config.outer))
    knobs = {**method.knobs(), **outer_knobs(config.outer)}
    if "delay" in knobs and config.outer.delay is None:
        knobs["delay"] = len(workers.paces)
    names = {"lr": "outer_lr"}
    known = {names.get(k, k): v for k, v in knobs.items() if names.get(k, k) in FIELDS}
    outer = replace(config.outer, **{"weight": config.outer.weight or method.weight, **known})
    inner = config.inner
    if inner.inner_momentum is not None and inner.inner_optimizer == "adamw":
        raise UserError("inner_momentum is a setting of muon and sgd: leave it out, or set beta1 for adamw.")
    if not inner.schedule_steps:
        length = max(1, settings.arrivals * workers.inner_steps // len(workers.paces))
        inner = replace(inner, schedule_steps=length)
    return replace(config, workers=workers, outer=outer, inner=inner, model=_resolve_model(config))


def _check_cluster(config: ClusterConfig) -> None:
    if config.min_workers < 1:
        raise UserError(f"min_workers is {config.min_workers}: give a number ≥ 1.")
    if config.participation < 0:
        raise UserError(f"participation is {config.participation}: give a number of arrivals, or 0.")
    for name, least in (
        ("give_up_after_s", 0.0), ("beat_s", 0.01), ("patience", 2.0), ("journal_gb", 0.0), ("round_limit_s", 1.0),
        ("model_limit_gb", 0.0),
    ):  # fmt: skip
        if not least <= getattr(config, name) < math.inf:
            raise UserError(f"{name} is {getattr(config, name)}: give a finite number of at least {least:g}.")


def _resolve_model(whole: RunConfig) -> ModelConfig:
    config = whole.model
    if whole.data.task == "images":
        for section, default in ((whole.data, DataConfig(task="images", tokenizer="bytes")), (config, ModelConfig())):
            for name, value in asdict(default).items():
                if getattr(section, name) != value:
                    raise UserError(f"{name} is a setting of the language task: leave it out, or leave out --task images.")
        return config
    if config.eval_windows < 1:
        raise UserError(f"eval_windows is {config.eval_windows}: an evaluation needs at least one sample per source.")
    if config.hf:
        for name in ("preset", "width", "layers", "heads", "vocab_size"):
            if getattr(config, name) not in ("", getattr(ModelConfig(), name)):
                raise UserError(f"{name} is a setting of TinyGPT, but hf is {config.hf}: leave one of them out.")
        return replace(config, preset="")
    base = preset(config.preset)
    sizes = ("width", "layers", "heads", "context")
    return replace(config, **{name: getattr(config, name) or getattr(base, name) for name in sizes})


def _resolve_workers(config: WorkersConfig) -> WorkersConfig:
    paces = list(config.paces)
    if not paces:
        raise UserError("There are no paces: give one per worker, e.g. --paces 1,1,6,6,6.")
    for pace in paces:
        if not (math.isfinite(pace) and pace > 0):
            raise UserError(f"A pace is {pace}: paces are seconds per inner step, finite and above 0.")
        if not 1e-9 <= pace <= 1e9:
            raise UserError(f"A pace of {pace:g} s is outside the clock's 1e-9 to 1e9: give paces in other units.")
    if config.workers < 0:
        raise UserError(f"workers is {config.workers}: give a number ≥ 1, or leave it out.")
    if config.workers and len(paces) == 1:
        paces *= config.workers
    if config.workers and config.workers != len(paces):
        raise UserError(f"{config.workers} workers but {len(paces)} paces: give one pace per worker, or one for all.")
    if config.inner_steps < 1:
        raise UserError(f"inner_steps is {config.inner_steps}: a round needs at least one step.")
    if not 0 <= config.grace_s <= 1e9:
        raise UserError(f"grace_s is {config.grace_s}: give seconds from 0 to 1e9.")
    assert config.steps in STEPS and config.assign in CHOICES
    return replace(config, paces=paces, workers=0)  # the paces say it: `--config` with other --paces must not contradict
