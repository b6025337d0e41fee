"""Run folders as columns of numbers, as far as their tapes go. What was added since is read when it is asked for."""

import math
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from heloco.errors import UserError
from heloco.records.config_facts import read_all_settings, read_config
from heloco.records.evaluations import EvaluationRecord
from heloco.records.events import Event
from heloco.records.lines import RecordT, Tail
from heloco.records.run_facts import RunFacts, participation_window, read_facts
from heloco.records.run_files import CONFIG, EVALS, META, TAPE
from heloco.records.tape import ArrivalRecord, BlockColumns
from heloco.report.journal_summary import JournalSummary, JournalTail
from heloco.report.summary import RunSummary

BYTES_PER_NUMBER = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Models and pseudo-gradients travel in float32, unless the run's machines bring a model of another kind."""
NO_BLOCKS = BlockColumns("")


@dataclass
class Columns:
    """The tape, a column per number. Of the norms only those of all blocks together are kept. NaN where there is no number."""

    arrival: list[int] = field(default_factory=list)
    outer_step: list[int] = field(default_factory=list)
    worker: list[int] = field(default_factory=list)
    round: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    units: list[int] = field(default_factory=list)
    time_s: list[float] = field(default_factory=list)
    start_s: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    verdict: list[str] = field(default_factory=list)
    pseudo_gradient_norm: list[float] = field(default_factory=list)
    momentum_norm: list[float] = field(default_factory=list)
    movement: list[float] = field(default_factory=list)
    case: list[str] = field(default_factory=list)
    """A letter per block."""
    cosine: "list[array[float]]" = field(default_factory=list)
    """A number per block, in single precision: the tape has six digits."""
    machine: list[str] = field(default_factory=list)
    """Its id; empty in a simulation."""

    def __len__(self) -> int:
        return len(self.arrival)

    def append(self, record: ArrivalRecord) -> None:
        for name in ("arrival", "outer_step", "worker", "round", "staleness", "units", "time_s", "start_s", "verdict"):
            getattr(self, name).append(getattr(record, name))
        blocks = record.blocks or NO_BLOCKS
        for name in ("pseudo_gradient_norm", "momentum_norm", "movement"):
            getattr(self, name).append(_norm(getattr(blocks, name)))
        self.loss.append(_number(record.loss))
        self.case.append(blocks.case)
        self.cosine.append(array("f", map(_number, blocks.cosine)))
        self.machine.append(sys.intern(record.machine))


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _norm(values: Sequence[float | None]) -> float:
    """Of all blocks together."""
    return math.sqrt(sum(value * value for value in values if value is not None)) if values else math.nan


@dataclass(frozen=True)
class Milestone:
    """Where a run stands and what its machines say of their losses, if nothing is evaluated."""

    arrival: int
    outer_step: int
    time_s: float
    units: int
    training_loss: float | None


