"""The evaluations of a served run, which never hold its lock.

1. An evaluation is due. The outer model of that arrival is written to a file in the background.
2. The file is evaluated, in a process of its own if the model is large, and removed.
3. The line is written.

Evaluations are made one after the other, in the order of their arrivals. A restart goes on with those that are still due.

In an external run only the machines can evaluate. An evaluation becomes due while a machine is here that offers it, and what the
machine finds is an event of the journal.
"""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec
import xxhash
from msgspec import Struct
from torch import Tensor

from heloco.cluster.server.tensor_readers import TensorReaders
from heloco.cluster.server.transfers import make_folder
from heloco.disk import file_digest
from heloco.records.evaluations import EvaluationRecord
from heloco.records.run_files import EVALS
from heloco.run.folder import whole_lines
from heloco.task import Scores, check_scores
from heloco.wire.layout import Layout, write

FOLDER = "evaluating"
WAITING_LIMIT = 8
"""Models that may wait for their evaluation on disk. If evaluations take longer than the time between them, some are left out."""
LENT_LIMIT_S = 3600.0
"""Seconds that a machine may take for an evaluation."""
LOOK_EVERY_S = 0.5
"""Seconds after which the thread looks again whether a machine has left that should have evaluated."""
NICENESS = 10
"""An evaluation may take longer. An acknowledgement may not."""
log = logging.getLogger("heloco.server")


class EvaluationDue(Struct, frozen=True, kw_only=True):
    """Where the run was when an evaluation became due: the first fields of its line."""

    arrival: int
    outer_step: int
    time_s: float
    inner_steps: int
    units: int

    def matches(self, record: EvaluationRecord) -> bool:
        """Whether the line is of this very arrival, and not of another one that was lost in a power cut."""
        return (record.arrival, record.time_s) == (self.arrival, self.time_s)


def evaluations_after(run: Path, evals_bytes: int) -> list[EvaluationRecord]:
    """The evaluations whose lines come after this byte in a run's folder, up to the first damaged one."""
    path, records = run / EVALS, list[EvaluationRecord]()
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(whole_lines(path, evals_bytes))
        for line in file:
            try:
                records.append(msgspec.json.decode(line, type=EvaluationRecord))
            except msgspec.MsgspecError:
                break
    return records


class Scorer(Protocol):
    """Evaluates the outer model in a file."""

    def __call__(self, model: Path) -> Scores: ...
    def close(self) -> None: ...


