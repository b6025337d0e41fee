"""A study's results as pandas DataFrames, for notebooks: `heloco.load_study`."""

from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from heloco.errors import UserError
from heloco.report.run_data import check_pandas
from heloco.study.kept_runs import RunRecord, RunStore
from heloco.study.output import MANIFEST, RUNS, Folder, Manifest

if TYPE_CHECKING:
    import pandas

PLACE = ("row", "method", "seed")


class PlaceRecord(msgspec.Struct, frozen=True):
    """What the study's JSON file says of one run: where it belongs, and which it is."""

    row: str
    method: str
    seed: int
    run: str
    verdict: str
    loss: float | None
    time_s: float


class StudyNumbers(msgspec.Struct, frozen=True):
    """The study's JSON file, as far as it is needed here."""

    records: list[PlaceRecord]


@dataclass(frozen=True, repr=False)
class StudyData:
    """A study as its folder tells it. Each table is made when it is first asked for, and kept."""

    path: Path
    manifest: Manifest
    """What study.json says: rows, methods, seeds, scale, sources."""

    def __repr__(self) -> str:
        count = len(self.manifest.runs)
        return f"<heloco.StudyData: {self.manifest.study} at the scale {self.manifest.scale}, {count} runs in {self.path}>"

    @cached_property
    def runs(self) -> "pandas.DataFrame":
        """A row per row, method and seed of the study: how the run ended, its loss and that of each source (`loss/de`) at the
        end, virtual time, refused contributions, and what the correction did (`kept`, …)."""
        import pandas

        table = []
        for place in self._places:
            record = self._records[place.run]
            line: dict[str, Any] = {name: getattr(place, name) for name in (*PLACE, "run", "verdict", "loss", "time_s")}
            for source, measures in record.evals.sources.items():
                line |= {f"{measure}/{source}": values[-1] for measure, values in measures.items()}
            line |= {"refused": record.refused, **record.cases}
            table.append(line)
        return pandas.DataFrame(table).astype({"loss": float, "time_s": float})

    @cached_property
    def curves(self) -> "pandas.DataFrame":
        """A row per evaluation of each run: where the run was, its mean loss, and the measures of each source. A run with a
        barrier stands for rows with other paces too; its times are those of the row."""
        import pandas

        parts = []
        for place in self._places:
            record = self._records[place.run]
            curve, stretch = record.evals, place.time_s / record.time_s if record.time_s else 1.0
            columns: dict[str, Any] = {name: getattr(place, name) for name in PLACE}
            columns |= {"arrival": curve.arrival, "time_s": [time_s * stretch for time_s in curve.time_s]}
            columns |= {"inner_steps": curve.inner_steps, "loss": curve.loss}
            for source, measures in curve.sources.items():
                columns |= {f"{measure}/{source}": values for measure, values in measures.items()}
            parts.append(pandas.DataFrame(columns).astype({"loss": float}))
        return pandas.concat(parts, ignore_index=True)

    @cached_property
    def summary(self) -> "pandas.DataFrame":
        """A row per row and method of the study: mean and sample standard deviation of the loss at the end over seeds, and how
        many seeds have one."""
        groups = self.runs.groupby(["row", "method"], sort=False).loss
        return groups.agg(["mean", "std", "count"]).reset_index()

    @cached_property
    def _places(self) -> list[PlaceRecord]:
        path = self.path / f"{self.manifest.study}.json"
        try:
            return msgspec.json.decode(path.read_bytes(), type=StudyNumbers).records
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}): give `heloco study` again, which writes it.") from error

    @cached_property
    def _records(self) -> dict[str, RunRecord]:
        store = RunStore(self.path.parent / RUNS)
        return {name: _record(store, name) for name in dict.fromkeys(place.run for place in self._places)}


def _record(store: RunStore, name: str) -> RunRecord:
    record = store.read(name)
    if record is None:
        raise UserError(f"{store.path(name)} is missing: keep the folder {store.folder} next to the study's.")
    return record


def load_study(path: str | PathLike[str]) -> StudyData:
    """The study in this folder, such as results/table1, as pandas DataFrames: `runs`, `curves` and `summary`."""
    check_pandas("heloco.load_study")
    folder = Path(path)
    if not (folder / MANIFEST).is_file():
        raise UserError(f"{folder} holds no study (it has no {MANIFEST}): give the folder that `heloco study` named.")
    return StudyData(folder, Folder(folder.parent, folder.resolve().name).manifest())
