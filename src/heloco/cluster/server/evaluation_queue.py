"""The evaluations of a served run, which never hold its lock.

1. An evaluation is due. The outer model of that arrival is written to a file in the background.
2. The file is evaluated, in a process of its own if the model is large, and removed.
3. The line is written.

Evaluations are made one after the other, in the order of their arrivals. A restart goes on with those that are still due.
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
    """`record` writes the line of an evaluation, with the name of the machine that made it."""

    def __init__(
        self,
        run: Path,
        layout: Layout,
        scorer: Scorer,
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
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._evaluate_all, name="heloco-evaluations", daemon=True)

    # ---- from the run, under its lock

    def add(self, due: EvaluationDue, tensors: Mapping[str, Tensor]) -> EvaluationRecord | None:
        """Begins an evaluation of these tensors. Returns its line if it was made before a restart."""
        if (earlier := self._earlier.pop(due.arrival, None)) and due.matches(earlier):
            return earlier
        with self._changed:
            self._due.append(due)
            self._copy_arrivals.add(due.arrival)
            if len(self._due) > WAITING_LIMIT:
                self._leave_out(self._due[WAITING_LIMIT // 2])  # neither the first, which is under way, nor the last
        leave = self._readers.enter()
        try:
            threading.Thread(target=self._copy, args=(due, tensors, leave), name="heloco-copy").start()
        except RuntimeError:  # no thread is available
            self._copy(due, tensors, leave)
        return None

    def _leave_out(self, due: EvaluationDue) -> None:
        log.warning("The evaluation at arrival %d was left out: evaluations take longer than the time between them.", due.arrival)
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
        name, digest = f"arrival-{due.arrival:08d}", xxhash.xxh3_128()
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
        self._earlier = {record.arrival: record for record in earlier}
        valid_records = []
        for each in due:
            if (record := self._earlier.get(each.arrival)) and each.matches(record):
                valid_records.append(self._earlier.pop(each.arrival))
            elif path := self._intact_model(each):
                self._models[each.arrival] = path
                self._due.append(each)
            elif each.arrival == arrival:
                self.add(each, tensors)
            else:
                log.warning("The evaluation at arrival %d was left out: its model is gone.", each.arrival)
        return valid_records

    def _intact_model(self, due: EvaluationDue) -> Path | None:
        paths = self.folder.glob(f"arrival-{due.arrival:08d}.*.safetensors")
        return next((path for path in paths if file_digest(path) == path.name.split(".")[1]), None)

    def is_possible(self, due: EvaluationDue, arrival: int) -> bool:
        """Whether it can be evaluated after a restart from the checkpoint at this arrival."""
        return due.arrival == arrival or self._intact_model(due) is not None

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
                if self._surplus:
                    continue
                if self._is_over:
                    return None
                if self._is_first_due_here():
                    self._is_evaluating = True
                    return self._due[0]
                self._changed.wait(LOOK_EVERY_S if self._due else None)

    def _is_first_due_here(self) -> bool:
        due = self._due[0] if self._due else None
        if due is None or due.arrival in self._copy_arrivals:
            return False
        return not (due.arrival in self._models and self._is_a_machines())

    def _is_a_machines(self) -> bool:
        return self._is_lent() or self.is_left_to(None)

    def _score(self, due: EvaluationDue) -> Scores | None:
        path = self._models.get(due.arrival)
        if path is None:
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
        self._scorer.close()
        if self._thread.ident is not None:
            self._thread.join()
