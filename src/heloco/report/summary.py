"""From a tape to the numbers a person asks for first. Reads plain records: no torch, no engine."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

CASES = {"k": "kept", "d": "damped", "t": "turned", "s": "skipped"}
Record = dict[str, Any]


@dataclass
class WorkerSummary:
    pace_s: float
    arrivals: int = 0
    refused: int = 0
    inner_steps: int = 0
    staleness_sum: int = 0
    max_staleness: int = 0
    last_staleness: int | None = None
    movement: float = 0.0
    loss: float | None = None
    shard: int | None = None

    @property
    def mean_staleness(self) -> float:
        return self.staleness_sum / self.arrivals if self.arrivals else 0.0


@dataclass
class RunSummary:
    """Adds up a run line by line, so that a display can show it at any moment; memory does not grow with the run."""

    meta: Record
    workers: list[WorkerSummary] = field(init=False)
    arrivals: int = 0
    outer_step: int = 0
    time_s: float = 0.0
    units: int = 0
    inner_steps: int = 0
    cases: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CASES.values(), 0))
    verdicts: dict[str, int] = field(default_factory=dict)
    first_eval: Record | None = None
    last_eval: Record | None = None

    def __post_init__(self) -> None:
        self.workers = [WorkerSummary(pace) for pace in self.meta["paces"]]

    def arrived(self, line: Record) -> None:
        worker = self.workers[line["worker"]]
        self.time_s = line["time_s"]
        self.outer_step = line["outer_step"]
        self.verdicts[line["verdict"]] = self.verdicts.get(line["verdict"], 0) + 1
        if line["verdict"] == "refused":
            worker.refused += 1
            return
        self.arrivals = line["arrival"]
        self.units += line["units"]
        self.inner_steps += line["inner_steps"]
        worker.arrivals += 1
        worker.inner_steps += line["inner_steps"]
        worker.staleness_sum += line["staleness"]
        worker.max_staleness = max(worker.max_staleness, line["staleness"])
        worker.last_staleness = line["staleness"]
        worker.loss, worker.shard = line["loss"], line["shard"]
        blocks = line.get("blocks")
        if blocks and line["verdict"] == "applied":
            worker.movement += sum(m * m for m in blocks.get("movement", ())) ** 0.5
            for letter, name in CASES.items():
                self.cases[name] += blocks["case"].count(letter)

    def evaluated(self, line: Record) -> None:
        self.first_eval = self.first_eval or line
        self.last_eval = line

    def share(self, worker: WorkerSummary) -> float:
        return worker.arrivals / self.arrivals if self.arrivals else 0.0

    def movement_share(self, worker: WorkerSummary) -> float:
        total = sum(w.movement for w in self.workers)
        return worker.movement / total if total else 0.0


def summarize(meta: Record, tape: Iterable[Record], evals: Iterable[Record]) -> RunSummary:
    summary = RunSummary(meta)
    for line in tape:
        summary.arrived(line)
    for line in evals:
        summary.evaluated(line)
    return summary
