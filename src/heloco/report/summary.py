"""From a tape to the numbers a person asks for first. Reads plain records: no torch, no engine."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

CASES = {"k": "kept", "d": "damped", "t": "turned", "s": "skipped"}
EXTERNAL = "external"
"""The digest of a task that only the machines know."""
Record = dict[str, Any]


@dataclass(kw_only=True)
class Contributions:
    """Somebody's part in a run: a worker's, or a machine's."""

    arrivals: int = 0
    refused: int = 0
    inner_steps: int = 0
    staleness_sum: int = 0
    took_s: float = 0.0
    """From handing out to arrival, of all rounds together; real runs only."""

    def took_part(self, line: Record) -> None:
        self.arrivals += 1
        self.inner_steps += line["inner_steps"]
        self.staleness_sum += line["staleness"]

    @property
    def mean_staleness(self) -> float:
        return self.staleness_sum / self.arrivals if self.arrivals else 0.0

    @property
    def measured_s(self) -> float | None:
        """An inner step, with its part of what the round's transfers took."""
        return self.took_s / self.inner_steps if self.took_s and self.inner_steps else None


@dataclass
class WorkerSummary(Contributions):
    pace_s: float
    """As the config says; what real machines need is measured."""
    max_staleness: int = 0
    last_staleness: int | None = None
    movement: float = 0.0
    loss: float | None = None
    shard: int | None = None


@dataclass
class MachineSummary(Contributions):
    """All that came from one machine."""

    id: str
    workers: set[int] = field(default_factory=set)
    """Whose rounds it did."""
    last_arrival: int | None = None
    last_s: float | None = None


def name_of(machine: str) -> str:
    """What a machine calls itself: its id is that, # and something random."""
    return machine.rpartition("#")[0] or machine


@dataclass
class RunSummary:
    """Adds up a run line by line, so that a display can show it at any moment; memory does not grow with the run."""

    meta: Record
    window: int = 0
    """Over so many arrivals it is counted which machines take part."""
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
    machines: dict[str, MachineSummary] = field(default_factory=dict)
    """By their ids; none in a simulation."""
    recent: deque[str] = field(init=False)
    """The machines of the last arrivals."""

    def __post_init__(self) -> None:
        self.workers = [WorkerSummary(pace) for pace in self.meta["paces"]]
        self.recent = deque(maxlen=self.window)

    @property
    def clock(self) -> str:
        """Which time the tape has: that of a simulation, or that of real machines."""
        return str(self.meta.get("clock", "virtual"))

    @property
    def real(self) -> bool:
        return self.clock == "real"

    @property
    def external(self) -> bool:
        """Whether model and data are the machines' own: then nothing is evaluated."""
        return self.meta.get("task_digest") == EXTERNAL

    def arrived(self, line: Record) -> None:
        worker = self.workers[line["worker"]]
        self.time_s = line["time_s"]
        self.outer_step = line["outer_step"]
        self.verdicts[line["verdict"]] = self.verdicts.get(line["verdict"], 0) + 1
        if line["verdict"] == "refused":
            self.refused(line["worker"], line.get("machine"))
            return
        self.arrivals = line["arrival"]
        self.units += line["units"]
        self.inner_steps += line["inner_steps"]
        worker.took_part(line)
        worker.max_staleness = max(worker.max_staleness, line["staleness"])
        worker.last_staleness = line["staleness"]
        worker.loss, worker.shard = line["loss"], line["shard"]
        blocks = line.get("blocks")
        if blocks and line["verdict"] == "applied":
            worker.movement += sum(m * m for m in blocks.get("movement", ())) ** 0.5
            for letter, name in CASES.items():
                self.cases[name] += blocks["case"].count(letter)
        if self.real:
            self._contributed(worker, line)

    def _contributed(self, worker: WorkerSummary, line: Record) -> None:
        machine = self.machine(line["machine"])
        machine.took_part(line)
        for part in (worker, machine):
            part.took_s += line["time_s"] - line["start_s"]
        machine.workers.add(line["worker"])
        machine.last_arrival, machine.last_s = line["arrival"], line["time_s"]
        self.recent.append(machine.id)

    def machine(self, id: str) -> MachineSummary:
        return self.machines.setdefault(id, MachineSummary(id))

    def label(self, machine: str) -> str:
        """What a machine is shown as: its name, or its id where others have the same name."""
        name = name_of(machine)
        return machine if sum(name_of(other) == name for other in self.machines) > 1 else name

    def refused(self, worker: int, machine: str | None) -> None:
        self.workers[worker].refused += 1
        if machine is not None:
            self.machine(machine).refused += 1

    def evaluated(self, line: Record) -> None:
        self.first_eval = self.first_eval or line
        self.last_eval = line

    def pace_s(self, worker: WorkerSummary) -> float | None:
        """Seconds per inner step: a simulation's are given, those of real machines are measured."""
        return worker.measured_s if self.real else worker.pace_s

    def share(self, of: Contributions) -> float:
        return of.arrivals / self.arrivals if self.arrivals else 0.0

    def recent_share(self, machine: MachineSummary) -> float:
        """Of the last arrivals."""
        return self.recent.count(machine.id) / len(self.recent) if self.recent else 0.0

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
