"""What goes out to a worker, what comes back, and what became of it: the types that every engine shares."""

from dataclasses import dataclass, field

from torch import Tensor

from heloco.ledger import Span
from heloco.outer import Outcome
from heloco.verdicts import Code as Code
from heloco.verdicts import Verdict as Verdict


@dataclass(slots=True)
class Round:
    """One worker's H inner steps: handed out by the synchronizer, the same whoever runs it."""

    worker: int
    index: int
    """The worker's rounds before this one that were accepted or refused."""
    version: int
    """The outer step at dispatch, s_i."""
    shard: int
    spans: tuple[Span, ...]
    inner_steps: int
    shard_steps: int
    """Inner steps handed out on this shard before this round: where a schedule positioned by shard stands."""
    run_steps: float
    """Inner steps accepted in the whole run before this round, over the number of workers: a schedule positioned by run."""
    parameters: list[Tensor] = field(default_factory=list, repr=False)
    """What the worker starts from. Shared between rounds: never written to."""
    buffers: list[Tensor] = field(default_factory=list, repr=False)
    memory: dict[str, Tensor] | None = field(default=None, repr=False)
    """What the worker keeps from its last round (its optimizer's state). It stays with the worker; engines only carry it."""


@dataclass(slots=True)
class Contribution:
    """What a worker hands back."""

    worker: int
    index: int
    version: int
    pseudo_gradient: list[Tensor] = field(default_factory=list, repr=False)
    buffers: list[Tensor] = field(default_factory=list, repr=False)
    loss: float | None = None
    """Mean training loss over the round."""
    last_loss: float | None = None
    samples: int = 0
    units: int = 0
    """What the task counts: tokens, or examples."""
    memory: dict[str, Tensor] | None = field(default=None, repr=False)


NOT_FINITE = "the pseudo-gradient has no finite norm"


@dataclass(slots=True)
class Arrival:
    """What the synchronizer made of a contribution."""

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
    code: Code = ""
    """Why it was not simply applied, for programs."""
    reason: str = ""
    """The same as a sentence."""
    clipped: float = 1.0
    """The smallest factor that a block was scaled down with by the norm guard; 1 if none was."""
    outcomes: list[Outcome] = field(default_factory=list, repr=False)
    movements: list[float] = field(default_factory=list, repr=False)
