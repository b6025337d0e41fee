"""Requests that are refused: a code for programs, a sentence for people. A refused request has changed nothing."""

from enum import StrEnum

from msgspec import Struct

from heloco.records.events import EndKind


class RefusalCode(StrEnum):
    """Why a request was refused, for programs. The sentence next to a code is for people."""

    MALFORMED = "malformed"
    """The message is not one of the protocol's."""
    PATH = "path"
    """The gateway has no such path, or the run no such readable file."""
    METHOD = "method"
    """The path has no such method."""
    LENGTH = "length"
    """The request does not state the length of its body."""
    TOO_LONG = "too-long"
    """The body is longer than what is expected there."""
    TIMEOUT = "timeout"
    """Nothing came for too long: send the rest over a new connection."""
    CUT = "cut"
    """The connection was interrupted: send the rest."""
    HTTP = "http"
    """The bytes were not an HTTP request."""
    INTERNAL = "internal"
    """The gateway failed. Its log has the details."""
    RATE = "rate"
    """Too many requests per second came from this sender."""
    RIGHT = "right"
    """The token does not allow this."""
    OTHER_RUN = "other-run"
    """The request names another run than the one that is served here."""
    VERSION = "version"
    """The machine has another version of heloco than the run."""
    ENDED = "ended"
    """The run takes no more contributions."""
    SUSPENDED = "suspended"
    """The run is suspended: its process ends, and will be started again by whoever serves it. Machines keep their rounds."""
    AWAY = "away"
    """The synchronizer's process is about to stop and will be started again: ask again later."""
    BUSY = "busy"
    """The request cannot be served at the moment: ask again later."""
    DISK = "disk"
    """The disk of the synchronizer is full or fails: machines wait and try again."""
    UNKNOWN_MACHINE = "unknown-machine"
    """The machine is not in the roster, or was away for too long: it has to join again."""
    SECRET = "secret"
    """The secret in the ticket is not the machine's."""
    BARRED = "barred"
    """The machine was turned away or evicted."""
    NOT_HELD = "not-held"
    """The machine does not hold this round any more: it has to take a new one."""
    FUTURE = "future"
    """The round names a version that the run has not reached."""
    NOT_FINITE = "not-finite"
    """The contribution or the model holds NaN or Inf, or codes with a scale that makes no sense."""
    OFFSET = "offset"
    """The bytes do not continue those that have arrived."""
    INCOMPLETE = "incomplete"
    """Not all bytes have arrived: send the rest."""
    CORRUPTED = "corrupted"
    """The bytes that arrived are not those that were sent."""
    LAYOUT = "layout"
    """The tensors do not have the names, shapes and dtypes of this run."""
    MODEL = "model"
    """The run cannot train the model."""
    TOO_LARGE = "too-large"
    """The model is larger than the run allows."""
    HAS_MODEL = "has-model"
    """The run has a model already."""
    NO_MODEL = "no-model"
    """The machines of this run bring their own model: join it from a training script."""
    SCORES = "scores"
    """The scores are not finite, too many, or have other names than the run's earlier ones."""
    FAILED = "failed"
    """The run failed with an error that its user can fix."""
    NO_SUCH = "no-such"
    """There is no machine or token of that name."""
    LAST_ADMIN = "last-admin"
    """A run without a valid admin token could not be managed any more."""


RETRIED_LATER = frozenset({RefusalCode.BUSY, RefusalCode.DISK, RefusalCode.RATE, RefusalCode.AWAY, RefusalCode.SUSPENDED})
"""Refusals after which the same request may succeed by itself."""
RESUMED = frozenset({RefusalCode.OFFSET, RefusalCode.INCOMPLETE, RefusalCode.CORRUPTED})
"""Refusals after which a transfer continues from the bytes that have arrived."""


class Refusal(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A refusal as it travels to the machine or the person that asked."""

    code: RefusalCode
    text: str
    size: int | None = None
    """Bytes of the transfer that have arrived, if the offset was wrong."""
    end: EndKind | None = None
    """How the run ended, with the code ENDED."""

    def __post_init__(self) -> None:
        if (self.code is RefusalCode.ENDED) != (self.end is not None):
            raise ValueError("the code ENDED, and no other, comes with how the run ended")


class Refused(Exception):
    """A request that was refused."""

    def __init__(self, code: RefusalCode, text: str, *, size: int | None = None, end: EndKind | None = None) -> None:
        super().__init__(text)
        self.refusal = Refusal(code=code, text=text, size=size, end=end)

    @property
    def code(self) -> RefusalCode:
        """Why, for programs."""
        return self.refusal.code

    @property
    def text(self) -> str:
        """Why, for people."""
        return self.refusal.text

    @property
    def size(self) -> int | None:
        """Bytes of the transfer that have arrived, if the offset was wrong."""
        return self.refusal.size

    def __reduce__(self) -> tuple[object, ...]:
        return as_error, (self.refusal,)


def as_error(refusal: Refusal) -> Refused:
    """The exception for a refusal that came over a link, so that a client raises what the server raised."""
    return Refused(refusal.code, refusal.text, size=refusal.size, end=refusal.end)
