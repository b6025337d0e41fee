"""Requests that are refused: a code for programs, a sentence for people. A refused request has changed nothing."""

from enum import StrEnum


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


class Refused(Exception):
    """A request that was refused."""

    def __init__(self, code: RefusalCode, text: str, *, size: int | None = None) -> None:
        super().__init__(text)
        self.code, self.text = code, text
        self.size = size
        """Bytes of the transfer that have arrived, if the offset was wrong."""

    def __reduce__(self) -> tuple[object, ...]:
        return _make_refusal, (self.code, self.text, self.size)


def _make_refusal(code: RefusalCode, text: str, size: int | None) -> Refused:
    return Refused(code, text, size=size)
