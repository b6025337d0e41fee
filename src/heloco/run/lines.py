"""Append-only files of JSON lines: the tape and the evaluations."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from heloco.disk import make_durable
from heloco.errors import UserError


class Lines:
    """Each line reaches the operating system at once, so that a killed process loses none; `sync` makes them durable."""

    def __init__(self, path: Path, size: int) -> None:
        """Opens for appending after the first `size` bytes; what comes after them is cut off (an interrupted run's tail)."""
        self.path = path
        self._file = path.open("ab", buffering=0)
        self._size = size
        if self._file.seekable():
            self._file.truncate(size)

    def append(self, record: dict[str, Any]) -> None:
        """On an error nothing of the line stays."""
        line = json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            if self._file.seekable():
                self._file.truncate(self._size)
            raise
        self._size += len(line)

    def sync(self) -> int:
        """Makes all lines durable and returns their size in bytes."""
        make_durable(self._file.fileno(), self.path)
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file; a last line without its end (a run that was killed) is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.endswith(b"\n"):
                try:
                    yield json.loads(line)
                except ValueError as error:
                    raise UserError(
                        f"{path}: line {number} was edited and is no record. Restore it, or start the run again."
                    ) from error
