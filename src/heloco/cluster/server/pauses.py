"""When a run hands out no rounds, and to whom it still does."""

import contextlib
import shutil
from dataclasses import dataclass

from heloco.cluster.protocol.messages import Paused
from heloco.cluster.protocol.refusals import Refused
from heloco.cluster.server import checkpoints
from heloco.cluster.server.state import ServiceState
from heloco.records.events import Pause, Resume

ROOM_FOR_LINES = 1 << 16
"""Bytes that must be free before an arrival is written down."""
PRUNE_AFTER_S = 30.0
"""A disk that is full for this long is not about to be tidied up: what checkpoints stand for leaves the journal, although a
replay from the start is then no longer possible."""


@dataclass(frozen=True)
class Attendance:
    """What a pause depends on."""

    machines_here: int
    participants: int
    """Machines that contributed to the last arrivals."""
    window: int
    """How many arrivals that are; 0 while the run is too young to tell."""
    space: str = ""
    """What is wrong with the disk; empty where nothing is."""
    admin: str = ""
    """What somebody said who paused the run; empty where nobody has."""


def reason_to_pause(now: Attendance, min_workers: int) -> Paused | None:
    if now.admin:
        return Paused(kind="admin", text=now.admin)
    if now.space:
        return Paused(kind="space", text=now.space)
    if now.machines_here < min_workers:
        return Paused(kind="machines", text=f"{now.machines_here} of at least {min_workers} machines are here")
    if now.window and now.participants < min_workers:
        who = "1 machine" if now.participants == 1 else f"{now.participants} machines"
        text = f"only {who} contributed to the last {now.window} arrivals, and at least {min_workers} must"
        return Paused(kind="participation", text=text)
    return None


def holds_back(paused: Paused, *, has_contributed: bool) -> bool:
    """Whether a machine gets no round: a pause for want of participants lets those go on that have not contributed lately."""
    return paused.kind != "participation" or has_contributed


class Pauses:
    """Keeps the run's pause up to date, and in its journal."""

    def __init__(self, state: ServiceState) -> None:
        self.state = state
        self.since_s = 0.0
        """When the present pause began, or the last one ended."""
        self._admin = ""
        self._noted: Paused | None = None
        """What the journal says; on a full disk it says it later."""
        self._short_since_s: float | None = None
        """When the disk began to be too full for another round."""

    def take_up(self) -> None:
        """Of a run that was begun: a pause by somebody's order lasts over a restart."""
        paused = self.state.paused
        self.since_s, self._noted = self.state.now_s, paused
        self._admin = paused.text if paused is not None and paused.kind == "admin" else ""

    def order(self, text: str) -> None:
        """Somebody pauses the run; without a text it goes on."""
        with self.state.changed:
            self._admin = text
            self.consider()

    def consider(self) -> None:
        """Whether there is room, enough machines are here, and enough of them contribute."""
        state = self.state
        if state.run is None or state.ended is not None:
            return
        contributors = state.run.contributors
        is_full = len(contributors) == contributors.maxlen
        now = Attendance(
            machines_here=len(state.roster),
            participants=len(state.run.participants()),
            window=len(contributors) if is_full else 0,
            space=self.space_problem(),
            admin=self._admin,
        )
        paused = reason_to_pause(now, state.config.cluster.min_workers)
        if (paused is None) != (state.paused is None):
            self.since_s = state.now_s
        state.paused = paused
        with contextlib.suppress(Refused):  # a full disk is the very reason: it is noted later
            self._note(paused)

    def _note(self, paused: Paused | None) -> None:
        """In the journal, where the kind of pause is another one than it says."""
        state = self.state
        if (paused and paused.kind) != (self._noted and self._noted.kind):
            with state.recording() as run:
                event = Pause(time_s=state.now_s, kind=paused.kind, text=paused.text) if paused else Resume(time_s=state.now_s)
                run.note(event)
            self._noted = paused

    def space_problem(self) -> str:
        """Why there is no room for what comes of another round; empty where there is. After a while the journal is pruned."""
        state = self.state
        if state.run is None or state.starts is None:
            return ""
        if not state.run.lines.catch_up():
            return f"{state.folder} has no room for the tape: free some space"
        needed = state.starts.layout.size + state.run.contribution_layout.size + ROOM_FOR_LINES
        if (free := shutil.disk_usage(state.folder).free) >= needed:
            self._short_since_s = None
            return ""
        self._short_since_s = state.now_s if self._short_since_s is None else self._short_since_s
        if state.now_s - self._short_since_s > PRUNE_AFTER_S:
            checkpoints.make_room(state.run, 0.0)
        return f"{state.folder} has {free / 1e6:.1f} MB left, and a round needs {needed / 1e6:.1f}: free some space"