class Run:
    """One run as its folder tells it; `refresh` takes in what was added."""

    def __init__(self, path: Path) -> None:
        if not (path / CONFIG).is_file():
            raise UserError(
                f"{path} is no run folder (it has no {CONFIG}): give the folder that `heloco train` or `serve` named."
            )
        self.path = path
        self.name = path.resolve().name
        self.config = read_all_settings(path / CONFIG)
        self.config_facts = read_config(path / CONFIG)
        self.facts: RunFacts = read_facts(path / META)
        self._start()
        self.refresh()

    def _start(self) -> None:
        self.tape, self.evals, self.milestones = Columns(), list[EvaluationRecord](), list[Milestone]()
        self.own_evals = list[EvaluationRecord]()
        """Scores of what single machines had made within their rounds. They are not the run's."""
        self._stages_of_machines = list[EvaluationRecord | Milestone]()
        self.summary = RunSummary.from_facts(self.facts, self.window if self.facts.is_real else 0)
        self.journal = JournalSummary()
        self._tape_tail = Tail(self.path / TAPE, ArrivalRecord)
        self._evals_tail = Tail(self.path / EVALS, EvaluationRecord)
        self._journal_tail = JournalTail(self.path) if self.facts.is_real else None

    def refresh(self) -> bool:
        """Whether there was anything new. The tape of a run that was resumed was cut back: it is read from its start again."""
        try:
            was_cut = self._tape_tail.was_cut() or self._evals_tail.was_cut()
            if was_cut or (self._journal_tail is not None and self._journal_tail.was_cut()):
                self._start()
            before = self._count_records()
            self._read_on(self._tape_tail, self._add_arrival)
            self._read_on(self._evals_tail, self._add_evaluation)
            for event in self._journal_tail.more() if self._journal_tail is not None else ():
                self._add_event(event)
        except OSError as error:
            raise UserError(f"{self.path} cannot be read ({error.strerror}): give folders that you may read.") from error
        return self._count_records() != before

    def _count_records(self) -> int:
        return len(self.tape) + len(self.evals) + len(self.own_evals) + self.journal.changes

    def _read_on(self, tail: Tail[RecordT], take: Callable[[RecordT], None]) -> None:
        for record in tail.more():
            try:
                take(record)
            except IndexError:
                raise tail.line_error("there is no such worker") from None

    def _add_arrival(self, record: ArrivalRecord) -> None:
        self.summary.add_arrival(record)
        self.tape.append(record)
        if self.facts.is_external and record.verdict != "refused":
            self._add_milestone(record)

    def _add_milestone(self, record: ArrivalRecord) -> None:
        """As often as the run would be evaluated."""
        every = self.config_facts.run.milestone_interval
        if record.arrival % every == 0 or record.arrival == self.planned:
            losses = [loss for loss in self.tape.loss[-every:] if math.isfinite(loss)]
            loss = sum(losses) / len(losses) if losses else None
            self.milestones.append(Milestone(record.arrival, record.outer_step, record.time_s, self.summary.units, loss))
            self._stages_of_machines.append(self.milestones[-1])

    def _add_event(self, event: Event) -> None:
        if refusal := self.journal.follow(event):
            self.summary.verdicts["refused"] = self.summary.verdicts.get("refused", 0) + 1
            self.summary.add_refusal(*refusal)

    def _add_evaluation(self, record: EvaluationRecord) -> None:
        if not record.is_of_run:
            self.own_evals.append(record)
            return
        self.evals.append(record)
        self.summary.add_evaluation(record)
        self._stages_of_machines.append(record)

    # ---- what it says about itself

    @property
    def method(self) -> str:
        """The name of the run's outer method."""
        return self.facts.method

    @property
    def planned(self) -> int:
        """The number of arrivals after which the run ends."""
        return self.config_facts.run.arrivals

    @property
    def window(self) -> int:
        """The number of last arrivals over which it is counted who participates."""
        return participation_window(self.config_facts.cluster.participation, len(self.facts.paces))

    @property
    def min_workers(self) -> int:
        """With fewer participating machines the run pauses."""
        return self.config_facts.cluster.min_workers

    @property
    def has_journal(self) -> bool:
        """A run that is watched from elsewhere may be here without it."""
        return self._journal_tail is not None and self._journal_tail.exists

    @property
    def is_whole(self) -> bool:
        """Whether its last arrival is there, and what is shown of it: an evaluation is written after the arrival it follows. In
        an external run there may be none."""
        stages = self.milestones if self.facts.is_external else self.evals
        return bool(stages) and stages[-1].arrival >= self.planned

    @property
    def stages(self) -> Sequence[EvaluationRecord | Milestone]:
        """Its evaluations. In an external run also its milestones, as they came."""
        return self._stages_of_machines if self.facts.is_external else self.evals

    @property
    def cut_files(self) -> list[str]:
        """The files whose last line has no end."""
        return [tail.path.name for tail in (self._tape_tail, self._evals_tail) if tail.has_cut_line]

    @property
    def sources(self) -> list[str]:
        """The names of what was evaluated, such as languages, in the order in which they first appear."""
        return list(dict.fromkeys(source for record in self.evals for source in record.scores))

    @property
    def measures(self) -> list[str]:
        """The names of what evaluations measure, such as `loss`, in the order in which they first appear."""
        return list(dict.fromkeys(measure for record in self.evals for measure in record.mean))

    @property
    def round_bytes(self) -> int:
        """What a round moves: the model to the worker, and the pseudo-gradient back."""
        blocks = self.facts.blocks
        dtypes = self.facts.dtypes or ["float32"] * len(blocks)
        return 2 * sum(BYTES_PER_NUMBER.get(d, 4) * math.prod(b.shape) for b, d in zip(blocks, dtypes, strict=False))

    def task(self) -> tuple[str, str]:
        """Runs with the same can be compared: the task, and for a language model its text and tokenizer."""
        kind = self.config_facts.input.task
        return kind, self.facts.task_digest if kind == "language" else ""


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Runs that can be compared with each other, each with a name of its own."""
    path_of = {path.resolve(): path for path in reversed(paths)}
    runs = [Run(path_of[path]) for path in dict.fromkeys(path.resolve() for path in paths)]
    _name_apart(runs)
    _check_comparable(runs)
    if not any(run.evals or run.facts.is_external for run in runs):
        names = ", ".join(str(run.path) for run in runs)
        raise UserError(f"Nothing has been evaluated yet in {names}: wait for the first evaluation, or `heloco resume` the run.")
    return runs


def _name_apart(runs: Sequence[Run]) -> None:
    """By the folder's name; where two share it, by as much of the path as tells them apart."""
    parts, length = [run.path.resolve().parts for run in runs], 1
    while length < max(map(len, parts)) and len({part[-length:] for part in parts}) < len(runs):
        length += 1
    for run, part in zip(runs, parts, strict=True):
        run.name = "/".join(part[-length:])


def _check_comparable(runs: Sequence[Run]) -> None:
    first = runs[0]
    for other in runs[1:]:
        (kind, digest), (other_kind, other_digest) = first.task(), other.task()
        if kind != other_kind:
            raise UserError(
                f"{first.path} trains on the task {kind} and {other.path} on {other_kind}: give runs of one task, the others "
                "in a command of their own."
            )
        if digest != other_digest:
            raise UserError(
                f"{first.path} and {other.path} were trained on different text or with different tokenizers, so their losses "
                "cannot be compared: give runs of one task, the others in a command of their own."
            )
