"""The messages between machines and a run: typed, frozen, the same over HTTPS and Ray.

Codes (`kind`, `code`) decide; `text` is for people, and no program compares it. What comes from outside is checked for types and
ranges while it is decoded (`decode`, `convert`), before anything is done with it.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from heloco.cluster.protocol.refusals import Code, Refused
from heloco.records.events import PauseKind

T = TypeVar("T")
_DIGITS = re.compile(r"[0-9]{1,16}")
MAX_WHOLE = 1 << 53
"""Above it a whole number is not safe in JSON."""
Whole: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_WHOLE)]
ShortText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=100)]
Text: TypeAlias = Annotated[str, Meta(max_length=500)]
Digest: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]
Dimension: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 40)]
Entries: TypeAlias = tuple[
    tuple[ShortText, Annotated[str, Meta(max_length=10)], Annotated[tuple[Dimension, ...], Meta(max_length=16)]], ...
]
"""Names, dtypes and shapes of a layout's tensors."""


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value that travels between a machine and a run."""


class RoundKey(NamedTuple):
    """Which round a contribution is of."""

    worker: int
    round: int
    version: int


class Ticket(Message, frozen=True, kw_only=True):
    """By what a machine proves to be itself. It gets it on joining, shows it with every request, and keeps it for coming back."""

    machine: str
    """Its id: everybody who may look at the run knows it."""
    secret: str
    """Nobody else knows it."""


EndKind = Literal["finished", "stopped", "gave-up", "failed"]


class Ended(Message, frozen=True, kw_only=True):
    """Why the run takes no more contributions.

    finished   all arrivals are in;
    stopped    somebody stopped it: it is saved and can be served again;
    gave-up    it paused for longer than it may;
    failed     its disk or its program failed. The process stops, and a restart continues: machines wait for that."""

    kind: EndKind
    text: str


class Paused(Message, frozen=True, kw_only=True):
    """Why rounds are not handed out at the moment."""

    kind: PauseKind
    text: str


# ---- joining


class RunInfo(Message, frozen=True, kw_only=True):
    """What a machine needs to know before it joins."""

    run: str
    heloco: str
    """The version that serves it."""
    config: str
    """As TOML."""
    task_digest: str
    model_digest: str
    external: bool
    """Whether the run trains a model that its machines bring."""
    ended: Ended | None = None
    ray: str = ""
    """The version of Ray that serves it; empty where none does."""


class JoinRequest(Message, frozen=True, kw_only=True):
    name: ShortText
    """For people."""
    version: ShortText
    """Of the machine's heloco."""
    layout: Entries | None = None
    """Of the machine's own model, where it brings one."""


class Joined(Message, frozen=True, kw_only=True):
    run: str
    ticket: Ticket
    seat: int | None
    """The worker whose rounds are this machine's; None: all have a machine, it waits for one."""
    seats: int
    beat_s: float
    needs_model: bool
    start_layout: Entries | None = None
    contribution_layout: Entries | None = None


class ModelOffer(Message, frozen=True, kw_only=True):
    layout: Entries


class ModelCommit(Message, frozen=True, kw_only=True):
    names: tuple[Annotated[str, Meta(max_length=500)], ...]
    digest: Digest


# ---- rounds

WaitKind = Literal["no-model", "paused", "no-seat", "rest", "busy"]


class Assignment(Message, frozen=True, kw_only=True, tag="assignment", tag_field="answer"):
    """A round as it is handed to a machine."""

    worker: int
    round: int
    version: int
    shard: int
    spans: tuple[tuple[int, int], ...]
    inner_steps: int
    shard_steps: int
    run_steps: float
    start_digest: str
    """xxh3-128 of the file that the round begins with."""
    keeps_state: bool
    """Whether the worker's last accepted round was this machine's: only then may it go on with the optimizer state of that."""

    @property
    def key(self) -> RoundKey:
        return RoundKey(self.worker, self.round, self.version)


class Wait(Message, frozen=True, kw_only=True, tag="wait", tag_field="answer"):
    """There is no round for the machine at the moment."""

    kind: WaitKind
    text: str


