"""The state of a run that is watched: whether it goes on, how fast, and which machines are here.

What a run says of itself (`LastStatus`) comes first, while it is recent. Otherwise the run's folder tells: a process that writes
there holds a lock on it, and notes how the run ended. A folder without either belongs to a process that died. Times of the clock
are seconds since 1970, because the tape has none: they come from files and from the watcher's own clock.
"""

import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec import Struct

from heloco.cluster.protocol.messages import MachineStatus, Status
from heloco.records.folder_lock import is_locked
from heloco.records.journal_reader import FOLDER as JOURNAL
from heloco.records.journal_reader import segments
from heloco.records.machine_ids import name_of
from heloco.records.run_end import FINISHED_TEXT, read_end
from heloco.records.run_files import EVALS, TAPE
from heloco.report.run_reader import Run
from heloco.report.wording import duration

StateKind = Literal["going", "paused", "silent", "suspended", "finished", "stopped", "gave-up", "failed"]
Presence = Literal["here", "away", "gone", "unknown"]
LABELS: dict[StateKind, str] = {
    "going": "going", "paused": "paused", "silent": "not heard of", "suspended": "suspended", "finished": "finished",
    "stopped": "stopped", "gave-up": "given up", "failed": "failed",
}  # fmt: skip
"""What a reader is shown for each kind of state."""
ENDED: frozenset[StateKind] = frozenset({"suspended", "finished", "stopped", "gave-up", "failed"})
CONTINUED_BY_COMMAND: frozenset[StateKind] = frozenset({"silent", "suspended", "stopped", "failed"})
"""States in which a reader is told the command that goes on with the run. The reason of a run that gave up has it."""
STATUS_LASTS_S = 5.0
"""After this many seconds a status no longer says what is."""
GROWTH_LASTS_S = 60.0
"""How long a folder that grew without a lock counts as written. It may be a copy that is brought up to date now and then."""
RATE_SPAN_S = 120.0
RATE_ARRIVALS = 20
"""How many last arrivals of a real run its rate is taken from, if the run itself does not say it."""
MACHINES_SHOWN = 100


class MachineState(Struct, frozen=True, kw_only=True):
    """A machine as its run last knew it."""

    name: str
    presence: Presence
    """away: it held a round before a restart and is not back yet. unknown: the run has not been heard of since."""
    worker: str
    """Its seat, or that it is a spare."""
    arrivals: int
    per_minute: float | None = None
    heard_at: float | None = None
    """When it was last heard of, by the clock; None if only the time of the run is known."""
    heard_run: str = ""
    """The same in the time of the run, in words."""
    why: str = ""
    """How it left."""


class RunState(Struct, frozen=True, kw_only=True):
    """Whether a run goes on, how far it is, and its machines."""

    name: str
    kind: StateKind
    label: str
    """The kind in words."""
    reason: str
    """Why it is so, without a full stop; may be empty."""
    arrivals: int
    planned: int
    per_minute: float | None
    left_s: float | None
    """Seconds until the last arrival at this rate; None if the run does not go on."""
    news_at: float | None
    """When the run was last heard of: by a status, or by its files."""
    goes_on: str
    """The command that goes on with the run; empty if it goes on, is finished, or is elsewhere."""
    is_real: bool
    machines: tuple[MachineState, ...] = ()
    machines_left_out: int = 0

    @property
    def has_ended(self) -> bool:
        """Whether the run said that it ended; it may be taken up again."""
        return self.kind in ENDED


@dataclass(frozen=True)
class Heard:
    """A status, and when it came."""

    status: Status
    at: float


class LastStatus:
    """The last status that a run gave of itself. Whoever asks the run puts it here, also from another thread."""

    def __init__(self, *, is_copy: bool = False) -> None:
        self.is_copy = is_copy
        """Whether the watched folder is a copy, whose lock and end say nothing."""
        self.heard: Heard | None = None

    def take(self, status: Status) -> None:
        """Keeps a status that has just come."""
        self.heard = Heard(status, time.time())


