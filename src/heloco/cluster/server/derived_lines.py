"""The tape and the evaluations of a served run. They follow from its journal, so a line may be written late."""

import threading
from collections import deque
from typing import Any, Literal

from heloco.disk import FULL, SCARCE
from heloco.engine.local import Observer
from heloco.run import RunFolder

Line = dict[str, Any]


class DerivedLines:
    """Writes lines to the run's folder and to the observers. Without a folder, only the observers get them."""

    def __init__(self, folder: RunFolder | None, observers: list[Observer]) -> None:
        self._folder, self._observers = folder, observers
        self._waiting: deque[tuple[Literal["tape", "evals"], Line]] = deque()
        self._lock = threading.Lock()  # arrivals and evaluations come from different threads

    def arrived(self, line: Line) -> None:
        self._append("tape", line)
        for observer in self._observers:
            observer.arrived(line)

    def evaluated(self, line: Line) -> None:
        self._append("evals", line)
        for observer in self._observers:
            observer.evaluated(line)

    def _append(self, name: Literal["tape", "evals"], line: Line) -> None:
        if self._folder is not None:
            with self._lock:
                self._waiting.append((name, line))
            self.catch_up()

    def catch_up(self) -> bool:
        """Writes the lines that wait for room on the disk, in order. True if none is left waiting."""
        with self._lock:
            while self._waiting:
                try:
                    self._write(*self._waiting[0])
                except OSError as error:
                    if error.errno not in FULL + SCARCE:
                        raise
                    return False
                self._waiting.popleft()
            return True

    def _write(self, name: Literal["tape", "evals"], line: Line) -> None:
        assert self._folder is not None
        lines = self._folder.tape if name == "tape" else self._folder.evals
        assert lines is not None
        lines.append(line)
