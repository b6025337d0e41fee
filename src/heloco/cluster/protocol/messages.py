"""The messages between machines and a run: typed, frozen, the same over HTTPS and Ray.

Codes (`kind`, `code`) decide; `text` is for people, and no program compares it. Messages from outside are checked for types and
ranges while they are decoded (`decode`, `convert`), before they are used."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.records.events import EndKind, PauseKind
from heloco.verdicts import ArrivalCode, Verdict

T = TypeVar("T")
_DIGITS = re.compile(r"[0-9]{1,16}")
NATURAL_LIMIT = 1 << 53
"""A larger whole number is not exact in JSON."""
Natural: TypeAlias = Annotated[int, Meta(ge=0, le=NATURAL_LIMIT)]
SHORT_TEXT_LIMIT, TEXT_LIMIT = 100, 500
ShortText: TypeAlias = Annotated[str, Meta(min_length=1, max_length=SHORT_TEXT_LIMIT)]
Text: TypeAlias = Annotated[str, Meta(max_length=TEXT_LIMIT)]
Digest: TypeAlias = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$")]
Dimension: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 40)]
Entry: TypeAlias = tuple[ShortText, Annotated[str, Meta(max_length=10)], Annotated[tuple[Dimension, ...], Meta(max_length=16)]]
Entries: TypeAlias = tuple[Entry, ...]
"""Names, dtypes and shapes of a layout's tensors."""


