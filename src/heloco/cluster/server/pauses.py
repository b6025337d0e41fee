"""When a run pauses, and which machines still get rounds during a pause."""

import contextlib
import shutil
from dataclasses import dataclass

from heloco.cluster.protocol.messages import Paused
from heloco.cluster.protocol.refusals import Refused
from heloco.cluster.server import checkpoints
from heloco.cluster.server.state import ServiceState
from heloco.records.events import Pause, Resume

ROOM_FOR_LINES = 1 << 16
"""Bytes that must be free on the disk before an arrival is recorded."""
PRUNE_AFTER_S = 30.0
"""After the disk has been full for this long, events that checkpoints cover are pruned from the
journal. A replay from the start is then no longer possible."""


@dataclass(frozen=True)
class Attendance:
    """The facts that decide whether a run pauses."""

    machines_here: int
    participants: int
    """Machines that contributed to the last arrivals."""
    window: int
    """The number of these arrivals; 0 until the run has that many."""
    space: Paused | None = None
    """The pause for lack of disk space; None if there is enough."""
    order: Paused | None = None
    """The pause that an admin ordered; None if there is no order."""


def reason_to_pause(now: Attendance, min_workers: int) -> Paused | None:
    """Why no rounds are handed out now; None if they are. An admin's order comes before disk space, machines and participants."""
    if now.order is not None:
        return now.order
    if now.space is not None:
        return now.space
    if now.machines_here < min_workers:
        return Paused(kind="machines", text=f"{now.machines_here} of at least {min_workers} machines are here")
    if now.window and now.participants < min_workers:
        participants = "1 machine" if now.participants == 1 else f"{now.participants} machines"
        text = f"only {participants} contributed to the last {now.window} arrivals, and at least {min_workers} must"
        return Paused(kind="participation", text=text)
    return None


def holds_back(paused: Paused, *, has_contributed: bool) -> bool:
    """Whether a machine gets no round. In a pause for lack of participants, machines that have not
    contributed lately still get one."""
    return paused.kind != "participation" or has_contributed


class Pauses:
    """Decides when the run pauses and resumes, and records both in the journal."""

    def __init__(self, state: ServiceState) -> None:
        self.state = state
        self.since_s = 0.0
        """When the current pause began, or when the last one ended."""
        self._order: Paused | None = None
        """The pause that an admin ordered."""
        self._journaled_pause: Paused | None = None
        """The pause as last recorded in the journal. On a full disk it is recorded later."""
        self._short_since_s: float | None = None
        """When the disk became too full for another round."""

    def take_up(self) -> None:
        """Takes over the pause of a run that was resumed. A pause by an admin outlasts a restart."""
        paused = self.state.paused
        self.since_s, self._journaled_pause = self.state.now_s, paused
        self._order = paused if paused is not None and paused.kind == "admin" else None

    def pause(self, text: str) -> None:
        """An admin pauses the run."""
        self._obey(Paused(kind="admin", text=text or "somebody paused it"))

    def unpause(self) -> None:
        """An admin takes the order to pause back."""
        self._obey(None)

    def _obey(self, order: Paused | None) -> None:
        with self.state.changed:
            self._order = order
            self.consider()

    def consider(self) -> None:
        """Pauses or resumes the run, according to disk space, present machines and participants."""
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
            order=self._order,
        )
        paused = reason_to_pause(now, state.config.cluster.min_workers)
        if (paused is None) != (state.paused is None):
            self.since_s = state.now_s
        state.paused = paused
        with contextlib.suppress(Refused):  # the disk is full: it is recorded later
            self._note(paused)

    def _note(self, paused: Paused | None) -> None:
        """Records the pause in the journal if its kind has changed."""
        state = self.state
        if (paused and paused.kind) != (self._journaled_pause and self._journaled_pause.kind):
            with state.recording() as run:
                event = Pause(time_s=state.now_s, kind=paused.kind, text=paused.text) if paused else Resume(time_s=state.now_s)
                run.note(event)
            self._journaled_pause = paused

    def space_problem(self) -> Paused | None:
        """The pause if the disk has no room for another round. After `PRUNE_AFTER_S` it also prunes the journal."""
        state = self.state
        if state.run is None or state.starts is None:
            return None
        if not state.run.lines.catch_up():
            return Paused(kind="space", text=f"{state.folder} has no room for the tape: free some space")
        bytes_needed = state.starts.layout.size + state.run.contribution_layout.size + ROOM_FOR_LINES
        if (free := shutil.disk_usage(state.folder).free) >= bytes_needed:
            self._short_since_s = None
            return None
        self._short_since_s = state.now_s if self._short_since_s is None else self._short_since_s
        if state.now_s - self._short_since_s > PRUNE_AFTER_S:
            self._short_since_s = state.now_s
            checkpoints.make_room(state.run, 0.0)
        text = f"{state.folder} has {free / 1e6:.1f} MB left, and a round needs {bytes_needed / 1e6:.1f}: free some space"
        return Paused(kind="space", text=text)
