"""A local copy of a run that is served elsewhere: its config, tape, evaluations and events as they grow, and its status."""

import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from heloco.errors import UserError
from heloco.records.journal_reader import FOLDER as JOURNAL
from heloco.records.journal_reader import segment_name
from heloco.records.run_files import CONFIG, EVALS, META, TAPE
from heloco.report.run_state import LastStatus

if TYPE_CHECKING:
    from heloco.cluster.protocol.link import AdminLink

FIXED, GROWING = (CONFIG, META), (TAPE, EVALS, JOURNAL)
JOURNAL_SEGMENT = f"{JOURNAL}/{segment_name(0)}"
"""The gateway sends the journal as one long file of lines."""
REFRESH_EVERY_S = 0.5
WAIT_S = 120.0
CLOSING_S = 2.0


class FolderMirror:
    """Keeps `folder` up to date with the run's folder, and retries when the run cannot be reached."""

    def __init__(self, link: "AdminLink") -> None:
        self.link = link
        self._temporary = tempfile.TemporaryDirectory(prefix="heloco-watch-")
        self.folder = Path(self._temporary.name) / "run"
        self.folder.mkdir()
        self.last_status = LastStatus(is_copy=True)
        self._is_closing = threading.Event()
        self._following: threading.Thread | None = None

    def start(self) -> None:
        """Waits until there is something to see, and then keeps the copy up to date in a thread."""
        from heloco.cluster.protocol.link import LinkDown
        from heloco.cluster.protocol.refusals import Refused

        began = time.monotonic()
        try:
            info = self.link.describe()
            self.folder = self.folder.rename(self.folder.with_name(f"run-{info.run[:8]}"))
            reason = "No machine has brought its model yet" if info.external else "Nothing has been evaluated yet"
            while not self.has(FIXED if info.external else (*FIXED, EVALS)):
                if time.monotonic() - began > WAIT_S:
                    raise UserError(f"{reason} at {self.link.address}: try again later.")
                time.sleep(REFRESH_EVERY_S)
        except LinkDown as error:
            raise UserError(f"{error} Check the address, and that `heloco serve` runs there.") from error
        except Refused as error:
            raise UserError(error.text) from error
        self._following = threading.Thread(target=self._follow, name="heloco-mirror", daemon=True)
        self._following.start()

    def has(self, names: Sequence[str]) -> bool:
        """Refreshes the copy. True if all of these files exist."""
        self.refresh()
        self.last_status.take(self.link.status())
        return all((self.folder / name).exists() for name in names)

    def refresh(self) -> None:
        for name in (*FIXED, *GROWING):
            if name in GROWING or not (self.folder / name).exists():
                self._read_on(name)

    def _read_on(self, name: str) -> None:
        path = self.folder / (JOURNAL_SEGMENT if name == JOURNAL else name)
        size = path.stat().st_size if path.exists() else 0
        while more := self.link.read(name, size):
            path.parent.mkdir(exist_ok=True)
            with path.open("ab") as file:
                file.write(more)
            size += len(more)

    def _follow(self) -> None:
        from heloco.cluster.protocol.link import LinkDown
        from heloco.cluster.protocol.refusals import Refused

        while not self._is_closing.wait(REFRESH_EVERY_S):
            try:
                self.refresh()
                self.last_status.take(self.link.status())
            except (LinkDown, Refused, UserError):
                continue

    def close(self) -> None:
        self._is_closing.set()
        if self._following is not None:
            self._following.join(CLOSING_S)  # it may still be writing to the folder
        self.link.close()
        self._temporary.cleanup()
