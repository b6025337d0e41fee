"""What a real run's journal says besides its tape: pauses and their reasons, who left, contributions that held no numbers."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from heloco.errors import UserError
from heloco.records.events import Abandon, Dispatch, Event, Join, Part, Pause, PauseKind, Receive, Resume
from heloco.records.journal_reader import FOLDER, JournalDamaged, Mark, first_mark, read_events, segments

DEPARTURES = {"left": "left", "lost": "lost", "turned-away": "turned away", "evicted": "evicted"}


class JournalTail:
    """The events of a journal that may still grow, each once."""

    def __init__(self, run: Path) -> None:
        self.folder = run / FOLDER
        self._mark: Mark | None = None

    @property
    def exists(self) -> bool:
        return bool(segments(self.folder))

    def was_cut(self) -> bool:
        """Whether the journal is shorter than it was read: the run was taken up again, or returned to an earlier point."""
        if self._mark is None:
            return False
        if not (files := segments(self.folder)):
            return True
        base, path = files[-1]
        return base + path.stat().st_size < self._mark.position

    def more(self) -> Iterator[Event]:
        if not self.exists:
            return
        self._mark = self._mark or first_mark(self.folder)
        try:
            for event, mark in read_events(self.folder, self._mark):
                self._mark = mark
                yield event
        except JournalDamaged as damage:
            raise UserError(str(damage)) from None


@dataclass
class PauseSpan:
    """A time in which the run handed out no rounds, and why."""

    start_s: float
    kind: PauseKind
    reason: str
    end_s: float | None = None
    """None: it lasts, or the run was ended in it."""


@dataclass
class Departure:
    """How and when a machine left the run."""

    kind: str
    time_s: float
    reason: str


@dataclass
class JournalSummary:
    """Follows the journal event by event. `changes` grows with what a reader would notice."""

    pauses: list[PauseSpan] = field(default_factory=list)
    departures: dict[str, Departure] = field(default_factory=dict)
    """A machine's id -> how it left. Machines that are present are not in it."""
    changes: int = 0
    time_s: float = 0.0
    """The time of the last event."""
    seats: dict[str, int | None] = field(default_factory=dict)
    """A machine's id -> its seat, of the machines that are present as far as the journal says."""
    heard_s: dict[str, float] = field(default_factory=dict)
    """A machine's id -> the time of the last event that came from it."""
    _holders: dict[int, str] = field(default_factory=dict)

    def follow(self, event: Event) -> tuple[int, str] | None:
        """Takes an event in. (Worker, machine) where it says that a contribution was refused that is not on the tape."""
        self.time_s = event.time_s
        if isinstance(event, Join | Dispatch | Receive):
            self.heard_s[event.machine] = event.time_s
        if isinstance(event, Dispatch):
            self._holders[event.worker] = event.machine
            if self.is_paused and self.pauses[-1].kind != "participation":  # a restart after a kill ended it without a word
                self._end_pause(self.time_s)
        elif isinstance(event, Abandon):
            machine = self._holders.pop(event.worker, None)
            if machine is not None and event.kind == "not-finite":
                self.changes += 1
                return event.worker, machine
        elif isinstance(event, Pause | Resume):
            self._end_pause(self.time_s)
            if isinstance(event, Pause):
                self.pauses.append(PauseSpan(self.time_s, event.kind, event.text))
        elif isinstance(event, Join):
            self.changes += self.departures.pop(event.machine, None) is not None
            self.seats[event.machine] = event.seat
        elif isinstance(event, Part):
            self.departures[event.machine] = Departure(DEPARTURES[event.kind], self.time_s, event.text)
            self.seats.pop(event.machine, None)
            self.changes += 1
        return None

    @property
    def is_paused(self) -> bool:
        return bool(self.pauses) and self.pauses[-1].end_s is None

    def _end_pause(self, time_s: float) -> None:
        """A pause that was begun again after a restart ends where the next one begins."""
        self.changes += 1
        if self.is_paused:
            self.pauses[-1].end_s = time_s
