"""The evaluations of a served run, which never hold its lock.

1. An evaluation is due. The outer model of that arrival is written to a file in the background.
2. The file is evaluated, in a process of its own if the model is large, and removed.
3. The line is written.

Evaluations are made one after the other, in the order of their arrivals. A restart goes on with those that are still due.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Struct
from torch import Tensor

from heloco.cluster.server.tensor_readers import TensorReaders
from heloco.cluster.server.transfers import make_folder
from heloco.records.evaluations import EvaluationRecord
from heloco.records.run_files import EVALS
from heloco.run.folder import whole_lines
from heloco.task import Scores
from heloco.wire.layout import Layout, write

FOLDER = "evaluating"
WAITING_LIMIT = 8
"""Models that may wait for their evaluation on disk. If evaluations take longer than the time between them, some are left out."""
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


class Evaluations:
    """`record` writes the line of an evaluation. It is called in the evaluating thread."""

    def __init__(
        self,
        run: Path,
        layout: Layout,
        scorer: Scorer,
        record: Callable[[EvaluationDue, Scores], None],
        readers: TensorReaders,
    ) -> None:
        self.folder = make_folder(run / FOLDER)
        self._layout, self._scorer, self._record, self._readers = layout, scorer, record, readers
        self._due: deque[EvaluationDue] = deque()
        self._copies: dict[int, threading.Thread] = {}
        self._earlier: dict[int, EvaluationRecord] = {}
        self._last_added = -1
        self._changed = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._evaluate_all, name="heloco-evaluations", daemon=True)

    def path(self, due: EvaluationDue) -> Path:
        return self.folder / f"arrival-{due.arrival:08d}.safetensors"

    # ---- from the run, under its lock

    def add(self, due: EvaluationDue, tensors: Mapping[str, Tensor]) -> EvaluationRecord | None:
        """Begins an evaluation of these tensors. Returns its line if it was made before a restart."""
        if due.arrival == self._last_added:
            return None
        self._last_added = due.arrival
        if (earlier := self._earlier.pop(due.arrival, None)) and due.matches(earlier):
            return earlier
        leave = self._readers.enter()
        copying = threading.Thread(target=self._copy, args=(due, tensors, leave), name="heloco-copy")
        try:
            copying.start()
        except RuntimeError:  # no thread is available
            self._copy(due, tensors, leave)
        with self._changed:
            self._copies[due.arrival] = copying
            self._due.append(due)
            if len(self._due) > WAITING_LIMIT:
                self._leave_out(self._due[WAITING_LIMIT // 2])
            self._changed.notify_all()
        return None

    def _leave_out(self, due: EvaluationDue) -> None:
        log.warning("The evaluation at arrival %d was left out: evaluations take longer than the time between them.", due.arrival)
        self._due.remove(due)
        self.path(due).unlink(missing_ok=True)

    def _copy(self, due: EvaluationDue, tensors: Mapping[str, Tensor], leave: Callable[[], None]) -> None:
        partial = self.path(due).with_suffix(".partial")
        try:
            with partial.open("wb", buffering=0) as file:
                write(file, self._layout, tensors)
            partial.rename(self.path(due))
        except OSError as error:
            partial.unlink(missing_ok=True)
            log.warning("The evaluation at arrival %d was left out: its model could not be written (%s).", due.arrival, error)
        finally:
            leave()

    @contextmanager
    def held(self) -> Iterator[tuple[EvaluationDue, ...]]:
        """The evaluations that are still due. No line is written inside this context."""
        with self._changed:
            yield tuple(self._due)

    @property
    def waiting(self) -> int:
        return len(self._due)

    # ---- after a restart

    def take_up(self, due: Iterable[EvaluationDue], earlier: Iterable[EvaluationRecord]) -> list[EvaluationRecord]:
        """Goes on with what a checkpoint says is due. `earlier`: lines that were written after it. Returns those that stay."""
        self._earlier = {record.arrival: record for record in earlier}
        kept = []
        for each in due:
            self._last_added = each.arrival
            if (record := self._earlier.pop(each.arrival, None)) and each.matches(record):
                kept.append(record)
            elif self.path(each).is_file():
                self._due.append(each)
            else:
                log.warning("The evaluation at arrival %d was left out: its model is gone.", each.arrival)
        return kept

    def is_possible(self, due: EvaluationDue) -> bool:
        return self.path(due).is_file()

    def start(self) -> None:
        """Begins to evaluate. Until then evaluations are only collected."""
        still_due = {self.path(due) for due in self._due}
        for path in self.folder.iterdir():
            if path not in still_due and path.suffix in (".safetensors", ".partial"):
                path.unlink(missing_ok=True)
        self._earlier = {}
        self._thread.start()

    # ---- the thread

    def _evaluate_all(self) -> None:
        while (due := self._next()) is not None:
            scores = self._score(due)
            with self._changed:
                if self._is_over:
                    return
                if due in self._due:
                    self._due.remove(due)
                    if scores is not None:
                        self._record_line(due, scores)
                self._copies.pop(due.arrival, None)
                self._changed.notify_all()
            self.path(due).unlink(missing_ok=True)

    def _next(self) -> EvaluationDue | None:
        with self._changed:
            self._changed.wait_for(lambda: self._due or self._is_over)
            if self._is_over:
                return None
            due = self._due[0]
            copying = self._copies.get(due.arrival)
        if copying is not None:
            copying.join()
        return due

    def _score(self, due: EvaluationDue) -> Scores | None:
        if not self.path(due).is_file():
            return None
        try:
            return self._scorer(self.path(due))
        except Exception as error:  # a task is the user's own code
            if not self._is_over:
                log.warning("The evaluation at arrival %d failed: %s", due.arrival, error)
            return None

    def _record_line(self, due: EvaluationDue, scores: Scores) -> None:
        try:
            self._record(due, scores)
        except OSError as error:
            log.warning("The evaluation at arrival %d was left out: its line could not be written (%s).", due.arrival, error)

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
