"""Requests that are refused: a code for programs, a sentence for people. A refused request has changed nothing."""

from enum import StrEnum

from msgspec import Struct

from heloco.records.events import EndKind


class RefusalCode(StrEnum):
    MALFORMED = "malformed"
    """The message is not one of the protocol's."""
    PATH = "path"
    METHOD = "method"
    LENGTH = "length"
    TOO_LONG = "too-long"
    TIMEOUT = "timeout"
    CUT = "cut"
    HTTP = "http"
    """The bytes were not an HTTP request."""
    INTERNAL = "internal"
    RATE = "rate"
    RIGHT = "right"
    """The token does not allow this."""
    OTHER_RUN = "other-run"
    VERSION = "version"
    ENDED = "ended"
    AWAY = "away"
    """The synchronizer's process is about to stop and will be started again: ask again later."""
    BUSY = "busy"
    DISK = "disk"
    UNKNOWN_MACHINE = "unknown-machine"
    """The machine is not in the roster, or was away for too long: it has to join again."""
    SECRET = "secret"
    """The secret in the ticket is not the machine's."""
    BARRED = "barred"
    """The machine was turned away or evicted."""
    NOT_HELD = "not-held"
    FUTURE = "future"
    NOT_FINITE = "not-finite"
    OFFSET = "offset"
    INCOMPLETE = "incomplete"
    CORRUPTED = "corrupted"
    LAYOUT = "layout"
    MODEL = "model"
    TOO_LARGE = "too-large"
    HAS_MODEL = "has-model"
    NO_MODEL = "no-model"
    FAILED = "failed"
    NO_SUCH = "no-such"
    """There is no machine or token of that name."""
    LAST_ADMIN = "last-admin"
    """A run without a valid admin token could not be managed any more."""


RETRIED_LATER = frozenset({RefusalCode.BUSY, RefusalCode.DISK, RefusalCode.RATE, RefusalCode.AWAY})
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
        return self.refusal.code

    @property
    def text(self) -> str:
        return self.refusal.text

    @property
    def size(self) -> int | None:
        return self.refusal.size

    def __reduce__(self) -> tuple[object, ...]:
        return as_error, (self.refusal,)


def as_error(refusal: Refusal) -> Refused:
    return Refused(refusal.code, refusal.text, size=refusal.size, end=refusal.end)
