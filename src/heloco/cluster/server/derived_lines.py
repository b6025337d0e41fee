"""The tape and the evaluations of a served run. They follow from its journal, so a line may be written late."""

import threading
from collections import deque

from heloco.disk import FULL, SCARCE
from heloco.engine.local import Observer
from heloco.records.evaluations import EvaluationRecord
from heloco.records.tape import ArrivalRecord
from heloco.run import RunFolder


class DerivedLines:
    """Writes records to the run's folder and to the observers. Without a folder, only the observers get them."""

    def __init__(self, folder: RunFolder | None, observers: list[Observer]) -> None:
        self._folder, self._observers = folder, observers
        self._waiting: deque[ArrivalRecord | EvaluationRecord] = deque()
        self._lock = threading.Lock()  # arrivals and evaluations come from different threads

    def on_arrival(self, record: ArrivalRecord) -> None:
        """Writes a line of the tape and passes it to the observers. If the disk is full, the line waits."""
        self._append(record)
        for observer in self._observers:
            observer.on_arrival(record)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Writes an evaluation and passes it to the observers. If the disk is full, the line waits."""
        self._append(record)
        for observer in self._observers:
            observer.on_evaluation(record)

    def _append(self, record: ArrivalRecord | EvaluationRecord) -> None:
        if self._folder is not None:
            with self._lock:
                self._waiting.append(record)
            self.catch_up()

    def catch_up(self) -> bool:
        """Writes the records that wait for room on the disk, in order. True if none is left waiting."""
        with self._lock:
            while self._waiting:
                record = self._waiting.popleft()
                try:
                    self._write(record)
                except OSError as error:
                    self._waiting.appendleft(record)
                    if error.errno not in FULL + SCARCE:
                        raise
                    return False
            return True

    def _write(self, record: ArrivalRecord | EvaluationRecord) -> None:
        assert self._folder is not None and self._folder.tape is not None and self._folder.evals is not None
        if isinstance(record, ArrivalRecord):
            self._folder.tape.append(record)
        else:
            self._folder.evals.append(record)
