"""The status of a run that is served on this machine, asked for again and again while the run's folder is watched."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from heloco.records.folder_lock import is_locked
from heloco.report.run_state import LastStatus

if TYPE_CHECKING:
    from heloco.cluster.protocol.link import AdminLink

ASK_EVERY_S = 1.0
CLOSING_S = 2.0


class StatusPoll:
    """Asks while a process serves the folder. A run that has no gateway cannot be asked, and its journal tells its state."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.last_status = folder, LastStatus()
        self._link: AdminLink | None = None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._ask_on, name="heloco-status", daemon=True)

    def start(self) -> None:
        """Begins to ask, in a thread."""
        self._thread.start()

    def _ask_on(self) -> None:
        while True:
            try:
                if is_locked(self.folder) is not False:
                    self.last_status.take(self._open_link().status())
            except Exception:  # nobody answers, say: the next time may be better
                self._close_link()
            if self._is_closing.wait(ASK_EVERY_S):
                return

    def _open_link(self) -> "AdminLink":
        from heloco.cli.addresses import link_to

        self._link = self._link or link_to(str(self.folder), None, None, "viewer")
        return self._link

    def _close_link(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def close(self) -> None:
        """Stops asking."""
        self._is_closing.set()
        self._thread.join(CLOSING_S)
        if not self._thread.is_alive():
            self._close_link()
