"""Processes that outlive their parent, and are found again by the lock that they hold on a file with their id."""

import contextlib
import fcntl
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

LOOK_S = 0.05
LEFT_OVER_S = 60.0
"""How long a process that must end is waited for."""


class AdoptedProcess:
    """What `subprocess.Popen` offers, for a process that another one started. Its exit code cannot be known: it counts as 0."""

    def __init__(self, pid: int, lock: int) -> None:
        """`lock`: an open file that the process has locked. `pid` is 0 if it could not be written down in time."""
        self.pid = pid
        self.returncode: int | None = None
        self._lock = lock

    def poll(self) -> int | None:
        """Returns 0 if the process has ended, which its free lock shows, and None while it runs."""
        if self.returncode is None:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.close(self._lock)
                self.returncode = 0
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Returns when the process has ended. Raises `subprocess.TimeoutExpired` if it still runs after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(LOOK_S)
        return code

    def terminate(self) -> None:
        """Sends SIGTERM, unless the process has ended or its id is unknown."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL, unless the process has ended or its id is unknown."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.pid and self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def adopt_or_start(path: Path, lifeline: int, command: list[str], **options: Any) -> "subprocess.Popen[bytes] | AdoptedProcess":
    """The process whose id is in the file `path`, if it is still there; else a new one, with the options of `Popen`.

    Its standard input is `lifeline`, a pipe at whose end it must end. One that has another pipe is about to end, and is not kept.
    The lock belongs to the file as it was opened here. A new process inherits that, so it holds the lock for as long as it lives,
    even after this one has closed the file or died."""
    name = str(os.fstat(lifeline).st_ino)
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid, _, pipe = os.pread(lock, 64, 0).decode().partition(" ")
        process = AdoptedProcess(int(pid or 0), lock)
        if pipe == name:
            return process
        process.kill()
        process.wait(LEFT_OVER_S)
        return adopt_or_start(path, lifeline, command, **options)
    try:
        os.truncate(lock, 0)
        new_process = subprocess.Popen(command, stdin=lifeline, pass_fds=(lock,), **options)
        os.pwrite(lock, f"{new_process.pid} {name}".encode(), 0)
        return new_process
    finally:
        os.close(lock)
