"""Requests that are refused: a code for programs, a sentence for people. A refused request has changed nothing."""

from enum import StrEnum


class Code(StrEnum):
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
    """The contribution or the model holds NaN or Inf."""
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
    FAILED = "failed"
    """The run failed with an error that its user can fix."""
    NO_SUCH = "no-such"
    """There is no machine or token of that name."""
    LAST_ADMIN = "last-admin"
    """A run without a valid admin token could not be managed any more."""


RETRIED_LATER = frozenset({Code.BUSY, Code.DISK, Code.RATE, Code.AWAY})
"""Refusals after which the same request may succeed by itself."""
RESUMED = frozenset({Code.OFFSET, Code.INCOMPLETE, Code.CORRUPTED})
"""Refusals after which a transfer continues from the bytes that have arrived."""


class Refused(Exception):
    """A request that was refused."""

    def __init__(self, code: Code, text: str, *, size: int | None = None) -> None:
        super().__init__(text)
        self.code, self.text = code, text
        self.size = size
        """Bytes of the transfer that have arrived, if the offset was wrong."""

    def __reduce__(self) -> tuple[object, ...]:
        return _make_refusal, (self.code, self.text, self.size)


def _make_refusal(code: Code, text: str, size: int | None) -> Refused:
    return Refused(code, text, size=size)
