"""Who takes part in a real run: which machine sits on which seat, how far its round is, and whether it is still there.

A seat is one of the synchronizer's workers. A machine has a seat of its own while there are enough of them; the rounds of empty
seats are done by whoever is free, so that a shard whose machine is gone goes on. Times are handed in.
"""

import secrets
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

GAPS = 8
UNKNOWN = 30
"""Beats that a machine may need for its first sign of progress, where nothing is known about it."""


@dataclass
class Machine:
    id: str
    """Its name, # and something random."""
    seat: int | None
    """None: all seats are taken, it waits for one."""
    joined_s: float
    seen_s: float
    """When it was last heard of."""
    progressed_s: float
    """When it last got on: a step, or bytes of a transfer."""
    pace_s: float | None = None
    away: bool = False
    """It holds a round from before a restart, and has not been heard of since."""
    steps: int = 0
    """Inner steps of its present round that are done."""
    round: tuple[int, int, int] | None = None
    """(worker, round, version) that it holds."""
    refused: int = 0
    """Contributions refused in a row."""
    committing: bool = False
    """Its contribution is all here, and it waits for the answer."""
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS))
    """Its last times between two signs of progress."""

    @property
    def name(self) -> str:
        return name_of(self.id)

    def usual_gap(self, beat_s: float) -> float | None:
        """Between two signs of progress; None where it has not shown any yet and its pace is not known."""
        return max(beat_s, self.pace_s or 0.0, *self.gaps) if self.gaps or self.pace_s else None


def name_of(machine: str) -> str:
    return machine.rpartition("#")[0]


class Machines:
    def __init__(self, seats: int, beat_s: float, patience: float) -> None:
        self.seats = seats
        self.beat_s = beat_s
        self.patience = patience
        self.present: dict[str, Machine] = {}

    def __iter__(self) -> Iterator[Machine]:
        return iter(list(self.present.values()))

    def join(
        self, name: str, now_s: float, *, returning: str | None = None, pace_s: float | None = None, seat: int | None = None
    ) -> Machine:
        """A machine comes, or comes back under the id it had, to the seat it had if that is empty."""
        if returning in self.present:
            machine = self.present[returning]
            machine.seen_s = machine.progressed_s = now_s
            machine.away = False
        else:
            made = returning or f"{name}#{secrets.token_hex(4)}"
            machine = self.present[made] = Machine(made, seat if seat in self.empty_seats() else None, now_s, now_s, now_s)
            self.seat_the_waiting()
        machine.pace_s = pace_s or machine.pace_s
        return machine

    def seat_the_waiting(self) -> None:
        """Empty seats go to those who have waited longest; a seat whose round somebody else still does goes last."""
        for machine in self:
            if machine.seat is None and (empty := self.empty_seats()):
                machine.seat = min(empty, key=lambda seat: (seat in self.held_seats(), seat))

    def empty_seats(self) -> set[int]:
        return set(range(self.seats)) - {machine.seat for machine in self if machine.seat is not None}

    def held_seats(self) -> set[int]:
        return {machine.round[0] for machine in self if machine.round}

    def leave(self, machine: Machine) -> None:
        del self.present[machine.id]
        self.seat_the_waiting()

    def saw(self, machine: Machine, now_s: float) -> None:
        machine.seen_s, machine.away = now_s, False

    def progressed(self, machine: Machine, now_s: float, *, a_step: bool = False) -> None:
        """By a step, or by bytes of a transfer, which say nothing about how long its steps take."""
        if a_step:
            machine.gaps.append(now_s - machine.progressed_s)
        machine.seen_s = machine.progressed_s = now_s

    def took(self, machine: Machine, round_: tuple[int, int, int], now_s: float) -> None:
        machine.round, machine.steps = round_, 0
        machine.seen_s = machine.progressed_s = now_s

    def forgive(self, away_s: float) -> None:
        """Time in which nobody could have been heard does not count."""
        for machine in self:
            machine.seen_s += away_s
            machine.progressed_s += away_s

    def forgive_waiting(self, now_s: float) -> None:
        """Those that are heard of are not stuck: they wait for the synchronizer."""
        for machine in self:
            machine.progressed_s = max(machine.progressed_s, min(machine.seen_s, now_s))

    def lost(self, now_s: float) -> list[Machine]:
        """Those that made no progress for too long, by what is usual for them; without a round, those not heard of."""
        found = []
        for machine in self:
            silent = now_s - machine.seen_s > self.patience * self.beat_s
            gap_s = machine.usual_gap(self.beat_s) or (self.beat_s if silent else UNKNOWN * self.beat_s)
            stuck = now_s - machine.progressed_s > self.patience * gap_s
            if (stuck if machine.round else silent) and not machine.committing:
                found.append(machine)
        return found

    def paces(self) -> list[float]:
        return [machine.pace_s for machine in self if machine.pace_s]
