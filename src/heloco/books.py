"""The plain part of a synchronizer's state, as a checkpoint has it."""

from dataclasses import dataclass

from msgspec import Struct

from heloco.ledger import ShardPage, Span


@dataclass(slots=True)
class RoundUnderWay:
    """A round that was dispatched and has not arrived."""

    worker: int
    index: int
    """How many rounds of the worker came before this one."""
    version: int
    """The outer step at dispatch, s_i."""
    shard: int
    spans: tuple[Span, ...]
    inner_steps: int
    shard_steps: int
    """Inner steps handed out on this shard before this round: the position of a learning-rate schedule by shard."""
    run_steps: float
    """Inner steps accepted in the whole run before this round, divided by the workers: the position of a schedule by run."""


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
