"""ended.json: how a run ended when a process last carried it on.

The file is missing while a process carries the run on, and after a process that was killed."""

import contextlib
import os
from pathlib import Path

import msgspec
from msgspec import Struct

from heloco.records.events import EndKind
from heloco.records.run_files import ENDED

FINISHED_TEXT = "all arrivals are in"


class RunEnd(Struct, frozen=True, kw_only=True):
    """Why no process carries the run on."""

    kind: EndKind
    text: str
    """The same as a sentence for people, without its full stop."""


def write_end(folder: Path, end: RunEnd) -> None:
    """Notes how the run in the folder ended. The file only informs people, so an error of the disk is ignored."""
    temporary = folder / f".{ENDED}.{os.getpid()}"
    with contextlib.suppress(OSError):
        temporary.write_bytes(msgspec.json.encode(end) + b"\n")
        temporary.replace(folder / ENDED)
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)


def read_end(folder: Path) -> RunEnd | None:
    """How the run in the folder ended; None if that is not known."""
    try:
        return msgspec.json.decode((folder / ENDED).read_bytes(), type=RunEnd)
    except (OSError, msgspec.MsgspecError):
        return None


def clear_end(folder: Path) -> None:
    """Forgets how the run ended, because it goes on."""
    with contextlib.suppress(OSError):
        (folder / ENDED).unlink(missing_ok=True)
