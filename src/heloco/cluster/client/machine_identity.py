"""This machine's identity in a run: its ticket, in a file that is locked while the process lives.

A worker or a script that is started again comes back as the same machine: it continues the round it held, and counts as one
machine however often it restarts. Two processes on one host are two machines: the second one finds the first file locked.
"""

import contextlib
import os
from pathlib import Path

import msgspec

from heloco.cluster.protocol.messages import Ticket
from heloco.places import cache_folder

try:
    import fcntl
except ImportError:  # not available on this system: every start is a new machine
    fcntl = None  # type: ignore[assignment]

PLACES = 1024


class MachineIdentity:
    """The ticket of this machine in a run. The file that holds it stays locked until `close`, so each process has its own."""

    def __init__(self, run: str | None, name: str) -> None:
        """Without a `run` nothing is stored."""
        self.ticket: Ticket | None = None
        """The ticket of the previous process, or None."""
        self._file: int | None = None
        if run is not None and fcntl is not None:
            with contextlib.suppress(OSError):  # without a file, every start is a new machine
                self._take_place(cache_folder() / "machines" / run, name.replace("/", "_"))

    def _take_place(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for place in range(PLACES):
            file = os.open(folder / f"{name}-{place}", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                continue
            self._file = file
            with contextlib.suppress(msgspec.MsgspecError):
                self.ticket = msgspec.json.decode(os.pread(file, 1000, 0).strip(b" \0\n"), type=Ticket)
            return

    def keep(self, ticket: Ticket) -> None:
        """Writes the ticket to the locked file, so that the next process can come back as this machine."""
        self.ticket = ticket
        if self._file is not None:
            content = msgspec.json.encode(ticket)
            os.pwrite(self._file, content, 0)
            os.truncate(self._file, len(content))

    def close(self) -> None:
        """Unlocks the file. The next process that locks it is the same machine."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
