"""From a tape to the numbers a person asks for first."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from heloco.records.evaluations import EvaluationRecord
from heloco.records.lines import read_records
from heloco.records.machine_ids import name_of
from heloco.records.run_facts import RunFacts
from heloco.records.run_files import EVALS, TAPE
from heloco.records.tape import CASES, ArrivalRecord


@dataclass(kw_only=True)
class ContributionTotals:
    """The part of a worker or of a machine in a run."""

    arrivals: int = 0
    refused: int = 0
    inner_steps: int = 0
    staleness_sum: int = 0
    took_s: float = 0.0
    """From handing out to arrival, of all rounds together; real runs only."""

    def count(self, record: ArrivalRecord) -> None:
        self.arrivals += 1
        self.inner_steps += record.inner_steps
        self.staleness_sum += record.staleness

    @property
    def mean_staleness(self) -> float:
        return self.staleness_sum / self.arrivals if self.arrivals else 0.0

    @property
    def measured_s(self) -> float | None:
        """An inner step, with its part of what the round's transfers took."""
        return self.took_s / self.inner_steps if self.took_s and self.inner_steps else None


@dataclass
class WorkerSummary(ContributionTotals):
    """All that came from one worker."""

    pace_s: float
    """The pace as the config says. The pace of real machines is measured instead."""
    max_staleness: int = 0
    last_staleness: int | None = None
    movement: float = 0.0
    loss: float | None = None
    shard: int | None = None


@dataclass
class MachineSummary(ContributionTotals):
    """All that came from one machine."""

    id: str
    workers: set[int] = field(default_factory=set)
    """The workers whose rounds the machine did."""
    last_arrival: int | None = None
    last_s: float | None = None


@dataclass
class RunSummary:
    """Adds up a run line by line, so that a display can show it at any moment; memory does not grow with the run."""

    paces: list[float]
    """The pace of each worker, as the config says."""
    is_real: bool = False
    """Whether the tape has the time of real machines, not that of a simulation."""
    is_external: bool = False
    """Whether model and data are the machines' own: then only they can evaluate."""
    window: int = 0
    """The number of last arrivals over which it is counted which machines participate."""
    workers: list[WorkerSummary] = field(init=False)
    arrivals: int = 0
    outer_step: int = 0
    time_s: float = 0.0
    units: int = 0
    inner_steps: int = 0
    cases: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CASES.values(), 0))
    verdicts: dict[str, int] = field(default_factory=dict)
    first_eval: EvaluationRecord | None = None
    last_eval: EvaluationRecord | None = None
    machines: dict[str, MachineSummary] = field(default_factory=dict)
    """By their ids; none in a simulation."""
    recent: deque[str] = field(init=False)
    """The machines of the last arrivals."""

    def __post_init__(self) -> None:
        self.workers = [WorkerSummary(pace) for pace in self.paces]
        self.recent = deque(maxlen=self.window)

    @classmethod
    def from_facts(cls, facts: RunFacts, window: int = 0) -> "RunSummary":
        """The summary of a run that has not begun."""
        return cls(facts.paces, facts.is_real, facts.is_external, window)

    @property
    def clock(self) -> str:
        """What kind of seconds the times are, as a word for people: real or virtual."""
        return "real" if self.is_real else "virtual"

    def add_arrival(self, record: ArrivalRecord) -> None:
        """Adds a line of the tape. A refused contribution counts only as refused."""
        worker = self.workers[record.worker]
        self.time_s = record.time_s
        self.outer_step = record.outer_step
        self.verdicts[record.verdict] = self.verdicts.get(record.verdict, 0) + 1
        if record.verdict == "refused":
            self.add_refusal(record.worker, record.machine)
            return
        self.arrivals = record.arrival
        self.units += record.units
        self.inner_steps += record.inner_steps
        worker.count(record)
        worker.max_staleness = max(worker.max_staleness, record.staleness)
        worker.last_staleness = record.staleness
        worker.loss, worker.shard = record.loss, record.shard
        if record.blocks is not None and record.verdict == "applied":
            worker.movement += sum(m * m for m in record.blocks.movement if m is not None) ** 0.5
            for letter, name in CASES.items():
                self.cases[name] += record.blocks.case.count(letter)
        if self.is_real:
            self._add_machine_arrival(worker, record)

    def _add_machine_arrival(self, worker: WorkerSummary, record: ArrivalRecord) -> None:
        machine = self.machine(record.machine)
        machine.count(record)
        for contributions in (worker, machine):
            contributions.took_s += record.time_s - record.start_s
        machine.workers.add(record.worker)
        machine.last_arrival, machine.last_s = record.arrival, record.time_s
        self.recent.append(machine.id)

    def machine(self, id: str) -> MachineSummary:
        """The summary of the machine with this id; an empty one is made for a machine that is new."""
        return self.machines.setdefault(id, MachineSummary(id))

    def label(self, machine: str) -> str:
        """What a machine is shown as: its name, or its id where others have the same name."""
        name = name_of(machine)
        return machine if sum(name_of(other) == name for other in self.machines) > 1 else name

    def add_refusal(self, worker: int, machine: str) -> None:
        """Counts a refused contribution of a worker, and of the machine that sent it unless `machine` is empty."""
        self.workers[worker].refused += 1
        if machine:
            self.machine(machine).refused += 1

    def add_evaluation(self, record: EvaluationRecord) -> None:
        """Takes in an evaluation of the run's model. The first and the last one are kept."""
        if not record.is_of_run:
            return
        self.first_eval = self.first_eval or record
        self.last_eval = record

    def pace_s(self, worker: WorkerSummary) -> float | None:
        """Seconds per inner step: a simulation's are given, those of real machines are measured."""
        return worker.measured_s if self.is_real else worker.pace_s

    def share(self, contributions: ContributionTotals) -> float:
        """The share of all accepted contributions that came from this worker or machine."""
        return contributions.arrivals / self.arrivals if self.arrivals else 0.0

    def recent_share(self, machine: MachineSummary) -> float:
        """The machine's share of the last arrivals."""
        return self.recent.count(machine.id) / len(self.recent) if self.recent else 0.0

    def movement_share(self, worker: WorkerSummary) -> float:
        """The worker's share of how far the outer parameters moved, summed over its arrivals."""
        total = sum(w.movement for w in self.workers)
        return worker.movement / total if total else 0.0


def summarize(summary: RunSummary, tape: Iterable[ArrivalRecord], evaluations: Iterable[EvaluationRecord] = ()) -> RunSummary:
    """Adds a tape and evaluations to a summary."""
    for arrival in tape:
        summary.add_arrival(arrival)
    for evaluation in evaluations:
        summary.add_evaluation(evaluation)
    return summary


def read_summary(folder: Path, facts: RunFacts) -> RunSummary:
    """The summary of the run in a folder, read line by line: memory does not grow with the run."""
    tape, evaluations = read_records(folder / TAPE, ArrivalRecord), read_records(folder / EVALS, EvaluationRecord)
    return summarize(RunSummary.from_facts(facts), tape, evaluations)
