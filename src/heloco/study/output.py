"""What a study leaves behind in its folder.

study.json        which study this is, of which data, at which scale; what else lies here
NAME.json         one record per row, method and seed, and the numbers of the tables
tables.md, *.csv  the tables
*.svg, *.png      the figures, where matplotlib is there
index.html        all of it on one page
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from heloco.disk import disk_errors, write_atomically
from heloco.errors import UserError
from heloco.report.charts.drawing import available, draw
from heloco.report.page_writer import Text, render_study
from heloco.report.table_data import TableData
from heloco.report.table_text import as_csv, as_markdown
from heloco.study.budget import budget_summary, losses_at_row_times
from heloco.study.kept_runs import RunStore
from heloco.study.plan import Plan
from heloco.study.results import Results
from heloco.study.study_figures import figures_of
from heloco.study.tables import tables_of

MANIFEST, PAGE, RUNS = "study.json", "index.html", "runs"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What study.json says."""

    study: str
    scale: str
    data: str
    """The digest of the data."""
    sources: list[str]
    seeds: list[int]
    rows: list[str]
    methods: list[str]
    runs: list[str]
    """The digests of the runs, which are the names of their files."""
    files: list[str]
    """The other files that were written into the folder."""


@dataclass(frozen=True)
class Folder:
    """The results of one study under `out`; its runs are next to it, in `out/runs`."""

    out: Path
    study: str

    @property
    def path(self) -> Path:
        """The folder with the tables, figures and page of this study."""
        return self.out / self.study

    @property
    def store(self) -> RunStore:
        """The finished runs, which all studies under `out` share."""
        return RunStore(self.out / RUNS)

    def check_ours(self) -> None:
        """Refuses places that belong to something else, before anything is read or made."""
        for place in (self.out, self.path):
            if place.exists() and not place.is_dir():
                raise UserError(f"{place} is no folder: choose another --out.")
        self.store.check()
        if self.path.exists() and any(self.path.iterdir()):
            self.manifest()
        elif self.out.exists() and any(self.out.iterdir()) and not self.store.folder.exists() and not any(self._others()):
            raise UserError(f"{self.out} belongs to something else (there is no study in it): choose another --out.")

    def _others(self) -> list[Path]:
        return sorted(self.out.glob(f"*/{MANIFEST}"))

    def manifest(self) -> "Manifest":
        """What study.json says. Raises UserError if the folder is not one of this study."""
        path = self.path / MANIFEST
        try:
            manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
            if manifest.study != self.study:
                raise ValueError(f"it is of {manifest.study!r}")
        except FileNotFoundError:
            raise UserError(
                f"{self.path} belongs to something else (it has no {MANIFEST}): choose another --out, or empty it."
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is no {MANIFEST} of this study ({error}): delete it, or choose another --out.") from error
        return manifest

    def files(self) -> list[str]:
        """The files that an earlier call wrote here."""
        return self.manifest().files if (self.path / MANIFEST).exists() else []

    def check_same(self, plan: Plan) -> None:
        """Refuses to put results of another scale or other data in the place of those that are there."""
        if not self.path.exists() or not any(self.path.iterdir()):
            return
        manifest = self.manifest()
        if manifest.scale != plan.scale:
            raise UserError(f"{self.path} holds this study at --scale {manifest.scale}, not {plan.scale}: choose another --out.")
        if manifest.data != plan.data:
            raise UserError(f"{self.path} holds this study of other data or another tokenizer: choose another --out.")


def write_results(plan: Plan, folder: Folder) -> list[TableData]:
    """Writes everything and returns the tables. What an earlier call left here and this one does not write is removed."""
    results = plan.results(folder.store)
    tables, figures = tables_of(results), figures_of(results)
    study, path = results.study, folder.path
    with disk_errors(path, "give the same command again: finished runs are kept."):
        path.mkdir(parents=True, exist_ok=True)
        files_before = folder.files()
        csvs = {f"{_slug(table.title)}.csv": as_csv(table, split_spreads=True) for table in tables}
        figure_files = [f"{figure.name}{end}" for figure in figures for end in (".svg", ".png")] if available() else []
        files = [f"{study.name}.json", "tables.md", *csvs, *figure_files, PAGE]
        write_atomically(path / MANIFEST, _json(_manifest_of(results, plan, files)))  # first: now the folder is known as ours
        for name in set(files_before) - set(files):
            (path / Path(name).name).unlink(missing_ok=True)
        write_atomically(path / f"{study.name}.json", _json(_numbers(results)))
        write_atomically(path / "tables.md", "\n\n".join(map(as_markdown, tables)).encode() + b"\n")
        for name, content in csvs.items():
            write_atomically(path / name, content.encode())
        for figure in figures if figure_files else ():
            draw(figure, path)
        about = Text("", [study.about], is_markdown=True)
        page = render_study(study.title, [about, _setting(results, plan), *tables, *figures], path)
        write_atomically(path / PAGE, page.encode())
    return tables


def _manifest_of(results: Results, plan: Plan, files: Sequence[str]) -> Manifest:
    return Manifest(
        study=results.study.name, scale=results.scale, data=plan.data, sources=results.sources, seeds=results.seeds,
        rows=results.rows, methods=results.methods, runs=results.digests, files=list(files),
    )  # fmt: skip


def _numbers(results: Results) -> dict[str, Any]:
    """The records; with a table of budgets also the loss at the row's T, and all that it says. Several: by their titles."""
    records, budgets = results.records(), [spec for spec in results.study.tables if spec.kind == "budget"]
    if not budgets:
        return {"records": records, "summary": results.summary()}
    at_times = losses_at_row_times(results)
    records = [record | at_times[record["row"], record["method"], record["seed"]] for record in records]
    summaries = {spec.title: budget_summary(results, spec) for spec in budgets}
    return {"records": records, "summary": summaries if len(budgets) > 1 else summaries[budgets[0].title]}


def _setting(results: Results, plan: Plan) -> Text:
    config = plan.places[0].config
    model, data, rounds = config.model, config.input, config.rounds
    setting = (
        f"Scale {results.scale}: {len(results.rows)} rows, {len(results.methods)} methods, seeds {len(results.seeds)}, "
        f"{len(results.digests)} runs. Model of width {model.width}, {model.layers} layers, context {model.context}, vocabulary "
        f"{model.vocab_size:,}; sources {', '.join(results.sources)}; tokenizer {Path(data.tokenizer).name}. "
        f"{config.run.arrivals} arrivals of {rounds.inner_steps} inner steps unless a row says otherwise."
    )
    return Text("", [setting])


def _json(content: Any) -> bytes:
    return json.dumps(msgspec.to_builtins(content), indent=1, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
