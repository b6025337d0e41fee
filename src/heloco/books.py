"""The plain part of a synchronizer's state, as a checkpoint has it."""

from msgspec import Struct

from heloco.ledger import ShardPage, Span


class RoundUnderWay(Struct, frozen=True, kw_only=True):
    """A round that was dispatched and has not arrived. `Round` explains the fields."""

    worker: int
    index: int
    version: int
    shard: int
    spans: tuple[Span, ...]
    inner_steps: int
    shard_steps: int
    run_steps: float


class Books(Struct, frozen=True, kw_only=True):
    """A synchronizer's state without its tensors."""

    outer_step: int
    arrivals: int
    steps_accepted: int
    refused_in_a_row: int
    rounds_of: list[int]
    """By worker."""
    arrivals_of: list[int]
    """By worker."""
    gathered_workers: list[int]
    """Those whose contributions wait at the barrier."""
    ledger: list[ShardPage]
    held: list[RoundUnderWay]
    outer: list[dict[str, int | float | str | None]]
    """By block: what the outer rule keeps in addition to tensors."""
