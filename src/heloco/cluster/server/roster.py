"""The machines that are present: the seat of each, the progress of its round, and whether it is lost.

A seat is one of the synchronizer's workers. A machine has its own seat while there are enough of
them. Any free machine does the rounds of empty seats, so that the shard of a lost machine is still
trained. The caller passes times in; nothing here reads a clock."""

import math
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from heloco.cluster.protocol.messages import RoundKey
from heloco.records.machine_ids import name_of

GAPS_KEPT = 8
FIRST_STEP_BEATS = 30
"""Time that a machine may take for its first step, in beats, before its pace is known."""
IDLE_BEATS = 5.0
"""If a machine has not asked for a round for this many beats, others may do the rounds of its seat."""
WASTED_LIMIT = 2
"""After this many wasted rounds in a row, a machine has to rest and goes to the end of the queue for a seat."""
REST_LIMIT_S = 60.0


@dataclass
class Machine:
    """A machine that is present in the run."""

    id: str
    """NAME#RANDOM."""
    seat: int | None
    """The worker whose rounds it does; None if all seats are taken."""
    seen_s: float
    """When the machine was last heard from."""
    progressed_s: float
    """When it last reported a new step, or bytes of a transfer moved."""
    asked_s: float
    """When the machine last asked for a round, or held one."""
    is_away: bool = False
    """Whether it held a round before a restart and has not been heard from since."""
    steps: int = 0
    """Inner steps of its current round that are done, as the machine reports them."""
    round: RoundKey | None = None
    deadline_s: float = math.inf
    """When its round is given to another machine, even if it still reports progress."""
    rests_until_s: float = 0.0
    """The machine gets no round before this time, because it wasted several in a row."""
    refusals_in_a_row: int = 0
    """Number of its contributions that were refused in a row."""
    evaluates: bool = False
    """Whether the machine offers to evaluate models."""
    has_evaluated: bool = False
    """Whether the machine has evaluated a model since its last round."""
    commits_under_way: int = 0
    """Number of its commits that are being processed. While there is one, the machine is not lost."""
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS_KEPT))
    """Times between its last reports of a new step."""

    @property
    def name(self) -> str:
        """The part of the id that a person chose. Several machines may have the same."""
        return name_of(self.id)


