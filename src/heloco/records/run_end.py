"""ended.json: how a run ended when a process last carried it on.

The file is missing while a process carries the run on, and after a process that was killed."""

import contextlib
from pathlib import Path

import msgspec
from msgspec import Struct

from heloco.records.events import EndKind
from heloco.records.run_files import ENDED

FINISHED_TEXT = "all arrivals are in"
TEMPORARY = f".{ENDED}"


class RunEnd(Struct, frozen=True, kw_only=True):
    """Why no process carries the run on."""

    kind: EndKind
    text: str
    """The same as a sentence for people, without its full stop."""


def write_end(folder: Path, end: RunEnd) -> None:
    """Notes how the run in the folder ended. The file only informs people, so an error of the disk is ignored.

    The temporary file has one name, because one process at a time writes there: what a kill leaves of it goes with the next one.
    """
    temporary = folder / TEMPORARY
    with contextlib.suppress(OSError):
        temporary.write_bytes(msgspec.json.encode(end) + b"\n")
        temporary.replace(folder / ENDED)


def read_end(folder: Path) -> RunEnd | None:
    """How the run in the folder ended; None if that is not known."""
    try:
        return msgspec.json.decode((folder / ENDED).read_bytes(), type=RunEnd)
    except (OSError, msgspec.MsgspecError):
        return None


def clear_end(folder: Path) -> None:
    """Forgets how the run ended, because it goes on."""
    for name in (ENDED, TEMPORARY):
        with contextlib.suppress(OSError):
            (folder / name).unlink(missing_ok=True)
