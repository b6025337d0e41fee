"""What the synchronizer's actor and its callers share: the actor's name, its replies, and the limits of a transfer.

A reply is a value and never an exception, because Ray would wrap that. This module loads no server, so that a machine that only
joins a run loads none.
"""

from typing import Generic, TypeVar

from msgspec import Struct, structs

from heloco.cluster.protocol.link import LinkDown
from heloco.cluster.protocol.messages import Paused, Status
from heloco.cluster.protocol.refusals import Refusal, as_error
from heloco.errors import RunStopped
from heloco.wire.layout import PIECE_BYTES

NAME = "heloco-synchronizer"
PIECE = PIECE_BYTES
"""An object in Ray's store has at most this many bytes, so that neither side holds a second model in memory."""
T = TypeVar("T")


def tensor_deadline_s(size: int) -> float:
    """Time limit for a transfer of this many bytes, at a megabyte per second."""
    return 60.0 + size / 1e6


class Answer(Struct, Generic[T], frozen=True):
    """What was asked for."""

    value: T


class Down(Struct, frozen=True):
    """There is no answer at the moment: ask again later."""

    text: str


class Failed(Struct, frozen=True):
    """The run cannot go on until a person acts."""

    text: str


Reply = Answer[T] | Refusal | Down | Failed


class Begun(Struct, frozen=True, kw_only=True):
    """What the supervisor learns from a synchronizer that has opened its run."""

    address: str
    """Address of the gateway; empty if there is none."""
    notices: tuple[str, ...]
    """Sentences for the person who serves the run."""
    pid: int


def value_of(reply: Reply[T]) -> T:
    """The answer's value. Raises `Refused`, `LinkDown` or `RunStopped` if there is none."""
    if isinstance(reply, Refusal):
        raise as_error(reply)
    if isinstance(reply, Down):
        raise LinkDown(reply.text)
    if isinstance(reply, Failed):
        raise RunStopped(reply.text)
    return reply.value


def while_restarting(status: Status) -> Status:
    """The last status, while the synchronizer is down."""
    return structs.replace(status, paused=Paused(kind="restarting", text="the synchronizer is being started again"))
