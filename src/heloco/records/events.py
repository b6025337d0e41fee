"""The events of a run on real machines, as its journal keeps them.

`Join`, `Part`, `Dispatch`, `Abandon`, `Receive`, `Evaluate`, `Pause` and `Resume`. Applying them in order gives the run's state:
a restart does so from the last checkpoint on, a replay from the first. Codes (`kind`) are for programs, `text` is for people.
"""

from typing import Literal, TypeAlias

from msgspec import Struct

PartKind = Literal["left", "lost", "turned-away", "evicted"]
AbandonKind = Literal[
    "given-back", "too-stale", "lost", "expired", "not-finite", "start-gone", "stopped", "evicted", "rolled-back"
]
WASTED: frozenset[AbandonKind] = frozenset({"given-back", "lost", "expired", "not-finite"})
"""Kinds of abandoned rounds that count against the machine that held them."""
BARRING: frozenset[PartKind] = frozenset({"turned-away", "evicted"})
"""Ways to leave after which a machine may not come back."""
PauseKind = Literal["space", "machines", "participation", "admin", "restarting"]
"""restarting: the synchronizer's process is being started again. Its supervisor says so; it is never in a journal."""
EndKind = Literal["finished", "stopped", "gave-up", "failed", "suspended"]
RESUMABLE: frozenset[EndKind] = frozenset({"failed", "suspended"})
"""Ends of the synchronizer's process alone: machines keep their rounds and wait until the run is served again."""


class _Event(Struct, frozen=True, kw_only=True, tag_field="event", forbid_unknown_fields=True):
    time_s: float
    """Time on the run's own clock, which stands still while the synchronizer is down."""


class Join(_Event, frozen=True, kw_only=True, tag="join"):
    """A machine joined, or came back under its old id."""

    machine: str
    seat: int | None
    secret_hash: str
    """SHA-256 of the machine's secret."""
    token: str = ""
    """Id of the token that it showed; empty for links over Ray or inside the process."""


class Part(_Event, frozen=True, kw_only=True, tag="part"):
    """A machine left the run, or was removed from it."""

    machine: str
    kind: PartKind
    text: str


class Dispatch(_Event, frozen=True, kw_only=True, tag="dispatch"):
    """A worker's next round was handed to a machine."""

    worker: int
    steps: int
    machine: str
    start_digest: str
    """xxh3-128 of the round's start file."""


class Abandon(_Event, frozen=True, kw_only=True, tag="abandon"):
    """A round ended without an accepted contribution. Its data is handed out again."""

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
    """xxh3-128 of the file with the contribution's tensors."""
    loss: float | None
    last_loss: float | None
    samples: int
    units: int


class Evaluate(_Event, frozen=True, kw_only=True, tag="evaluate"):
    """A machine of an external run evaluated a model: the run's at an arrival, or its own some inner steps after that."""

    machine: str
    arrival: int
    outer_step: int
    arrival_s: float
    """Time of the run at the arrival."""
    inner_steps: int
    units: int
    own_steps: int
    """Inner steps that the machine had made after the arrival's parameters; 0: the parameters are the run's."""
    scores: dict[str, dict[str, float]]
    """Source -> measure -> value."""


class Pause(_Event, frozen=True, kw_only=True, tag="pause"):
    """No rounds are handed out from now on, or only to machines that have not contributed lately."""

    kind: PauseKind
    text: str


class Resume(_Event, frozen=True, kw_only=True, tag="resume"):
    """The pause is over."""


Event: TypeAlias = Join | Part | Dispatch | Abandon | Receive | Evaluate | Pause | Resume
