"""Keeps the outer state still while it is copied to a file in the background."""

import threading
from collections.abc import Callable


class GaveWay(Exception):
    """A reader left before it had read everything, because an outer step waited for it."""


class TensorReaders:
    """Counts who still reads the tensors of the outer state. A thread that changes them waits until nobody does.

    1. Under the run's lock a reader enters, and begins to copy the tensors in a thread.
    2. The next outer step waits until the reader has left. Meanwhile everything else goes on, so it waits without the lock.
    3. With the lock it looks again, because another reader may have entered before it got the lock.
    """

    def __init__(self) -> None:
        self._count = self._waiting = 0
        self.gave_way = 0
        """How many readers in a row that can give way did so."""
        self._changed = threading.Condition()

    def enter(self) -> Callable[[], None]:
        """Returns the function that the reader calls when it has read everything. It may be called again."""
        with self._changed:
            self._count += 1
        leave_lock = threading.Lock()

        def leave() -> None:
            if leave_lock.acquire(blocking=False):
                with self._changed:
                    self._count -= 1
                    self._changed.notify_all()

        return leave

    @property
    def are_reading(self) -> bool:
        """Whether a copy of the tensors is being made."""
        return self._count > 0

    @property
    def are_awaited(self) -> bool:
        """Whether an outer step waits for the readers."""
        return self._waiting > 0

    def wait(self) -> None:
        """Returns when nobody reads any more."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._count)
            finally:
                self._waiting -= 1
