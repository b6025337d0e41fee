"""Append-only files of JSON lines: the tape and the evaluations."""

from collections.abc import Iterator
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
from msgspec import Struct

from heloco.disk import make_durable
from heloco.errors import UserError

RecordT = TypeVar("RecordT", bound=Struct)
"""`ArrivalRecord` or `EvaluationRecord`."""


class Lines(Generic[RecordT]):
    """A file of records, open for appending.

    Each line reaches the operating system at once, so that a killed process loses none; `sync` makes them durable."""

    def __init__(self, path: Path, size: int, kind: type[RecordT]) -> None:
        """Opens for appending after the first `size` bytes; what comes after them is cut off (an interrupted run's tail)."""
        self.path = path
        self._decode = msgspec.json.Decoder(kind).decode
        self._file = path.open("ab", buffering=0)
        self._size = size
        if self._file.seekable():
            self._file.truncate(size)

    def append(self, record: RecordT) -> None:
        """On an error nothing of the line stays. What could not be read again is an error."""
        content = msgspec.json.encode(record)
        self._decode(content)
        line = content + b"\n"
        try:
            bytes_written = 0
            while bytes_written < len(line):
                bytes_written += self._file.write(line[bytes_written:])
        except OSError:
            if self._file.seekable():
                self._file.truncate(self._size)
            raise
        self._size += len(line)

    @property
    def size(self) -> int:
        """Size of all lines in bytes."""
        return self._size

    def sync(self) -> None:
        """Makes all lines durable."""
        make_durable(self._file.fileno(), self.path)

    def close(self) -> None:
        """Closes the file. Its lines reached the operating system, but call `sync` first to make them durable."""
        self._file.close()


class Tail(Generic[RecordT]):
    """The records of a file that may still grow, each once."""

    def __init__(self, path: Path, kind: type[RecordT], last_bytes: int | None = None) -> None:
        """`last_bytes`: begin with the first whole line within the last bytes of the file."""
        self.path = path
        self.has_cut_line = False
        """Whether the file ends in a line without its end, as a killed run leaves it."""
        self._decode = msgspec.json.Decoder(kind).decode
        self._offset = self._number = 0
        if last_bytes is not None and self._size() > last_bytes:
            with path.open("rb") as file:
                self._offset = file.seek(self._size() - last_bytes - 1)
                self._offset += len(file.readline())

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def was_cut(self) -> bool:
        """Whether the file is shorter than it was read: the run was resumed from a checkpoint."""
        return self._size() < self._offset

    def more(self) -> Iterator[RecordT]:
        """What was added since the last call."""
        self.has_cut_line = False
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    self.has_cut_line = True
                    return
                self._offset, self._number = self._offset + len(line), self._number + 1
                try:
                    record = self._decode(line)
                except msgspec.DecodeError as error:
                    raise self.line_error(str(error)) from None
                yield record

    def line_error(self, why: str) -> UserError:
        """The error to raise if the line that was read last cannot be used."""
        return UserError(
            f"{self.path}: line {self._number} was edited and is no record ({why}). Restore it, or start the run again."
        )


def read_records(path: Path, kind: type[RecordT]) -> Iterator[RecordT]:
    """The whole lines of a file; a last line without its end (a run that was killed) is left out."""
    return Tail(path, kind).more()
