"""Reading the journal of a run: its events, checked line by line. `journal.py` describes the files and writes them."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from heloco.errors import UserError
from heloco.records.events import Event

FOLDER = "journal"
SEAL_FIELD = b',"seal":"'
_decode_event = msgspec.json.Decoder(Event).decode


class Mark(Struct, frozen=True):
    """A place in the journal: after event `number`, at byte `position`, with `seal` as the last seal."""

    number: int = 0
    position: int = 0
    seal: str = ""


class Header(Struct, frozen=True, forbid_unknown_fields=True):
    """A segment's first line: the place in the journal at which the segment begins."""

    segment: Mark


class JournalDamaged(UserError):
    """A line differs from what was written. `last_good` is the place before it."""

    def __init__(self, path: Path, last_good: Mark) -> None:
        super().__init__(
            f"{path}: the line of event {last_good.number + 1} was edited, or lines before it are missing. Restore the file from "
            f"a copy, or return to what is left with `heloco rollback {path.parent.parent}`."
        )
        self.last_good = last_good


def segments(folder: Path) -> list[tuple[int, Path]]:
    """(first byte, path) of each segment, in order."""
    paths = sorted(folder.glob("events-" + "[0-9]" * 15 + ".jsonl"))
    return [(int(path.stem.removeprefix("events-")), path) for path in paths]


def contribution_path(folder: Path, number: int) -> Path:
    """Path of the tensors of the `Receive` event with this number."""
    return folder / f"{number:012d}.safetensors"


def contribution_numbers(folder: Path) -> list[int]:
    """The numbers of the events whose tensors still exist, in order."""
    return sorted(int(path.stem) for path in folder.glob("[0-9]" * 12 + ".safetensors") if path.is_file())


def first_mark(folder: Path) -> Mark:
    """The place at which the oldest existing segment begins."""
    marks = (_header_of(path) for _, path in segments(folder))
    return next((mark for mark in marks if mark is not None), Mark())


def _header_of(path: Path) -> Mark | None:
    """The place in a segment's header; None if the header is damaged."""
    with path.open("rb") as file, contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(file.readline(), type=Header).segment
    return None


def read_events(folder: Path, since: Mark | None = None) -> Iterator[tuple[Event, Mark]]:
    """The events after `since` (by default all that exist), each with the place after it. Every line is checked.

    An incomplete last line, which a kill may leave, is skipped. A damaged line raises `JournalDamaged`."""
    mark = first_mark(folder) if since is None else since
    files = segments(folder)
    if since is not None and files and not reaches(folder, files, mark):
        raise JournalDamaged(folder / segment_name(mark.position), mark)
    for index, (base, path) in enumerate(files):
        next_base = files[index + 1][0] if index + 1 < len(files) else None
        if next_base is not None and next_base <= mark.position:
            continue
        if base > mark.position:
            raise JournalDamaged(path, mark)
        for event, mark_after in _read_segment(path, base, mark, is_last=next_base is None):
            mark = mark_after
            if event is not None:
                yield event, mark


def reaches(folder: Path, files: list[tuple[int, Path]], mark: Mark) -> bool:
    """Whether the journal has a line that ends at the mark with the mark's seal, or a segment that begins there."""
    if mark.number == 0 or any(base == mark.position and _header_of(path) == mark for base, path in files):
        return True
    base, path = max((each for each in files if each[0] < mark.position), default=(0, folder / "missing"))
    if not path.is_file() or path.stat().st_size < mark.position - base:
        return False
    with path.open("rb") as file:
        start = max(0, mark.position - base - (1 << 16))
        file.seek(start)
        line = file.read(mark.position - base - start)
    return line.endswith(f'"{mark.seal}"}}\n'.encode()) or line.endswith(f'"{mark.seal}"}}}}\n'.encode())


def _read_segment(path: Path, base: int, mark: Mark, *, is_last: bool) -> Iterator[tuple[Event | None, Mark]]:
    with path.open("rb") as file:
        file.seek(mark.position - base)
        for line in file:
            if not line.endswith(b"\n"):
                if not is_last:
                    raise JournalDamaged(path, mark)
                return
            if mark.position == base:
                mark = _checked_header(line, mark, path)
                yield None, mark
                continue
            event, mark = _checked_line(line, mark, path)
            yield event, mark


def _checked_header(line: bytes, mark: Mark, path: Path) -> Mark:
    try:
        if msgspec.json.decode(line, type=Header).segment != mark:
            raise JournalDamaged(path, mark)
    except msgspec.MsgspecError:
        raise JournalDamaged(path, mark) from None
    return Mark(mark.number, mark.position + len(line), mark.seal)


def _checked_line(line: bytes, mark: Mark, path: Path) -> tuple[Event, Mark]:
    body, _, rest = line.rpartition(SEAL_FIELD)
    number, _, fields = body.partition(b",")
    seal = seal_of(mark.seal, body)
    if number != b'{"n":%d' % (mark.number + 1) or rest != f'{seal}"}}\n'.encode():
        raise JournalDamaged(path, mark)
    try:
        event: Event = _decode_event(b"{" + fields + b"}")
    except msgspec.MsgspecError:
        raise JournalDamaged(path, mark) from None
    return event, Mark(mark.number + 1, mark.position + len(line), seal)


def seal_of(previous: str, body: bytes) -> str:
    """The hash at the end of a line: of the line and the seal before it, so of all lines up to here."""
    return hashlib.blake2b(previous.encode() + body, digest_size=6).hexdigest()


def segment_name(position: int) -> str:
    """The file of the segment that begins at this byte."""
    return f"events-{position:015d}.jsonl"
