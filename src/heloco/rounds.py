"""Round, Contribution and Arrival: the types that every engine shares."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from heloco.books import RoundUnderWay
from heloco.ledger import Span
from heloco.outer import Outcome
from heloco.outer.kernels.windows import Block, Release
from heloco.verdicts import ArrivalCode as ArrivalCode
from heloco.verdicts import Verdict as Verdict


@dataclass(slots=True)
class Overlap:
    """The part of a round that a worker does before the round's start has arrived.

    It goes on from its own parameters. When a block of the start arrives, after `merge_steps` inner steps, the block becomes
    share · own + (1 − share) · start. The pseudo-gradient is start − end, as in any round."""

    share: float
    merge_steps: list[int] = field(default_factory=list)
    """The number of inner steps after which each block of the start is merged."""
    parameters: list[Tensor] | None = field(default=None, repr=False)
    """The worker's own, after its last round. None: there was no such round, and the worker waits for the start."""


@dataclass(slots=True)
class Round(RoundUnderWay):
    """One worker's H inner steps, as the synchronizer hands them out."""

    parameters: list[Tensor] = field(default_factory=list, repr=False)
    """The parameters that the round begins with. They are shared between rounds and must not be written to."""
    buffers: list[Tensor] = field(default_factory=list, repr=False)
    memory: dict[str, Tensor] | None = field(default=None, repr=False)
    """The worker's optimizer state after its last round. It belongs to the worker; engines only pass it on."""
    overlap: Overlap | None = None
    """None: the worker begins with the start."""


@dataclass(slots=True)
class Contribution:
    """The result of a round, as the worker hands it in."""

    worker: int
    index: int
    version: int
    pseudo_gradient: Sequence[Block] = field(default_factory=list, repr=False)
    buffers: list[Tensor] = field(default_factory=list, repr=False)
    loss: float | None = None
    """Mean training loss over the round."""
    last_loss: float | None = None
    samples: int = 0
    units: int = 0
    """Tokens or examples, whichever the task counts."""
    memory: dict[str, Tensor] | None = field(default=None, repr=False)
    end: list[Tensor] | None = field(default=None, repr=False)
    """The worker's own parameters after a round with `Overlap`."""
    release: Release | None = field(default=None, repr=False)
    """Gives back what was read of tensors in a mapped file."""


NOT_FINITE = "the pseudo-gradient has no finite norm"


@dataclass(slots=True)
class Arrival:
    """What became of a contribution."""

    verdict: Verdict
    arrival: int
    """Accepted contributions so far, this one included."""
    outer_step: int
    """Outer steps so far, this one included."""
    worker: int
    round: int
    version: int
    staleness: int
    weight: float
    shard: int
    spans: tuple[Span, ...]
    inner_steps: int
    released: tuple[int, ...]
    """Workers that may start again now."""
    code: ArrivalCode = ""
    """Why the contribution was not applied unchanged, for programs; empty if it was."""
    reason: str = ""
    """The code as a sentence, for people."""
    clipped: float = 1.0
    """The smallest factor by which the norm guard scaled a block down; 1 if it scaled none."""
    outcomes: list[Outcome] = field(default_factory=list, repr=False)
    movements: list[float] = field(default_factory=list, repr=False)