class Roster:
    """The machines that are present, who has which seat, and which of them are lost."""

    def __init__(self, seats: int, beat_s: float, patience: float) -> None:
        self.seats = seats
        self.beat_s = beat_s
        self.patience = patience
        self.present: dict[str, Machine] = {}
        """Machine id -> machine, in the order in which they wait for a seat."""
        self._counting = threading.Lock()

    def __iter__(self) -> Iterator[Machine]:
        return iter(list(self.present.values()))

    def __len__(self) -> int:
        return len(self.present)

    # ---- commits

    @contextmanager
    def committing(self, machine: Machine) -> Iterator[None]:
        """Inside this context the machine waits for the answer to a commit, so it is not lost. It may wait for several: it sends
        a commit again if the connection of the first one is cut."""
        self._count_commits(machine, 1)
        try:
            yield
        finally:
            self._count_commits(machine, -1)

    def _count_commits(self, machine: Machine, change: int) -> None:
        with self._counting:  # not the service's lock, which another commit holds during its outer step
            machine.commits_under_way += change

    @property
    def commits_under_way(self) -> int:
        """Number of commits that are being processed, of all machines."""
        return sum(machine.commits_under_way for machine in self)

    # ---- coming and going

    def join(self, machine: str, now_s: float, *, seat: int | None = None) -> Machine:
        """Adds a machine, on the seat it had if that is empty. A machine that is present counts as heard from."""
        if machine in self.present:
            present = self.present[machine]
            present.seen_s = present.progressed_s = now_s
            present.is_away = False
            return present
        free = seat if seat is not None and seat in self.empty_seats() else None
        present = self.present[machine] = Machine(machine, free, now_s, now_s, now_s)
        self.seat_the_waiting()
        return present

    def leave(self, machine: Machine) -> None:
        """Removes a machine. Its seat goes to the machine that has waited longest."""
        del self.present[machine.id]
        self.seat_the_waiting()

    def seat_the_waiting(self) -> None:
        """Gives empty seats to the machines that have waited longest. A seat whose round another machine still does goes last."""
        empty = self.empty_seats()
        if not empty:
            return
        held_seats = self.held_seats()
        for machine in self:
            if machine.seat is None and empty:
                machine.seat = min(empty, key=lambda seat: (seat in held_seats, seat))
                empty.remove(machine.seat)

    def send_to_the_back(self, machine: Machine) -> None:
        """The machine gives its seat to a waiting one. If none waits, it gets the seat back."""
        machine.seat = None
        self.present[machine.id] = self.present.pop(machine.id)
        self.seat_the_waiting()

    def empty_seats(self) -> set[int]:
        """The seats that no present machine has."""
        return set(range(self.seats)) - {machine.seat for machine in self if machine.seat is not None}

    def held_seats(self) -> set[int]:
        """The seats whose round a present machine holds, also one that sits on another seat."""
        return {machine.round.worker for machine in self if machine.round}

    def waiting(self) -> list[Machine]:
        """Machines without a seat."""
        return [machine for machine in self if machine.seat is None]

    # ---- rounds

    def assign(self, machine: Machine, key: RoundKey, now_s: float, allowed_s: float) -> None:
        """The machine holds this round from now on, for at most `allowed_s`."""
        machine.round, machine.steps, machine.has_evaluated = key, 0, False
        machine.seen_s = machine.progressed_s = machine.asked_s = now_s
        machine.deadline_s = now_s + allowed_s

    def put_down(self, machine: Machine, now_s: float) -> None:
        """The machine holds no round any more."""
        machine.round, machine.steps, machine.deadline_s = None, 0, math.inf
        machine.asked_s = now_s

    def rest(self, machine: Machine, wasted_rounds: int, now_s: float) -> None:
        """After several wasted rounds, makes the machine wait, longer each time, and gives its seat to a waiting machine."""
        if wasted_rounds >= WASTED_LIMIT:
            pause_s = min(REST_LIMIT_S, self.beat_s * 2.0 ** min(wasted_rounds - WASTED_LIMIT, 16))
            machine.rests_until_s = now_s + pause_s
            if machine.seat is not None and self.waiting():
                self.send_to_the_back(machine)

    def seats_open_to(self, machine: Machine, now_s: float) -> set[int]:
        """Seats whose rounds the machine may do: its own, empty ones, and those whose own machine does not use them."""
        own_seat = {machine.seat} if machine.seat is not None else set()
        unattended_seats = {m.seat for m in self if m.seat is not None and m is not machine and not self._attends(m, now_s)}
        return own_seat | unattended_seats | self.empty_seats()

    def _attends(self, machine: Machine, now_s: float) -> bool:
        """Whether the machine does its own seat's round, or will soon: it is not resting, and asked for a round lately."""
        if machine.round is not None:
            return machine.round.worker == machine.seat
        return now_s >= machine.rests_until_s and now_s - machine.asked_s <= IDLE_BEATS * self.beat_s

    # ---- signs of life

    def note_seen(self, machine: Machine, now_s: float) -> None:
        """Notes that the machine was heard from. It says nothing about its progress."""
        machine.seen_s, machine.is_away = now_s, False

    def note_steps(self, machine: Machine, steps: int, now_s: float) -> None:
        """Notes how many steps of its round the machine reports as done."""
        if steps != machine.steps:
            machine.steps = steps
            machine.gaps_s.append(now_s - machine.progressed_s)
            machine.seen_s = machine.progressed_s = now_s

    def note_transfer(self, machine: Machine, now_s: float) -> None:
        """Notes progress of a transfer. It does not count as a step."""
        machine.seen_s = machine.progressed_s = now_s

    def forgive(self, away_s: float) -> None:
        """Does not count time in which the synchronizer itself stood still."""
        for machine in self:
            machine.seen_s += away_s
            machine.progressed_s += away_s
            machine.asked_s += away_s
            machine.deadline_s += away_s

    def forgive_waiting(self, now_s: float, passed_s: float) -> None:
        """Does not count time in which machines wait for room on the synchronizer's disk. Only
        machines that are silent can be lost."""
        for machine in self:
            machine.progressed_s = max(machine.progressed_s, min(machine.seen_s, now_s))
            machine.deadline_s += passed_s

    def find_lost(self, now_s: float) -> list[Machine]:
        """Machines that were silent for too long, or whose reports show no progress for too long."""
        return [
            m for m in self if not m.commits_under_way and (self._is_stuck(m, now_s) if m.round else self._is_silent(m, now_s))
        ]

    def _is_silent(self, machine: Machine, now_s: float) -> bool:
        return now_s - machine.seen_s > self.patience * self.beat_s

    def _is_stuck(self, machine: Machine, now_s: float) -> bool:
        unknown_s = self.beat_s if self._is_silent(machine, now_s) else FIRST_STEP_BEATS * self.beat_s
        usual_s = max(self.beat_s, *machine.gaps_s) if machine.gaps_s else unknown_s
        return now_s - machine.progressed_s > self.patience * usual_s

    def find_expired(self, now_s: float) -> list[Machine]:
        """Machines whose rounds are past their deadline."""
        return [m for m in self if m.round and now_s > m.deadline_s and not m.commits_under_way]
