"""The tape: one line per arrival, with all that a later plot or replay needs.

There is no wall-clock time on the tape of a simulation: it is a function of its config.
"""

from typing import Annotated

from msgspec import Meta, Struct

from heloco.verdicts import ArrivalCode, Verdict

Index = Annotated[int, Meta(ge=0)]
CASES = {"k": "kept", "d": "damped", "t": "turned", "s": "skipped"}
"""The letter of a block on the tape, and what the outer rule did with the block."""


class BlockColumns(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What an arrival did block by block, in the order of the blocks in run.json.

    A study keeps the cases alone: then the other columns are empty."""

    case: str
    """A letter of `CASES` per block."""
    cosine: list[float | None] = []
    confidence: list[float | None] = []
    strength: list[float | None] = []
    pseudo_gradient_norm: list[float | None] = []
    momentum_norm: list[float | None] = []
    movement: list[float | None] = []


class Traffic(Struct, frozen=True):
    """Bytes of a round's tensors, as files."""

    bytes_down: int = 0
    """Bytes of the round's start, or of the difference that led to it."""
    bytes_up: int = 0
    """Bytes of the round's contribution."""


class ArrivalRecord(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A contribution as it arrived, and what became of it."""

    arrival: int
    """Accepted contributions so far, this one included."""
    verdict: Verdict
    time_s: float
    """When the contribution arrived: in virtual seconds, or in seconds on a real run's own clock."""
    start_s: float
    """When the contribution's round was handed out, on the same clock as `time_s`."""
    outer_step: int
    worker: Index
    round: int
    version: int
    """The outer step at which the round was handed out."""
    staleness: int
    weight: float
    shard: Index
    spans: tuple[tuple[int, int], ...]
    """The parts of the shard's stream that the round read: (first position, number of positions)."""
    inner_steps: int
    loss: float | None
    """Mean training loss over the round; None if it is not finite or was not reported."""
    last_loss: float | None
    samples: int
    units: int
    """What the round read, in the unit that run.json names: tokens or samples."""
    code: ArrivalCode = ""
    """Why the contribution was not applied unchanged; empty if it was."""
    reason: str = ""
    """The sentence for people that belongs to `code`."""
    clipped: float | None = None
    """The smallest factor with which the norm guard scaled a block down; None if it scaled none."""
    blocks: BlockColumns | None = None
    """What the outer rule did block by block; None if it was not applied."""
    bytes_down: int = 0
    """Bytes of the round's start as it travelled: whole, or as a difference."""
    bytes_up: int = 0
    """Bytes of the contribution."""
    machine: str = ""
    """The id of the machine that sent the contribution; empty in a simulation."""
    participants: int = 0
    """How many machines contributed to the last arrivals; 0 in a simulation."""
    digest: str = ""
    """xxh3-64 of the outer parameters after this arrival; empty in a simulation."""
