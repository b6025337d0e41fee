"""What a run knows about each machine: the hash of its secret, its pace, and whether it may come back.

All of it follows from the journal, so it is the same after a restart."""

import hashlib
import hmac
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from msgspec import Struct

from heloco.records.events import BARRING, PartKind

PACES_KEPT = 8
MACHINE_LIMIT = 10_000
"""At most this many machines are remembered. The one that joined longest ago is forgotten first."""


class MachineRecord(Struct, frozen=True):
    """A machine in a checkpoint."""

    secret_hash: str
    token: str
    seat: int | None
    paces_s: list[float]
    arrivals: int
    wasted_rounds: int
    is_barred: bool
    barred_because: str


@dataclass
class MachineEntry:
    """What the run remembers about one machine, also while it is away."""

    secret_hash: str
    token: str = ""
    """Id of the token that the machine joined with last."""
    seat: int | None = None
    """The seat that the machine had. It gets the seat back if that is free."""
    paces_s: deque[float] = field(default_factory=lambda: deque(maxlen=PACES_KEPT))
    """Paces of its last rounds: seconds per inner step, from dispatch to arrival."""
    arrivals: int = 0
    """Contributions of this machine that were accepted."""
    wasted_rounds: int = 0
    """Rounds in a row that this machine wasted."""
    is_barred: bool = False
    """Whether the machine may not take part any more."""
    barred_because: str = ""
    """The same as a sentence."""

    @property
    def pace_s(self) -> float | None:
        """Mean pace of its last rounds."""
        return sum(self.paces_s) / len(self.paces_s) if self.paces_s else None


def hash_secret(secret: str) -> str:
    """The hash under which a secret is stored, so that no file holds the secret itself."""
    return hashlib.sha256(secret.encode()).hexdigest()


class MachineBook:
    """One entry per machine that ever joined, as far as they are still remembered."""

    def __init__(self) -> None:
        self._entries: dict[str, MachineEntry] = {}

    def get(self, machine: str) -> MachineEntry | None:
        """The entry of a machine; None if it never joined or was forgotten."""
        return self._entries.get(machine)

    def proves(self, machine: str, secret: str) -> bool:
        """Whether the secret is the one that this machine was given."""
        entry = self._entries.get(machine)
        return entry is not None and hmac.compare_digest(entry.secret_hash, hash_secret(secret))

    def note_join(self, machine: str, secret_hash: str, token: str, seat: int | None) -> MachineEntry:
        """A machine joined. One that is remembered keeps its paces, its counts and, without a new one, its seat."""
        entry = self._entries.pop(machine, None) or MachineEntry(secret_hash)
        entry.secret_hash, entry.token = secret_hash, token
        if seat is not None:
            entry.seat = seat
        self._entries[machine] = entry  # moved to the end: joined most recently
        return entry

    def note_arrival(self, machine: str, pace_s: float) -> None:
        """A contribution of the machine was accepted. Its count of wasted rounds begins again."""
        if entry := self._entries.get(machine):
            entry.paces_s.append(pace_s)
            entry.arrivals += 1
            entry.wasted_rounds = 0

    def note_wasted_round(self, machine: str) -> None:
        """Counts one more round in a row that the machine wasted."""
        if entry := self._entries.get(machine):
            entry.wasted_rounds += 1

    def note_part(self, machine: str, kind: PartKind, text: str) -> None:
        """A machine left. If that bars it, the first reason stays."""
        if entry := self._entries.get(machine):
            entry.seat = None
            if kind in BARRING and not entry.is_barred:
                entry.is_barred, entry.barred_because = True, text

    def forget_surplus(self, needed: Iterable[str]) -> None:
        """Forgets the oldest machines above the limit, except those that are `needed` or barred."""
        surplus = len(self._entries) - MACHINE_LIMIT
        if surplus > 0:
            exempt = set(needed)
            for machine in [m for m, entry in self._entries.items() if m not in exempt and not entry.is_barred][:surplus]:
                del self._entries[machine]

    def to_records(self) -> dict[str, MachineRecord]:
        """The entries as a checkpoint holds them."""
        return {
            machine: MachineRecord(
                entry.secret_hash, entry.token, entry.seat, list(entry.paces_s), entry.arrivals, entry.wasted_rounds,
                entry.is_barred, entry.barred_because,
            )
            for machine, entry in self._entries.items()
        }  # fmt: skip

    def load(self, records: dict[str, MachineRecord]) -> None:
        """Replaces all entries by those of a checkpoint."""
        self._entries = {
            machine: MachineEntry(
                record.secret_hash, record.token, record.seat, deque(record.paces_s, PACES_KEPT), record.arrivals,
                record.wasted_rounds, record.is_barred, record.barred_because,
            )
            for machine, record in records.items()
        }  # fmt: skip
