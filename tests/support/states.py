"""States as checkpoints have them."""

from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from heloco.books import Books
from heloco.run.checkpoint import CheckpointState, LineSizes

S = TypeVar("S", bound=Struct)


def through_json(state: S) -> S:
    """What is read again of a state that was written."""
    return msgspec.json.decode(msgspec.json.encode(state), type=type(state))


def books_at(arrivals: int, **changes: Any) -> Books:
    """The books of a run without workers and data."""
    books = Books(
        outer_step=arrivals, arrivals=arrivals, refused_in_a_row=0, rounds_of=[], arrivals_of=[], steps_of=[], inner_steps=[],
        gathered_workers=[], ledger=[], rounds_under_way=[], reserved={}, outer=[],
    )  # fmt: skip
    return msgspec.structs.replace(books, **changes)


def state_at(arrivals: int, **changes: Any) -> CheckpointState:
    """The state of such a run. `changes` are of its books."""
    lines = LineSizes(tape_bytes=7, evals_bytes=8)
    books = books_at(arrivals, **changes)
    return CheckpointState(config_digest="of a config", task_digest="ρ", books=books, lines=lines, units=9)