class Message(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value that travels between a machine and a run."""


class RoundKey(NamedTuple):
    """The round that a contribution belongs to."""

    worker: int
    round: int
    version: int


class Ticket(Message, frozen=True, kw_only=True):
    """Proves which machine sends a request. A machine gets it when it joins, and keeps it so that it can come back."""

    machine: str
    """The machine's id. Everybody who may look at the run can see it."""
    secret: str
    """A secret that only this machine knows; the run keeps its hash."""


class Ended(Message, frozen=True, kw_only=True):
    """Why the run takes no more contributions.

    finished   all arrivals are in;
    stopped    somebody stopped it; it is saved and can be served again;
    gave-up    it was paused for longer than `give_up_after_s`;
    failed     its disk or its program failed. The process stops, machines wait, and a restart continues;
    suspended  whoever serves it ended the process and will start it again. Machines keep their rounds and wait."""

    kind: EndKind
    text: str


class Paused(Message, frozen=True, kw_only=True):
    """Why no rounds are handed out at the moment."""

    kind: PauseKind
    text: str


# ---- joining


class RunInfo(Message, frozen=True, kw_only=True):
    """What a machine needs to know before it joins."""

    run: str
    heloco: str
    """The version of heloco that serves the run."""
    config: str
    """The run's config as TOML."""
    task_digest: str
    model_digest: str
    external: bool
    """Whether the run trains a model that its machines bring."""
    ended: Ended | None = None
    ray: str = ""
    """The version of Ray that serves the run; empty if it is served without Ray."""


class JoinRequest(Message, frozen=True, kw_only=True):
    """A machine asks to join the run."""

    name: ShortText
    """The machine's name, for people."""
    version: ShortText
    """The version of heloco on the machine."""
    layout: Entries | None = None
    """The blocks of the machine's own model, if it brings one."""


class WireTerms(Message, frozen=True, kw_only=True):
    """How contributions are encoded: settings of [links] by their names there, and the run's seed for stochastic rounding."""

    wire: ShortText
    rounding: Literal["nearest", "stochastic"]
    error_feedback: bool
    feedback_decay: float
    seed: int


class Joined(Message, frozen=True, kw_only=True):
    """The machine is in the run: its ticket, its seat, and the layouts of the tensors that it will exchange."""

    run: str
    ticket: Ticket
    seat: int | None
    """The worker whose rounds this machine does; None if every worker has a machine, and this one is a spare."""
    seats: int
    planned_arrivals: int
    """How many contributions the run will take in."""
    beat_s: float
    terms: WireTerms
    needs_model: bool
    start_layout: Entries | None = None
    contribution_layout: Entries | None = None


class ModelOffer(Message, frozen=True, kw_only=True):
    """A machine announces the model that it will send to an external run."""

    layout: Entries


class ModelCommit(Message, frozen=True, kw_only=True):
    """All bytes of the model are sent: the names of its blocks, and the digest to check the bytes with."""

    names: tuple[Annotated[str, Meta(min_length=1, max_length=500)], ...]
    digest: Digest


# ---- rounds

WaitKind = Literal["no-model", "paused", "stopping", "no-seat", "rest", "grace", "busy", "evaluation"]


class Assignment(Message, frozen=True, kw_only=True, tag="assignment", tag_field="answer"):
    """A round as it is handed to a machine."""

    worker: int
    round: int
    version: int
    shard: int
    spans: tuple[tuple[int, int], ...]
    inner_steps: int
    shard_steps: int
    progress: float
    start_digest: str
    """xxh3-128 of the file that the round begins with."""
    keeps_state: bool
    """Whether this machine did the worker's last accepted round. Only then may it reuse its optimizer state."""
    last_accepted: int
    """The worker's last accepted round if this machine did it, else -1. Only that round's residual counts (wire/encoder.py)."""

    @property
    def key(self) -> RoundKey:
        """Identifies the round in requests about it."""
        return RoundKey(self.worker, self.round, self.version)


class Wait(Message, frozen=True, kw_only=True, tag="wait", tag_field="answer"):
    """There is no round for the machine at the moment."""

    kind: WaitKind
    text: str
    ask_again_s: float = 1.0
    """Seconds after which the machine asks again, if the run has not changed before."""


class EvaluationJob(Message, frozen=True, kw_only=True, tag="evaluation", tag_field="answer"):
    """A model to evaluate, with the xxh3-128 of its file, for a machine that offers to."""

    arrival: int
    digest: str


RoundAnswer: TypeAlias = Assignment | EvaluationJob | Wait


class RoundRequest(Message, frozen=True, kw_only=True):
    """A machine asks for its next round."""

    wait_s: Annotated[float, Meta(ge=0, le=3600)]
    evaluates: bool = False
    """Whether the machine offers to evaluate models."""


class Beat(Message, frozen=True, kw_only=True):
    """A sign of life."""

    steps: Natural
    """Inner steps of the current round that are done, as the machine reports them."""


class BeatAnswer(Message, frozen=True, kw_only=True):
    """Whether it is still worth continuing the round."""

    ended: Ended | None
    paused: Paused | None
    too_stale: bool
    """Whether the contribution would arrive too late to be used."""
    round: RoundKey | None
    """The round that the machine holds."""


class Reason(Message, frozen=True, kw_only=True):
    """Why a machine gives its round back or leaves, or why a person stops or pauses the run."""

    text: Text


class UploadState(Message, frozen=True, kw_only=True):
    """How much of a contribution or a model has arrived, or its acknowledgement."""

    size: int = 0
    ack: "Acknowledgement | None" = None


class ContributionReport(Message, frozen=True, kw_only=True):
    """What a machine reports with its contribution."""

    loss: float | None = None
    last_loss: float | None = None
    samples: Natural = 0
    units: Natural = 0


class ContributionCommit(ContributionReport, frozen=True, kw_only=True):
    """All bytes of a contribution are sent: the report, the round it belongs to, and the file's xxh3-128 to check them with."""

    digest: Digest
    worker: Natural
    round: Natural
    version: Natural


class Acknowledgement(Message, frozen=True, kw_only=True):
    """What became of a contribution. An acknowledged contribution is durable."""

    worker: int
    round: int
    version: int
    verdict: Verdict
    code: ArrivalCode
    """Why the contribution was not applied unchanged; empty if it was."""
    reason: str
    """The code as a sentence, for people."""
    arrival: int
    outer_step: int
    staleness: int


# ---- looking at a run, and controlling it


class MachineStatus(Message, frozen=True, kw_only=True):
    """What the run knows about one machine: its seat, its round, its pace, and what it has contributed."""

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
    """Whether the machine held a round before a restart and has not been heard from since."""
    wasted_rounds: int
    """Rounds in a row that this machine wasted."""
    token: str
    per_minute: float | None = None
    share: float | None = None
    staleness: float | None = None


class Status(Message, frozen=True, kw_only=True):
    """The state of a run for people who look at it: how far it is, whether it is paused or has ended, and its machines."""

    run: str
    folder: str
    ended: Ended | None
    paused: Paused | None
    time_s: float
    arrivals: int
    arrival_goal: int
    outer_step: int
    seats: int
    participants: tuple[str, ...]
    participation_window: int
    min_workers: int
    beat_s: float
    """Seconds between two signs of life of a machine."""
    per_minute: float | None
    evaluations_due: int
    """How many evaluations are under way or waiting."""
    machines: tuple[MachineStatus, ...]


Right = Literal["worker", "viewer", "admin"]


class TokenInfo(Message, frozen=True, kw_only=True):
    """The public facts of a token. Its secret is sent once, to the person who makes it."""

    id: str
    right: Right
    created: str
    """The day on which the token was made."""
    note: str
    is_revoked: bool
    machines: int = 0
    """How many present machines joined with this token."""
    token: str = ""
    """The token itself, only in the answer to the request that made it."""


class TokenList(Message, frozen=True, kw_only=True):
    """All tokens of a run, without their secrets."""

    tokens: tuple[TokenInfo, ...]


class TokenRequest(Message, frozen=True, kw_only=True):
    """A person asks for a new token."""

    right: Right
    note: Text = ""


class TokenId(Message, frozen=True, kw_only=True):
    """A person names the token to revoke."""

    id: ShortText


class MachineId(Message, frozen=True, kw_only=True):
    """A person names the machine to evict, and says why."""

    machine: ShortText
    text: Text = ""


class Done(Message, frozen=True, kw_only=True):
    """The request succeeded, and the answer has no content."""


# ---- to bytes and back

encode = msgspec.json.encode


def decode(content: bytes, kind: type[T]) -> T:
    """A message from JSON. Raises `Refused` if it does not have the type `kind`."""
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise Refused(RefusalCode.MALFORMED, f"The message is malformed: {error}.") from None


def convert(values: Mapping[str, str], kind: type[T]) -> T:
    """A message from the values of a query, where a text of digits alone is a whole number."""
    fields = {name: int(value) if _DIGITS.fullmatch(value) else value for name, value in values.items()}
    try:
        return msgspec.convert(fields, type=kind)
    except (msgspec.MsgspecError, ValueError) as error:
        raise Refused(RefusalCode.MALFORMED, f"The query is malformed: {error}.") from None


def printable(text: str, limit: int = TEXT_LIMIT) -> str:
    """The text without control characters, because it is shown in terminals and written to files, and not too long to send."""
    return "".join(c if c.isprintable() else " " for c in text)[:limit].strip()


def to_plain(message: Any) -> Any:
    """The message as plain values that JSON can hold."""
    return msgspec.to_builtins(message)
