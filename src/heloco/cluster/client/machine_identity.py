"""Who this machine is in a run: its ticket, kept in a file that is locked while its process lives.

A worker or a script that is started again comes back as the machine it was: it takes up the round it held, and counts as one
machine however often it restarts. Two at a time on one host are two machines: the second finds the first place locked.
"""

import contextlib
import os
from pathlib import Path

import msgspec

from heloco.cluster.protocol.messages import Ticket
from heloco.places import cache_folder

try:
    import fcntl
except ImportError:  # not on this system: every start is a new machine
    fcntl = None  # type: ignore[assignment]

PLACES = 1024


class MachineIdentity:
    def __init__(self, run: str | None, name: str) -> None:
        """`run` None: nothing is kept."""
        self.ticket: Ticket | None = None
        """What a process before this one had."""
        self._file: int | None = None
        if run is not None and fcntl is not None:
            with contextlib.suppress(OSError):  # without a place to keep it, it is a new machine each time
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
        self.ticket = ticket
        if self._file is not None:
            content = msgspec.json.encode(ticket)
            os.pwrite(self._file, content, 0)
            os.truncate(self._file, len(content))

    def close(self) -> None:
        """The process leaves its place; the next one to take it is the same machine."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
