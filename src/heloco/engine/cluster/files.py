"""What comes in from machines, and goes out to them, as files: nothing is believed before it was checked."""

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor

from heloco.engine.cluster.recorded import start_layout
from heloco.run.disk import FULL, write_all
from heloco.run.tensors import Layout, write
from heloco.synchronizer import Synchronizer

Key = tuple[int, int, int]
"""(worker, round, version) of a contribution."""
ROUNDS = "rounds"
LARGE = 1 << 20


class Denied(Exception):
    """A request that is refused: `name` for programs, the text for people."""

    def __init__(self, name: str, sentence: str, **about: Any) -> None:
        super().__init__(sentence)
        self.name, self.about = name, about


class Incoming:
    """A file on its way in. Hashed as it comes; nothing of it is believed before its header is the layout's, to the byte."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path, self.layout = path, layout
        self.size = 0
        self.turn = 0
        self._hashed = xxhash.xxh3_128()
        self._file = path.open("wb", buffering=0)
        self._lock = threading.Lock()
        self._sealed = False

    def begin(self, offset: int) -> int:
        """A connection takes over; one that is still open from before may write no more. Gives the turn to write with."""
        with self._lock:
            if self._file.closed:
                raise Denied("not-held", "the round was given up meanwhile, or handed in: take a fresh one.")
            if offset != self.size:
                raise Denied("offset", f"{self.size} bytes are here: go on from there.", size=self.size)
            self.turn += 1
            return self.turn

    def write(self, turn: int, piece: bytes | memoryview) -> None:
        with self._lock:
            self._check_not_sealed()
            if turn != self.turn:
                raise Denied("offset", "another connection has taken this transfer over.", size=self.size)
            if self.size + len(piece) > self.layout.size:
                self._restart()
                raise Denied("too-long", f"a body of more than {self.layout.size} bytes is longer than the model's.")
            if self.size < len(self.layout.header):
                expected = self.layout.header[self.size : self.size + len(piece)]
                if bytes(piece[: len(expected)]) != expected:
                    self._restart()
                    raise Denied("layout", "the tensors are not of this run's model: names, shapes or dtypes differ.")
            hashed = self._hashed.copy()
            try:
                with hashing(hashed, piece):
                    write_all(self._file, piece)
            except OSError as error:
                self._file.truncate(self.size)
                self._file.seek(self.size)
                raise full_disk(error, self.path) from error
            self.size, self._hashed = self.size + len(piece), hashed

    def digest(self) -> str:
        return self._hashed.hexdigest()

    def _restart(self) -> None:
        self._file.truncate(0)
        self._file.seek(0)
        self.size, self._hashed = 0, xxhash.xxh3_128()

    def restart(self) -> None:
        with self._lock:
            self._check_not_sealed()
            self._restart()

    def _check_not_sealed(self) -> None:
        if self._sealed:
            raise Denied("busy", "this contribution is being taken in: ask again.")

    @contextmanager
    def sealed(self) -> Iterator[None]:
        """Nobody may change the file inside: it is mapped into memory."""
        with self._lock:
            self._check_not_sealed()
            self._sealed = True
        try:
            yield
        finally:
            self._sealed = False

    def close(self, *, remove: bool) -> None:
        with self._lock:  # a connection may still be writing: its next piece must not reach a file that has this one's number
            self.turn += 1
            self._file.close()
        if remove:
            self.path.unlink(missing_ok=True)


@contextmanager
def hashing(hashed: Any, piece: bytes | memoryview) -> Iterator[None]:
    """What is large is hashed beside what is done with it; for the rest a thread would take longer."""
    if len(piece) < LARGE:
        hashed.update(piece)
        yield
        return
    thread = threading.Thread(target=hashed.update, args=(piece,))
    thread.start()
    try:
        yield
    finally:
        thread.join()


def full_disk(error: OSError, path: Path) -> Denied:
    why = "is full" if error.errno in FULL else f"cannot be written to ({error.strerror})"
    return Denied("disk", f"the synchronizer's disk {why}, at {path.parent}: free some space there; machines wait and try again.")


class StartFiles:
    """What rounds start from: once on disk for all of one version, so that a transfer that was cut can go on, and the
    synchronizer's memory does not grow with the machines."""

    def __init__(self, run: Path, synchronizer: Synchronizer) -> None:
        self._spare: Path | None = None
        """One that is not needed any more: to write over it is several times as fast as to make a new one."""
        self.folder = run / ROUNDS
        self.folder.mkdir(exist_ok=True)
        self.layout = start_layout(synchronizer)
        self.tidy(synchronizer)

    def path(self, version: int) -> Path:
        return self.folder / f"{version}.safetensors"

    def write(self, synchronizer: Synchronizer) -> None:
        """Of the version as it stands now."""
        self._write(self.path(synchronizer.outer_step), synchronizer.start(self.layout.names))

    def write_final(self, synchronizer: Synchronizer) -> Path:
        """The outer model itself, of a run that has ended; `tidy` removes it where the run goes on."""
        path = self.folder / "final.safetensors"
        named = {f"parameter.{i}": p for i, p in enumerate(synchronizer.parameters)}
        self._write(path, named | {f"buffer.{i}": b for i, b in enumerate(synchronizer.buffers)})
        return path

    def _write(self, path: Path, tensors: Mapping[str, Tensor] | Iterable[Tensor]) -> None:
        if path.exists():
            return
        partial = path.with_suffix(".partial")
        try:
            spare, self._spare = self._spare, None
            if spare is not None:
                spare.rename(partial)
            with partial.open("wb" if spare is None else "r+b", buffering=0) as file:
                write(file, self.layout, tensors)
                file.truncate()
            partial.rename(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise full_disk(error, path) from error

    def tidy(self, synchronizer: Synchronizer) -> None:
        """Removes what no round under way started from."""
        wanted = {self.path(held.version) for held in synchronizer.held.values()} | {self.path(synchronizer.outer_step)}
        for path in self.folder.iterdir():
            if path in wanted or path == self._spare:
                continue
            if self._spare is None and path.suffix == ".safetensors":
                self._spare = path.rename(self.folder / "spare")
            else:
                path.unlink(missing_ok=True)


def checked(report: dict[str, Any]) -> dict[str, Any]:
    """What a machine says about its contribution."""
    told: dict[str, Any] = {}
    for name in ("loss", "last_loss"):
        value = report.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise Denied("report", f"{name} must be a number or null.")
        told[name] = None if value is None else float(value)
    for name in ("samples", "units"):
        value = report.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 53:
            raise Denied("report", f"{name} must be a whole number ≥ 0.")
        told[name] = value
    if not isinstance(report.get("digest"), str):
        raise Denied("report", "digest must be the xxh3-128 of the file, in hexadecimal.")
    return {**told, "digest": report["digest"]}
