"""What a machine in a run is doing, for the person who runs it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from heloco.cluster.protocol.messages import WaitKind

T = TypeVar("T")
Doing = Literal["joining", "waiting", "receiving", "training", "sending", "evaluating"]


@dataclass(frozen=True)
class Transfer:
    """A file of tensors that came or went."""

    bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """How fast it was, its acknowledgement included."""
        return self.bytes / max(self.seconds, 1e-9)


def timed_transfer(size: int, transfer: Callable[[], T]) -> tuple[T, Transfer]:
    """Calls `transfer`, which sends or receives `size` bytes. Returns its result, and how long it took."""
    began = time.monotonic()
    result = transfer()
    return result, Transfer(size, time.monotonic() - began)


@dataclass(frozen=True, kw_only=True)
class MachineActivity:
    """A machine's part in its run at this moment."""

    doing: Doing
    wait_kind: WaitKind | None
    """Why the run has no round for it at the moment; None if it has one, or has not asked."""
    waits_for: str
    """Why it has no round, or why the run does not answer, as a sentence; empty if it waits for nothing."""
    is_suspended: bool
    """Whether the run said last that it is suspended and will be served again."""
    worker: int | None
    """The worker whose round it does, or did last; None before the first."""
    round: int
    steps: int
    """Inner steps of the round that are done."""
    inner_steps: int
    rounds: int
    """Rounds that were handed in and acknowledged since this machine joined."""
    accepted: int
    """Those of them that the run did not refuse."""
    loss: float | None
    """The mean training loss of the last round."""
    pace_s: float | None
    """Seconds per inner step in the last round."""
    arrivals: int
    """How many arrivals the run has, as this machine heard last."""
    planned_arrivals: int
    share: float | None
    """This machine's share of the arrivals since it joined; None before the first."""
    download: Transfer | None
    upload: Transfer | None
