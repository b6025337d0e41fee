"""A run that is served elsewhere, as a folder here: its config, tape and evaluations, as they grow."""

import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from heloco.errors import UserError

if TYPE_CHECKING:
    from heloco.engine.cluster.link import Link

WHOLE, GROWING = ("config.toml", "run.json"), ("tape.jsonl", "evals.jsonl")
EVERY_S = 0.5
WAIT_S = 120.0
LOST_S = 60.0
"""Out of reach for so long, a run is taken for gone: a crash and a restart take less."""


class Mirror:
    """Keeps `folder` like the run's; when the run cannot be reached it tries again."""

    def __init__(self, link: "Link") -> None:
        self.link = link
        self._made = tempfile.TemporaryDirectory(prefix="heloco-watch-")
        self.folder = Path(self._made.name) / "run"
        self.folder.mkdir()
        self._over = threading.Event()
        self._reached_s = time.monotonic()

    def lost(self) -> str:
        """Why nothing more is to be expected; empty as long as something is."""
        if time.monotonic() - self._reached_s < LOST_S:
            return ""
        return (
            f"{self.link.address} was out of reach for {LOST_S:g} s: it was stopped there, or this is all there will be to see."
        )

    def start(self) -> None:
        """Until there is something to see; then on, in a thread."""
        from heloco.engine.cluster.link import Denied, LinkDown

        began = time.monotonic()
        try:
            described = self.link.describe()
            if described["external"]:
                raise UserError(
                    "This run trains the model that its machines bring, and nothing is evaluated where it is served: "
                    f"`heloco status {self.link.address}` shows how it is doing."
                )
            self.folder = self.folder.rename(self.folder.with_name(f"run-{described['run'][:8]}"))
            while not self.refresh() or not (self.folder / "evals.jsonl").stat().st_size:
                if time.monotonic() - began > WAIT_S:
                    raise UserError(f"Nothing has been evaluated yet at {self.link.address}: try again later.")
                time.sleep(EVERY_S)
        except LinkDown as error:
            raise UserError(f"{error} Check the address, and that `heloco serve` runs there.") from error
        except Denied as error:
            raise UserError(str(error)) from error
        self._reached_s = time.monotonic()
        threading.Thread(target=self._follow, name="heloco-mirror", daemon=True).start()

    def refresh(self) -> bool:
        """Whether all files are there."""
        for name in (*WHOLE, *GROWING):
            path = self.folder / name
            if name in WHOLE and path.exists():
                continue
            size = path.stat().st_size if path.exists() else 0
            while more := self.link.read(name, size):
                with path.open("ab") as file:
                    file.write(more)
                size += len(more)
        return all((self.folder / name).exists() for name in (*WHOLE, *GROWING))

    def _follow(self) -> None:
        from heloco.engine.cluster.link import Denied, LinkDown

        while not self._over.wait(EVERY_S):
            try:
                self.refresh()
                self._reached_s = time.monotonic()
            except (LinkDown, Denied, UserError):
                continue

    def close(self) -> None:
        self._over.set()
        self.link.close()
        self._made.cleanup()