RoundAnswer: TypeAlias = Assignment | Wait


class RoundRequest(Message, frozen=True, kw_only=True):
    wait_s: Annotated[float, Meta(ge=0, le=3600)]


class Beat(Message, frozen=True, kw_only=True):
    """A sign of life."""

    steps: Whole
    """Inner steps of the present round that the machine says are done."""


class BeatAnswer(Message, frozen=True, kw_only=True):
    """Whether going on with the round makes sense."""

    ended: Ended | None
    paused: Paused | None
    too_stale: bool
    """Whether the contribution would come too late to be used."""
    round: RoundKey | None
    """The round that the machine holds."""


class Reason(Message, frozen=True, kw_only=True):
    text: Text


class UploadState(Message, frozen=True, kw_only=True):
    """How much of a contribution or a model has arrived, or its acknowledgement."""

    size: int = 0
    ack: "Acknowledgement | None" = None


class ContributionReport(Message, frozen=True, kw_only=True):
    """What a machine says about its contribution."""

    loss: float | None = None
    last_loss: float | None = None
    samples: Whole = 0
    units: Whole = 0


class ContributionCommit(ContributionReport, frozen=True, kw_only=True):
    digest: Digest
    """xxh3-128 of the file."""
    worker: Whole
    round: Whole
    version: Whole


class Acknowledgement(Message, frozen=True, kw_only=True):
    """What became of a contribution. It is durable when it is acknowledged."""

    worker: int
    round: int
    version: int
    verdict: str
    arrival: int
    outer_step: int
    staleness: int
    reason: str


# ---- looking at a run, and ruling it


class MachineStatus(Message, frozen=True, kw_only=True):
    machine: str
    name: str
    seat: int | None
    round: RoundKey | None
    steps: int
    pace_s: float | None
    """Seconds per inner step, transfers included, as the synchronizer measured them."""
    arrivals: int
    silent_s: float
    is_away: bool
    """It held a round before a restart and has not been heard of since."""
    wasted: int
    """Rounds in a row that came to nothing."""
    token: str
    per_minute: float | None = None
    share: float | None = None
    staleness: float | None = None


class Status(Message, frozen=True, kw_only=True):
    run: str
    folder: str
    ended: Ended | None
    paused: Paused | None
    time_s: float
    arrivals: int
    planned: int
    outer_step: int
    seats: int
    participants: tuple[str, ...]
    participation_window: int
    min_workers: int
    per_minute: float | None
    machines: tuple[MachineStatus, ...]


Right = Literal["worker", "viewer", "admin"]


class TokenInfo(Message, frozen=True, kw_only=True):
    """What may be said about a token. The secret itself is only told to who makes it."""

    id: str
    right: Right
    made: str
    note: str
    is_revoked: bool
    machines: int = 0
    """How many machines are here with it."""
    token: str = ""
    """The token, in the answer to who made it."""


class TokenList(Message, frozen=True, kw_only=True):
    tokens: tuple[TokenInfo, ...]


class TokenRequest(Message, frozen=True, kw_only=True):
    right: Right
    note: Text = ""


class TokenId(Message, frozen=True, kw_only=True):
    id: ShortText


class MachineId(Message, frozen=True, kw_only=True):
    machine: ShortText
    text: Text = ""


class Done(Message, frozen=True, kw_only=True):
    """It was done; there is nothing more to say."""


# ---- to bytes and back

encode = msgspec.json.encode


def decode(content: bytes, kind: type[T]) -> T:
    """A message from JSON, or `Refused` where it is none of its kind."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Refused(Code.MALFORMED, f"The message is not as it should be: {error}.") from None


def convert(values: Mapping[str, str], kind: type[T]) -> T:
    """A message from the named values of a query, in which whole numbers are spelt with digits and nothing else."""
    spelt = {name: int(value) if _DIGITS.fullmatch(value) else value for name, value in values.items()}
    try:
        return msgspec.convert(spelt, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Refused(Code.MALFORMED, f"The query is not as it should be: {error}.") from None


def to_plain(message: Any) -> Any:
    """As values that JSON has."""
    return msgspec.to_builtins(message)
