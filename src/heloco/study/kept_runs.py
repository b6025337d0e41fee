"""A finished run as it is kept: one small JSON file, named by its digest, whole or not there at all."""

import re
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from heloco.disk import disk_errors, write_atomically
from heloco.engine.local import Collector
from heloco.errors import UserError
from heloco.records.json_numbers import shorten_number
from heloco.records.provenance import Provenance
from heloco.report.summary import RunSummary, summarize
from heloco.run import RunConfig
from heloco.run.config import Settings
from heloco.study.grid import FORMAT, digest, settings_of

Numbers = list[float | None]


class Curve(Struct, frozen=True, forbid_unknown_fields=True):
    """A run's evaluations, column by column: half the size of one record each."""

    arrival: list[int]
    time_s: list[float]
    inner_steps: list[int]
    loss: Numbers
    """The mean over the sources."""
    sources: dict[str, dict[str, Numbers]]
    """Source -> measure -> values."""

    def __post_init__(self) -> None:
        lengths = {len(column) for column in (self.arrival, self.time_s, self.inner_steps, self.loss)}
        lengths |= {len(values) for measures in self.sources.values() for values in measures.values()}
        if not self.arrival or len(lengths) != 1:
            raise ValueError("its evaluations are not of one length")


class RunRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run that has ended: what decided it, how it ended, and its evaluations."""

    format: int
    digest: str
    task: str
    """The data's digest."""
    settings: Settings
    computed: Provenance
    verdict: Literal["finished", "diverged"]
    reason: str
    time_s: float
    """Virtual time of the last arrival."""
    arrivals: list[int]
    """The arrivals of each worker."""
    mean_staleness: list[float]
    refused: int
    cases: dict[str, int]
    """What the correction did, over all blocks and arrivals."""
    evals: Curve

    def __post_init__(self) -> None:
        if self.format != FORMAT:
            raise ValueError(f"it has no format {FORMAT}")

    @property
    def finished(self) -> bool:
        return self.verdict == "finished"


def make_record(
    config: RunConfig, task_digest: str, computed: Provenance, collector: Collector, diverged: str | None = None
) -> RunRecord:
    """The record of a run that has just ended; `diverged` says why it did not get to its end; None if it did."""
    summary = summarize(RunSummary(config.rounds.paces), collector.tape)
    evals = collector.evals
    last = evals[-1].scores
    curve = Curve(
        [record.arrival for record in evals],
        [record.time_s for record in evals],
        [record.inner_steps for record in evals],
        [_short(record.mean.get("loss")) for record in evals],
        {name: {m: [_short(record.scores[name][m]) for record in evals] for m in last[name]} for name in last},
    )
    return RunRecord(
        format=FORMAT,
        digest=digest(config, task_digest),
        task=task_digest,
        settings=settings_of(config),
        computed=computed,
        verdict="finished" if diverged is None else "diverged",
        reason=diverged or "",
        time_s=summary.time_s,
        arrivals=[worker.arrivals for worker in summary.workers],
        mean_staleness=[round(worker.mean_staleness, 3) for worker in summary.workers],
        refused=sum(worker.refused for worker in summary.workers),
        cases=summary.cases,
        evals=curve,
    )


def _short(value: float | None) -> float | None:
    """Five digits: a loss differs from seed to seed in the third."""
    return shorten_number(value, 5)


class RunStore:
    """The folder of kept runs. Studies share it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def check(self) -> None:
        """Refuses a folder that holds something else."""
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"{self.folder} is no folder: choose another --out.")
        for path in sorted(self.folder.iterdir()) if self.folder.exists() else ():
            if not re.fullmatch(r"[0-9a-f]{24}\.json|\..*", path.name):
                raise UserError(f"{self.folder} belongs to something else (it holds {path.name}): choose another --out.")

    def read(self, name: str) -> RunRecord | None:
        """The run of this digest, if it is kept; a file that is no such run is refused by its name."""
        path = self.path(name)
        if not path.exists():
            return None
        try:
            record = msgspec.json.decode(path.read_bytes(), type=RunRecord)
            if record.digest != name:
                raise ValueError(f"it is run {record.digest}")
        except (OSError, ValueError) as error:
            raise UserError(
                f"{path} is not the finished run that its name says ({error}): delete it, and the run is made again."
            ) from error
        return record

    def write(self, record: RunRecord) -> None:
        with disk_errors(self.folder, "give the same command again: finished runs are kept."):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path(record.digest), msgspec.json.encode(record))
