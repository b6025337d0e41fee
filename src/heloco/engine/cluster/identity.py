"""Who this machine was in a run: kept in a file that is locked while its process lives.

A worker that was killed and started again comes back under the id it had, and takes up the round it held at once; nobody has to
wait until it is taken for lost. Two workers of one name on one machine are two: the second finds the file locked.
"""

import contextlib
import fcntl
import os
from pathlib import Path

from heloco.task.corpus.cache import cache_folder


class Identity:
    def __init__(self, run: str | None, name: str) -> None:
        """`run` None: nothing is kept."""
        self._file: int | None = None
        self.machine: str | None = None
        """The id that a process before this one had."""
        if run is None:
            return
        with contextlib.suppress(OSError):  # without a place to keep it, it is somebody new each time
            self._open(cache_folder() / "machines" / f"{run}-{name.replace('/', '_')}")

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            self._file = None
            return
        self.machine = os.pread(self._file, 200, 0).decode(errors="replace").strip() or None

    def keep(self, machine: str) -> None:
        if self._file is not None:
            os.pwrite(self._file, machine.ljust(200).encode(), 0)

    def forget(self) -> None:
        """The run has ended, or the machine left it: who comes next is somebody new."""
        if self._file is not None:
            os.truncate(self._file, 0)
            os.close(self._file)
            self._file = None
