"""What a run knows of each machine from its events: how it proves to be itself, how fast it is, whether it may come back.

All of it follows from the journal, so it is the same after a restart."""

import hashlib
import hmac
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import Struct

PACES_KEPT = 8
KNOWN_AT_MOST = 10_000
"""Machines that are remembered; the one that was not heard of for the longest time is forgotten first."""


class MachineRecord(Struct, frozen=True):
    """A machine in a checkpoint."""

    secret_hash: str
    token: str
    seat: int | None
    paces_s: list[float]
    arrivals: int
    wasted: int
    barred: str


@dataclass
class KnownMachine:
    secret_hash: str
    token: str = ""
    """The id of the token it showed last."""
    seat: int | None = None
    """The seat it had: it gets it back if it is free."""
    paces_s: deque[float] = field(default_factory=lambda: deque(maxlen=PACES_KEPT))
    """Of its last rounds: seconds per inner step from handing out to arrival."""
    arrivals: int = 0
    """Contributions of it that were taken."""
    wasted: int = 0
    """Rounds in a row that came to nothing because of it."""
    barred: str = ""
    """Why it may not take part any more."""

    @property
    def pace_s(self) -> float | None:
        """The mean of its last rounds."""
        return sum(self.paces_s) / len(self.paces_s) if self.paces_s else None


def hash_secret(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


class MachineBook:
    def __init__(self) -> None:
        self._known: dict[str, KnownMachine] = {}

    def get(self, machine: str) -> KnownMachine | None:
        return self._known.get(machine)

    def proves(self, machine: str, secret: str) -> bool:
        """Whether the secret is the one that this machine was given."""
        known = self._known.get(machine)
        return known is not None and hmac.compare_digest(known.secret_hash, hash_secret(secret))

    def joined(self, machine: str, secret_hash: str, token: str, seat: int | None) -> KnownMachine:
        known = self._known.pop(machine, None) or KnownMachine(secret_hash)
        known.secret_hash, known.token = secret_hash, token
        if seat is not None:
            known.seat = seat
        self._known[machine] = known  # last: the most recently heard of
        return known

    def arrived(self, machine: str, pace_s: float) -> None:
        if known := self._known.get(machine):
            known.paces_s.append(pace_s)
            known.arrivals += 1
            known.wasted = 0

    def wasted(self, machine: str) -> None:
        if known := self._known.get(machine):
            known.wasted += 1

    def parted(self, machine: str, barred: str) -> None:
        if known := self._known.get(machine):
            known.seat = None
            known.barred = known.barred or barred

    def barred(self, machine: str) -> str:
        """Why the machine may not take part; empty where it may."""
        known = self._known.get(machine)
        return known.barred if known else ""

    def forget_surplus(self, needed: Iterable[str]) -> None:
        """Keeps the book small: machines that are not `needed` and not barred go first, the longest unheard of first."""
        surplus = len(self._known) - KNOWN_AT_MOST
        if surplus > 0:
            kept = set(needed)
            for machine in [m for m, known in self._known.items() if m not in kept and not known.barred][:surplus]:
                del self._known[machine]

    def to_records(self) -> dict[str, MachineRecord]:
        return {
            machine: MachineRecord(k.secret_hash, k.token, k.seat, list(k.paces_s), k.arrivals, k.wasted, k.barred)
            for machine, k in self._known.items()
        }

    def load(self, records: dict[str, MachineRecord]) -> None:
        self._known = {
            machine: KnownMachine(r.secret_hash, r.token, r.seat, deque(r.paces_s, PACES_KEPT), r.arrivals, r.wasted, r.barred)
            for machine, r in records.items()
        }