class StateWatch:
    """Follows the state of one run."""

    def __init__(self, run: Run, last_status: LastStatus | None = None) -> None:
        self.run, self.last_status = run, last_status or LastStatus()
        self._had_lock = False
        self._files_at = self._files_time()
        self._grew_at = 0.0
        """When the files were last seen to grow."""
        self._samples: deque[tuple[float, int]] = deque()
        """(time by the clock, arrivals) of a simulation"""
        self._machine_heard_at: dict[str, float] = {}

    def look(self) -> RunState:
        """The state as the run's folder and its last status tell it. It does not read the folder's records again."""
        now, run, heard = time.time(), self.run, self.last_status.heard
        is_fresh = heard is not None and now - heard.at <= STATUS_LASTS_S
        self._note_growth(now)
        kind, reason = self._kind(heard, now, is_fresh=is_fresh)
        arrivals = max(run.summary.arrivals, heard.status.arrivals if heard and is_fresh else 0)
        per_minute = heard.status.per_minute if heard and is_fresh else self._measured_rate()
        left_s = 60 * (run.planned - arrivals) / per_minute if kind == "going" and per_minute else None
        machines = list(self._machines(heard, kind)) if run.facts.is_real else []
        return RunState(
            name=run.name, kind=kind, label=LABELS[kind], reason=reason, arrivals=arrivals, planned=run.planned,
            per_minute=_short(per_minute), left_s=_short(left_s), news_at=self._news_at(heard),
            goes_on=self._command_to_go_on(kind), is_real=run.facts.is_real, machines=tuple(machines[:MACHINES_SHOWN]),
            machines_left_out=max(0, len(machines) - MACHINES_SHOWN),
        )  # fmt: skip

    # ---- what goes on

    def _command_to_go_on(self, kind: StateKind) -> str:
        if self.last_status.is_copy or kind not in CONTINUED_BY_COMMAND:
            return ""
        return f"heloco {'serve' if self.run.facts.is_real else 'resume'} {self.run.path}"

    def _kind(self, heard: Heard | None, now: float, *, is_fresh: bool) -> tuple[StateKind, str]:
        if heard is not None and (is_fresh or (self.last_status.is_copy and heard.status.ended is not None)):
            if heard.status.ended is not None:
                return heard.status.ended.kind, heard.status.ended.text
            return ("paused", heard.status.paused.text) if heard.status.paused else ("going", "")
        if self.run.is_whole:
            return "finished", FINISHED_TEXT
        if self.last_status.is_copy:
            return "silent", "it cannot be reached"
        return self._kind_by_folder(now)

    def _kind_by_folder(self, now: float) -> tuple[StateKind, str]:
        has_lock = is_locked(self.run.path)
        self._had_lock |= bool(has_lock)
        if has_lock:
            return self._going()
        if (end := read_end(self.run.path)) is not None:
            return end.kind, end.text
        if self._had_lock:
            return "silent", "the process that carried it on is gone"
        if now - self._grew_at <= GROWTH_LASTS_S:
            return self._going()
        return "silent", "no process on this machine carries it on"

    def _going(self) -> tuple[StateKind, str]:
        journal = self.run.journal
        return ("paused", journal.pauses[-1].reason) if journal.is_paused else ("going", "")

    # ---- when

    def _files_time(self) -> float | None:
        """When the run's files were last written."""
        paths = [self.run.path / TAPE, self.run.path / EVALS, *(path for _, path in segments(self.run.path / JOURNAL)[-1:])]
        return max((changed_at for path in paths if (changed_at := _changed_at(path)) is not None), default=None)

    def _note_growth(self, now: float) -> None:
        files_at = self._files_time()
        if files_at != self._files_at:
            self._files_at, self._grew_at = files_at, now
        tape_at, arrivals = _changed_at(self.run.path / TAPE), self.run.summary.arrivals
        if self.run.facts.is_real or tape_at is None:
            return
        if self._samples and arrivals < self._samples[-1][1]:  # it was resumed from a checkpoint
            self._samples.clear()
        if not self._samples or arrivals > self._samples[-1][1]:
            self._samples.append((tape_at, arrivals))
        while len(self._samples) > 2 and self._samples[1][0] < now - RATE_SPAN_S:
            self._samples.popleft()

    def _news_at(self, heard: Heard | None) -> float | None:
        times = [None if self.last_status.is_copy else self._files_at, heard.at if heard else None]
        return max((float(round(at)) for at in times if at is not None), default=None)

    def _measured_rate(self) -> float | None:
        """Arrivals per minute: of a real run by its own time, of a simulation as they were seen to come."""
        if self.run.facts.is_real:
            tape = self.run.tape
            points: Sequence[tuple[float, int]] = list(
                zip(tape.time_s[-RATE_ARRIVALS:], tape.arrival[-RATE_ARRIVALS:], strict=True)
            )
        else:
            points = self._samples
        if len(points) < 2:
            return None
        (first_s, first), (last_s, last) = points[0], points[-1]
        return 60 * (last - first) / (last_s - first_s) if last_s > first_s and last > first else None

    # ---- machines

    def _machines(self, heard: Heard | None, kind: StateKind) -> Iterator[MachineState]:
        """Those that are here, and then those that are gone, the last ones first."""
        journal, totals = self.run.journal, self.run.summary.machines
        present = list(heard.status.machines) if heard else []
        ids = [machine.machine for machine in present] if heard else list(journal.seats)
        present_ids = frozenset(ids)
        departed = [id_ for id_ in {**journal.heard_s, **totals} if id_ not in present_ids]
        counts = Counter(map(name_of, (*ids, *departed)))
        labels = {id_: id_ if counts[name_of(id_)] > 1 else name_of(id_) for id_ in (*ids, *departed)}
        presence = _presence_in(kind)
        for machine in sorted(present, key=_by_seat):
            assert heard is not None
            self._machine_heard_at[machine.machine] = float(round(heard.at - machine.silent_s))
            is_away = machine.is_away and presence == "here"
            yield self._present_machine(machine, labels[machine.machine], "away" if is_away else presence)
        for id_ in () if heard else ids:
            yield self._recorded_machine(id_, labels[id_], presence)
        for id_ in sorted(departed, key=lambda id_: -journal.heard_s.get(id_, 0.0)):
            yield self._recorded_machine(id_, labels[id_], "gone")

    def _present_machine(self, machine: MachineStatus, label: str, presence: Presence) -> MachineState:
        return MachineState(
            name=label, presence=presence, worker="spare" if machine.seat is None else str(machine.seat),
            arrivals=machine.arrivals, per_minute=_short(machine.per_minute), heard_at=self._machine_heard_at[machine.machine],
        )  # fmt: skip

    def _recorded_machine(self, id_: str, label: str, presence: Presence) -> MachineState:
        journal, totals = self.run.journal, self.run.summary.machines.get(id_)
        departure, seat = journal.departures.get(id_), journal.seats.get(id_)
        heard_s = journal.heard_s.get(id_, totals.last_s if totals else None)
        why = (f"{departure.kind}: {departure.reason}" if departure.reason else departure.kind) if departure else ""
        return MachineState(
            name=label, presence=presence, worker="–" if seat is None else str(seat), arrivals=totals.arrivals if totals else 0,
            heard_at=self._machine_heard_at.get(id_), heard_run="" if heard_s is None else duration(heard_s), why=why,
        )  # fmt: skip


def watch_states(runs: Sequence[Run], statuses: Mapping[Path, LastStatus] | None = None) -> list[StateWatch]:
    """A watch for each run. `statuses`: by the run's folder, what the run says of itself."""
    by_folder = {path.resolve(): each for path, each in (statuses or {}).items()}
    return [StateWatch(run, by_folder.get(run.path.resolve())) for run in runs]


def _presence_in(kind: StateKind) -> Presence:
    """What is known of a machine that the last status or the journal has as present."""
    if kind == "suspended":
        return "away"
    return "unknown" if kind == "silent" else "gone" if kind in ENDED else "here"


def _by_seat(machine: MachineStatus) -> tuple[bool, int]:
    return machine.seat is None, machine.seat or 0


def _changed_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _short(value: float | None) -> float | None:
    """Three digits are enough for people, and change less often."""
    return None if value is None else float(f"{value:.3g}")
