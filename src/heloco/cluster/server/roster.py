"""Who is here: which machine sits on which seat, how far its round is, and whether it is still there.

A seat is one of the synchronizer's workers. A machine has a seat of its own while there are enough of them; the rounds of empty
seats are done by whoever is free, so that a shard whose machine is gone goes on. Times are handed in; nothing here reads a clock.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from heloco.cluster.protocol.messages import RoundKey

GAPS_KEPT = 8
FIRST_STEP_BEATS = 30
"""Beats that a machine may need for its first step, before anything is known about it."""
IDLE_BEATS = 5.0
"""A machine on a seat that asked for no round for this many beats makes room for those that do."""
WASTED_AT_MOST = 2
"""Rounds in a row that a machine may waste before it goes to the end of the queue."""
LONGEST_REST_S = 60.0


@dataclass
class Machine:
    """A machine that has joined and is here."""

    id: str
    """Its name, #, and something random."""
    seat: int | None
    """None: all seats are taken, it waits for one."""
    seen_s: float
    """When it was last heard of."""
    progressed_s: float
    """When it last said that it had done a step, or bytes of a transfer moved."""
    asked_s: float
    """When it last asked for a round, or had one."""
    is_away: bool = False
    """It held a round before a restart and has not been heard of since."""
    steps: int = 0
    """Inner steps of its present round that it says are done."""
    round: RoundKey | None = None
    deadline_s: float = math.inf
    """When its round is given to another, whatever it says."""
    rests_until_s: float = 0.0
    """It gets no round before: it wasted several in a row."""
    refused: int = 0
    """Contributions refused in a row."""
    commits_under_way: int = 0
    """Its contribution is all here, and it waits for the answer."""
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS_KEPT))
    """The last times between two steps."""

    @property
    def name(self) -> str:
        return name_of(self.id)


def name_of(machine: str) -> str:
    """What a machine calls itself, from its id."""
    return machine.rpartition("#")[0]


class Roster:
    def __init__(self, seats: int, beat_s: float, patience: float) -> None:
        self.seats = seats
        self.beat_s = beat_s
        self.patience = patience
        self.present: dict[str, Machine] = {}
        """In the order in which they wait for a seat."""

    def __iter__(self) -> Iterator[Machine]:
        return iter(list(self.present.values()))

    def __len__(self) -> int:
        return len(self.present)

    # ---- coming and going

    def join(self, machine: str, now_s: float, *, seat: int | None = None) -> Machine:
        """A machine comes, to the seat it had if that is empty; or is heard of again."""
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
        del self.present[machine.id]
        self.seat_the_waiting()

    def seat_the_waiting(self) -> None:
        """Empty seats go to those who have waited longest; a seat whose round somebody else still does goes last."""
        empty = self.empty_seats()
        if not empty:
            return
        held = self.held_seats()
        for machine in self:
            if machine.seat is None and empty:
                machine.seat = min(empty, key=lambda seat: (seat in held, seat))
                empty.remove(machine.seat)

    def send_to_the_back(self, machine: Machine) -> None:
        """The machine gives its seat to whoever waits; where nobody does, it gets it again."""
        machine.seat = None
        self.present[machine.id] = self.present.pop(machine.id)
        self.seat_the_waiting()

    def empty_seats(self) -> set[int]:
        return set(range(self.seats)) - {machine.seat for machine in self if machine.seat is not None}

    def held_seats(self) -> set[int]:
        return {machine.round.worker for machine in self if machine.round}

    def waiting(self) -> list[Machine]:
        """Those without a seat."""
        return [machine for machine in self if machine.seat is None]

    # ---- rounds

    def took(self, machine: Machine, key: RoundKey, now_s: float, allowed_s: float) -> None:
        machine.round, machine.steps = key, 0
        machine.seen_s = machine.progressed_s = machine.asked_s = now_s
        machine.deadline_s = now_s + allowed_s

    def put_down(self, machine: Machine, now_s: float) -> None:
        """The machine holds no round any more."""
        machine.round, machine.steps, machine.deadline_s = None, 0, math.inf
        machine.asked_s = now_s

    def rest(self, machine: Machine, wasted: int, now_s: float) -> None:
        """After rounds that came to nothing the next one comes later and later, and the seat goes to who waits for it."""
        if wasted >= WASTED_AT_MOST:
            pause_s = min(LONGEST_REST_S, self.beat_s * 2.0 ** min(wasted - WASTED_AT_MOST, 16))
            machine.rests_until_s = now_s + pause_s
            if machine.seat is not None and self.waiting():
                self.send_to_the_back(machine)

    def seats_open_to(self, machine: Machine, now_s: float) -> set[int]:
        """Seats whose rounds the machine may do: its own, empty ones, and those whose machine does not attend to them."""
        own = {machine.seat} if machine.seat is not None else set()
        unattended = {m.seat for m in self if m.seat is not None and m is not machine and not self._attends(m, now_s)}
        return own | unattended | self.empty_seats()

    def _attends(self, machine: Machine, now_s: float) -> bool:
        """Whether the machine does its own seat's round, or is about to: it does not rest, and asked for one lately."""
        if machine.round is not None:
            return machine.round.worker == machine.seat
        return now_s >= machine.rests_until_s and now_s - machine.asked_s <= IDLE_BEATS * self.beat_s

    # ---- signs of life

    def saw(self, machine: Machine, now_s: float) -> None:
        machine.seen_s, machine.is_away = now_s, False

    def stepped(self, machine: Machine, steps: int, now_s: float) -> None:
        """The machine says that it has done so many steps of its round."""
        if steps != machine.steps:
            machine.steps = steps
            machine.gaps_s.append(now_s - machine.progressed_s)
            machine.seen_s = machine.progressed_s = now_s

    def moved(self, machine: Machine, now_s: float) -> None:
        """Bytes of a transfer moved, which says nothing about how long steps take."""
        machine.seen_s = machine.progressed_s = now_s

    def forgive(self, away_s: float) -> None:
        """Time in which nobody could have been heard does not count."""
        for machine in self:
            machine.seen_s += away_s
            machine.progressed_s += away_s
            machine.asked_s += away_s
            machine.deadline_s += away_s

    def forgive_waiting(self, now_s: float, passed_s: float) -> None:
        """Those that are heard of are not stuck: they wait for the synchronizer."""
        for machine in self:
            machine.progressed_s = max(machine.progressed_s, min(machine.seen_s, now_s))
            machine.deadline_s += passed_s

    def lost(self, now_s: float) -> list[Machine]:
        """Machines that were not heard of for too long, or that say themselves that they do not get on."""
        return [
            m for m in self if not m.commits_under_way and (self._is_stuck(m, now_s) if m.round else self._is_silent(m, now_s))
        ]

    def _is_silent(self, machine: Machine, now_s: float) -> bool:
        return now_s - machine.seen_s > self.patience * self.beat_s

    def _is_stuck(self, machine: Machine, now_s: float) -> bool:
        unknown_s = self.beat_s if self._is_silent(machine, now_s) else FIRST_STEP_BEATS * self.beat_s
        usual_s = max(self.beat_s, *machine.gaps_s) if machine.gaps_s else unknown_s
        return now_s - machine.progressed_s > self.patience * usual_s

    def expired(self, now_s: float) -> list[Machine]:
        """Machines whose rounds have taken longer than they may."""
        return [m for m in self if m.round and now_s > m.deadline_s and not m.commits_under_way]
