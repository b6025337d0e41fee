"""The events of a run on real machines, as its journal keeps them.

`Join`, `Part`, `Dispatch`, `Abandon`, `Receive`, `Pause` and `Resume`. Following them in their order gives the run's state:
a restart does that from the last checkpoint on, a replay from the first. Codes (`kind`) are for programs, `text` is for people.
"""

from typing import Literal, TypeAlias

from msgspec import Struct

PartKind = Literal["left", "lost", "turned-away", "evicted"]
AbandonKind = Literal[
    "given-back", "too-stale", "lost", "expired", "not-finite", "start-gone", "stopped", "evicted", "rolled-back"
]
WASTED: frozenset[AbandonKind] = frozenset({"given-back", "lost", "expired", "not-finite"})
"""Rounds that came to nothing because of the machine that held them."""
PauseKind = Literal["space", "machines", "participation", "admin"]


class _Event(Struct, frozen=True, kw_only=True, tag_field="event", forbid_unknown_fields=True):
    time_s: float
    """The run's own clock, which stands still while the synchronizer is down."""


class Join(_Event, frozen=True, kw_only=True, tag="join"):
    """A machine came, or came back under the id it had."""

    machine: str
    seat: int | None
    secret_hash: str
    """SHA-256 of the secret by which the machine proves to be itself."""
    token: str = ""
    """The id of the token it showed; empty over Ray and in this process."""


class Part(_Event, frozen=True, kw_only=True, tag="part"):
    """A machine is no longer here."""

    machine: str
    kind: PartKind
    text: str


class Dispatch(_Event, frozen=True, kw_only=True, tag="dispatch"):
    """A worker's next round was handed to a machine."""

    worker: int
    steps: int
    machine: str
    start_digest: str
    """xxh3-128 of the file with the parameters that the round begins with."""


class Abandon(_Event, frozen=True, kw_only=True, tag="abandon"):
    """A round came to nothing: its data is handed out again."""

    worker: int
    round: int
    kind: AbandonKind
    text: str


class Receive(_Event, frozen=True, kw_only=True, tag="receive"):
    """A contribution arrived. Its tensors are in the journal's folder, under the number of this event."""

    worker: int
    round: int
    version: int
    machine: str
    bytes: int
    digest: str
    """xxh3-128 of the file with its tensors."""
    loss: float | None
    last_loss: float | None
    samples: int
    units: int


class Pause(_Event, frozen=True, kw_only=True, tag="pause"):
    """No rounds are handed out from now on, or only to machines that have not contributed lately."""

    kind: PauseKind
    text: str


class Resume(_Event, frozen=True, kw_only=True, tag="resume"):
    """The pause is over."""


Event: TypeAlias = Join | Part | Dispatch | Abandon | Receive | Pause | Resume
