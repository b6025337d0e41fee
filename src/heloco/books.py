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
    progress: float
    """The part of the run's arrivals that were in before this round: the position of a learning-rate schedule by run."""


class Reservation(Struct, frozen=True):
    """The data of a worker's next round, handed out before its start is known."""

    shard: int
    spans: tuple[Span, ...]
    inner_steps: int
    shard_steps: int
    progress: float


class Books(Struct, frozen=True, kw_only=True):
    """A synchronizer's state without its tensors."""

    outer_step: int
    arrivals: int
    refused_in_a_row: int
    rounds_of: list[int]
    """The number of rounds of each worker."""
    arrivals_of: list[int]
    """The number of accepted contributions of each worker."""
    steps_of: list[int]
    """The inner steps of each worker's accepted contributions."""
    inner_steps: list[int]
    """The inner steps of each worker's last round, or of its next if it has had none. On real machines they follow the measured
    paces."""
    gathered_workers: list[int]
    """The workers whose contributions wait at the barrier."""
    ledger: list[ShardPage]
    rounds_under_way: list[RoundUnderWay]
    reserved: dict[int, Reservation]
    """The data of the next round of each worker that does not wait for its start."""
    outer: list[dict[str, int | float | str | None]]
    """What the outer rule keeps of each block in addition to tensors."""