class EvaluationQueue:
    """`record` writes the line of an evaluation, with the name of the machine that made it. Without a `scorer` only machines
    evaluate."""

    def __init__(
        self,
        run: Path,
        layout: Layout,
        scorer: Scorer | None,
        record: Callable[[EvaluationDue, Scores, str], None],
        readers: TensorReaders,
    ) -> None:
        self.folder = make_folder(run / FOLDER)
        self._layout, self._scorer, self._record, self._readers = layout, scorer, record, readers
        self._due: deque[EvaluationDue] = deque()
        self._copy_arrivals: set[int] = set()
        """Arrivals whose models are being copied to their files."""
        self._models: dict[int, Path] = {}
        """Arrival -> the file of its model. Its digest is in its name, as a power cut may have changed its content."""
        self._surplus: list[Path] = []
        """Files of models that were evaluated or left out."""
        self._earlier: dict[int, EvaluationRecord] = {}
        """Arrival -> its line, if that was written after the checkpoint from which the run was resumed."""
        self._is_evaluating = False
        """Whether the thread evaluates the first model."""
        self._lent_to: str | None = None
        """The machine that evaluates the first model; None if none does."""
        self._lent_until_s = 0.0
        self.is_left_to: Callable[[str | None], bool] = lambda _: False
        """Whether a machine, or if None any machine, is here and evaluates."""
        self.is_hopeless: Callable[[], bool] = lambda: False
        """Whether no machine will come any more that could evaluate."""
        self.newest = -1
        """The newest arrival whose evaluation became due here."""
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._evaluate_all, name="heloco-evaluations", daemon=True)

    # ---- from the run, under its lock

    def add(self, due: EvaluationDue, tensors: Mapping[str, Tensor], *, was_due: bool = False) -> EvaluationRecord | None:
        """Begins an evaluation of these tensors. Returns its line if it was made before a restart. If only machines evaluate, it
        begins if one of them is here, or if it `was_due` before a restart."""
        if (earlier := self._earlier.pop(due.arrival, None)) and due.matches(earlier):
            return earlier
        if self._scorer is None and not (was_due or self._is_wanted(due)):
            return None
        with self._changed:
            self._due.append(due)
            self.newest = due.arrival
            self._copy_arrivals.add(due.arrival)
            if len(self._due) > WAITING_LIMIT:
                self._leave_out(self._due[WAITING_LIMIT // 2])  # neither the first, which is under way, nor the last
        leave = self._readers.enter()
        try:
            threading.Thread(target=self._copy, args=(due, tensors, leave), name="heloco-copy").start()
        except RuntimeError:  # no thread is available
            self._copy(due, tensors, leave)
        return None

    def _is_wanted(self, due: EvaluationDue) -> bool:
        """Whether a machine is here that evaluates. While a restart follows the journal: whether one was here at this arrival."""
        if self._thread.ident is not None:
            return self.is_left_to(None)
        return any(self.folder.glob(f"{_file_name(due)}.*"))

    def _leave_out(self, due: EvaluationDue, reason: str = "evaluations take longer than the time between them") -> None:
        log.warning("The evaluation at arrival %d was left out: %s.", due.arrival, reason)
        self._due.remove(due)
        self._remove_model(due)

    def _remove_model(self, due: EvaluationDue) -> None:
        """Leaves the file to a thread: it is as large as the model, and arrivals wait for `_changed`."""
        if path := self._models.pop(due.arrival, None):
            self._surplus.append(path)

    def _remove_surplus(self) -> None:
        with self._changed:
            surplus, self._surplus = self._surplus, []
        for path in surplus:
            with contextlib.suppress(OSError):  # the next start of the run removes what is left
                path.unlink()

    def _copy(self, due: EvaluationDue, tensors: Mapping[str, Tensor], leave: Callable[[], None]) -> None:
        name, digest = _file_name(due), xxhash.xxh3_128()
        partial = self.folder / f"{name}.partial"
        try:
            with partial.open("wb", buffering=0) as file:
                write(file, self._layout, tensors, hashed=digest)
            self._models[due.arrival] = partial.rename(self.folder / f"{name}.{digest.hexdigest()}.safetensors")
        except OSError as error:
            log.warning("The evaluation at arrival %d was left out: its model could not be written (%s).", due.arrival, error)
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
        finally:
            leave()
            with self._changed:
                self._copy_arrivals.discard(due.arrival)
                if due not in self._due:
                    self._remove_model(due)
                self._changed.notify_all()
            self._remove_surplus()  # the other thread may evaluate for a long time

    @contextmanager
    def hold_due(self) -> Iterator[tuple[EvaluationDue, ...]]:
        """The evaluations that are still due. No line is written inside this context."""
        with self._changed:
            yield tuple(self._due)

    @property
    def waiting(self) -> int:
        """The number of evaluations that are due."""
        return len(self._due)

    # ---- after a restart

    def take_up(
        self, due: Iterable[EvaluationDue], earlier: Iterable[EvaluationRecord], arrival: int, tensors: Mapping[str, Tensor]
    ) -> list[EvaluationRecord]:
        """Goes on with what is due at a checkpoint, of which these are the arrival and the tensors. `earlier`: lines that were
        written after it. Returns those that stay."""
        self._earlier = {record.arrival: record for record in earlier if record.is_of_run}
        valid_records = []
        for each in due:
            if (record := self._earlier.get(each.arrival)) and each.matches(record):
                valid_records.append(self._earlier.pop(each.arrival))
            elif path := self._intact_model(each):
                self._models[each.arrival] = path
                self._due.append(each)
                self.newest = each.arrival
            elif each.arrival == arrival:
                self.add(each, tensors, was_due=True)
            else:
                log.warning("The evaluation at arrival %d was left out: its model is gone.", each.arrival)
        if self._scorer is None:  # the lines follow from events of the journal
            self._earlier, valid_records = {}, []
        return valid_records

    def _intact_model(self, due: EvaluationDue) -> Path | None:
        paths = self.folder.glob(f"{_file_name(due)}.*.safetensors")
        return next((path for path in paths if file_digest(path) == path.name.split(".")[1]), None)

    def is_possible(self, due: EvaluationDue, arrival: int) -> bool:
        """Whether it can be evaluated after a restart from the checkpoint at this arrival, or need not be: what machines find
        cannot be found again, so it does not matter that a model of theirs is lost."""
        return self._scorer is None or due.arrival == arrival or self._intact_model(due) is not None

    def start(self) -> None:
        """Begins to evaluate. Until then evaluations are only collected."""
        with self._changed:
            self._changed.wait_for(lambda: not self._copy_arrivals)
        still_due = set(self._models.values())
        for path in self.folder.iterdir():
            if path not in still_due and path.suffix in (".safetensors", ".partial"):
                path.unlink(missing_ok=True)
        self._earlier = {}
        self._thread.start()

    # ---- evaluations by machines

    def lend(self, machine: str) -> tuple[EvaluationDue, str] | None:
        """Leaves the first model to a machine. Returns it with the digest of its file; None if there is none for this machine."""
        with self._changed:
            if not self._due or self._is_over or self._is_evaluating or (self._is_lent() and self._lent_to != machine):
                return None
            due = self._due[0]
            path = self._models.get(due.arrival)
            if path is None:
                return None
            if not self._is_lent():
                self._lent_to, self._lent_until_s = machine, time.monotonic() + LENT_LIMIT_S
            return due, path.name.split(".")[1]

    def _is_lent(self) -> bool:
        return self._lent_to is not None and time.monotonic() < self._lent_until_s and self.is_left_to(self._lent_to)

    def lent_model(self, machine: str, arrival: int) -> Path | None:
        """The model file of an evaluation; None if the evaluation is not, or is no longer, left to this machine."""
        with self._changed:
            return self._models.get(arrival) if self._is_lent_now(machine, arrival) else None

    def take_in(self, machine: str, arrival: int, scores: Scores) -> None:
        """Records what a machine found. If the evaluation was not, or is no longer, left to it, nothing happens."""
        with self._changed:
            if self._is_lent_now(machine, arrival):
                self._finish(self._due[0], scores, machine)

    def lent_due(self, machine: str, arrival: int) -> EvaluationDue | None:
        """An evaluation that is left to this machine; None if it is not, or is no longer."""
        with self._changed:
            return self._due[0] if self._is_lent_now(machine, arrival) else None

    def give_back(self, machine: str, arrival: int, reason: str) -> None:
        """Leaves out an evaluation that the machine could not make."""
        with self._changed:
            if self._is_lent_now(machine, arrival):
                self._lent_to = None
                self._leave_out(self._due[0], f"{machine} could not make it ({reason})")
                self._changed.notify_all()

    def settle(self, arrival: int) -> None:
        """The model of this arrival was evaluated. Neither it nor an older one is due any more."""
        with self._changed:
            for due in [due for due in self._due if due.arrival <= arrival]:
                self._finish(due, None)

    def _is_lent_now(self, machine: str, arrival: int) -> bool:
        is_first = bool(self._due) and self._due[0].arrival == arrival
        return self._lent_to == machine and is_first and not self._is_evaluating and not self._is_over

    def _finish(self, due: EvaluationDue, scores: Scores | None, machine: str = "") -> None:
        self._lent_to = None
        if due in self._due:
            if scores is not None:
                self._record_line(due, scores, machine)
            self._due.remove(due)  # only now: a thread that sees that nothing is due must find the line
        self._remove_model(due)
        self._changed.notify_all()

    # ---- the thread

    def _evaluate_all(self) -> None:
        with contextlib.suppress(AttributeError, OSError):  # Linux gives each thread a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (due := self._next()) is not None:
            scores = self._score(due)
            with self._changed:
                self._is_evaluating = False
                if not self._is_over:
                    self._finish(due, scores)

    def _next(self) -> EvaluationDue | None:
        """The next evaluation that is not left to a machine. None at the end. Before that, files that are no longer needed are
        removed."""
        while True:
            self._remove_surplus()
            with self._changed:
                if self._scorer is None:
                    self._leave_out_what_nobody_evaluates()
                if self._surplus:
                    continue
                if self._is_over:
                    return None
                if self._scorer is not None and self._is_first_due_here():
                    self._is_evaluating = True
                    return self._due[0]
                self._changed.wait(LOOK_EVERY_S if self._due else None)

    def _leave_out_what_nobody_evaluates(self) -> None:
        for due in list(self._due):
            if due.arrival not in self._models and due.arrival not in self._copy_arrivals:
                self._leave_out(due, "its model is gone")
            elif self.is_hopeless():
                self._leave_out(due, "no machine is here that evaluates")
        if not self._due:
            self._changed.notify_all()

    def _is_first_due_here(self) -> bool:
        due = self._due[0] if self._due else None
        if due is None or due.arrival in self._copy_arrivals:
            return False
        return not (due.arrival in self._models and self._is_a_machines())

    def _is_a_machines(self) -> bool:
        return self._is_lent() or self.is_left_to(None)

    def _score(self, due: EvaluationDue) -> Scores | None:
        path = self._models.get(due.arrival)
        if path is None or self._scorer is None:
            return None
        try:
            return check_scores(self._scorer(path))
        except Exception as error:  # a task is the user's own code
            if not self._is_over:
                log.warning("The evaluation at arrival %d failed: %s", due.arrival, error, exc_info=error)
            return None

    def _record_line(self, due: EvaluationDue, scores: Scores, machine: str) -> None:
        try:
            self._record(due, scores, machine)
        except Exception as error:  # an error that ended the thread would leave `wait` waiting
            text = "The evaluation at arrival %d was left out: its line could not be written (%s)."
            log.warning(text, due.arrival, error, exc_info=None if isinstance(error, OSError) else error)

    # ---- the end

    def wait(self) -> None:
        """Returns when nothing is due any more."""
        with self._changed:
            self._changed.wait_for(lambda: not self._due or self._is_over)

    def close(self) -> None:
        """Ends the evaluation under way. It stays due."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._scorer is not None:
            self._scorer.close()
        if self._thread.ident is not None:
            self._thread.join()


def _file_name(due: EvaluationDue) -> str:
    """What the names of its model's files begin with."""
    return f"arrival-{due.arrival:08d}"
