"""What comes in from machines and goes out to them, as files: nothing is believed before it was checked."""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash
from torch import Tensor

from heloco.cluster.protocol.messages import RoundKey
from heloco.cluster.protocol.refusals import Code, Refused
from heloco.disk import FULL, SCARCE, write_all
from heloco.errors import UserError
from heloco.wire.layout import Layout, write

INCOMING, ROUNDS = "incoming", "rounds"
LARGE_PIECE = 1 << 20
"""Bytes from which on hashing beside the writing is worth a thread."""


def refuse_for_disk(error: OSError, path: Path) -> Refused:
    """What an error of the disk means to who asked: to try again later."""
    if error.errno in SCARCE:
        return Refused(Code.BUSY, f"The synchronizer is short of something for the moment ({error.strerror}): ask again.")
    why = "is full" if error.errno in FULL else f"cannot be written to ({error.strerror})"
    return Refused(
        Code.DISK, f"The synchronizer's disk {why}, at {path.parent}: free some space there; machines wait and try again."
    )


class Upload:
    """A file on its way in. It is hashed as it comes; nothing of it is believed before its header is the layout's."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path, self.layout = path, layout
        self.size = 0
        self.turn = 0
        self._digest = xxhash.xxh3_128()
        self._file = path.open("w+b", buffering=0)
        self._lock = threading.Lock()
        self._is_sealed = False

    def begin(self, offset: int) -> int:
        """A connection takes over; one that is still open from before may write no more. Gives the turn to write with."""
        with self._lock:
            if self._file.closed:
                raise Refused(Code.NOT_HELD, "The round was given up meanwhile, or handed in: take a fresh one.")
            if offset != self.size:
                raise Refused(Code.OFFSET, f"{self.size} bytes are here: go on from there.", size=self.size)
            self.turn += 1
            return self.turn

    def write(self, turn: int, piece: bytes | memoryview) -> None:
        with self._lock:
            self._check_not_sealed()
            if turn != self.turn:
                raise Refused(Code.OFFSET, "Another connection has taken this transfer over.", size=self.size)
            if self.size + len(piece) > self.layout.size:
                self._restart()
                raise Refused(Code.TOO_LONG, f"A body of more than {self.layout.size} bytes is longer than the model's.")
            self._check_header(piece)
            digest = self._digest.copy()
            try:
                with _hashing(digest, piece):
                    write_all(self._file, piece)
            except OSError as error:
                self._file.truncate(self.size)
                self._file.seek(self.size)
                raise refuse_for_disk(error, self.path) from error
            self.size, self._digest = self.size + len(piece), digest

    def _check_header(self, piece: bytes | memoryview) -> None:
        expected = self.layout.header[self.size : self.size + len(piece)]
        if bytes(piece[: len(expected)]) != expected:
            self._restart()
            raise Refused(Code.LAYOUT, "The tensors are not of this run's model: names, shapes or dtypes differ.")

    @property
    def is_complete(self) -> bool:
        return self.size == self.layout.size

    def digest(self) -> str:
        return self._digest.hexdigest()

    def fileno(self) -> int:
        return self._file.fileno()

    def restart(self) -> None:
        with self._lock:
            self._check_not_sealed()
            self._restart()

    def _restart(self) -> None:
        self._file.truncate(0)
        self._file.seek(0)
        self.size, self._digest = 0, xxhash.xxh3_128()

    def _check_not_sealed(self) -> None:
        if self._is_sealed:
            raise Refused(Code.BUSY, "This contribution is being taken in: ask again.")

    @contextmanager
    def sealed(self) -> Iterator[None]:
        """Nobody may change the file inside: it is mapped into memory."""
        with self._lock:
            self._check_not_sealed()
            self._is_sealed = True
        try:
            yield
        finally:
            self._is_sealed = False

    def close(self, *, remove: bool) -> None:
        with self._lock:  # a connection may still be writing: its next piece must not reach a file that has this one's number
            self.turn += 1
            self._file.close()
        if remove:
            self.path.unlink(missing_ok=True)


@contextmanager
def _hashing(digest: Any, piece: bytes | memoryview) -> Iterator[None]:
    """A large piece is hashed beside what is done with it; for a small one a thread would take longer."""
    thread = threading.Thread(target=digest.update, args=(piece,))
    try:
        if len(piece) < LARGE_PIECE:
            raise RuntimeError
        thread.start()
    except RuntimeError:  # too small, or there is no thread to be had
        digest.update(piece)
        yield
        return
    try:
        yield
    finally:
        thread.join()


class Uploads:
    """The contributions that are on their way in. They are in a folder of their own until the journal takes them in."""

    def __init__(self, run: Path) -> None:
        self.folder = make_folder(run / INCOMING)
        self._open: dict[RoundKey, Upload] = {}
        for path in self.folder.glob("*.partial"):  # of before a restart: they are sent again
            path.unlink()

    def get(self, key: RoundKey) -> Upload | None:
        return self._open.get(key)

    def open(self, key: RoundKey, layout: Layout) -> Upload:
        if key not in self._open:
            path = self.folder / f"{key.worker}-{key.round}-{key.version}.partial"
            try:
                self._open[key] = Upload(path, layout)
            except OSError as error:
                raise refuse_for_disk(error, path) from error
        return self._open[key]

    def drop(self, key: RoundKey, *, remove: bool) -> None:
        if upload := self._open.pop(key, None):
            upload.close(remove=remove)

    def close(self) -> None:
        for key in list(self._open):
            self.drop(key, remove=True)


class SnapshotStore:
    """What rounds begin with: a file for each version that somebody holds, so that a transfer that was cut can go on, and the
    synchronizer's memory does not grow with the machines. The digest of each is known, and is in its dispatch event."""

    def __init__(self, run: Path, layout: Layout) -> None:
        self.folder = make_folder(run / ROUNDS)
        self.layout = layout
        self._digests: dict[int, str] = {}
        self._spare: Path | None = None
        """A file that is not needed any more: to write over it is several times as fast as to make a new one."""

    def path(self, version: int) -> Path:
        return self.folder / f"{version}.safetensors"

    def write(self, version: int, tensors: Mapping[str, Tensor] | Iterable[Tensor]) -> str:
        """Writes a version that is not there yet; its digest."""
        if version not in self._digests:
            self._digests[version] = self._write(self.path(version), tensors)
        return self._digests[version]

    def write_final(self, tensors: Mapping[str, Tensor]) -> Path:
        """The outer model itself, of a run that has ended; `keep_only` removes it where the run goes on."""
        path = self.folder / "final.safetensors"
        self._write(path, tensors)
        return path

    def _write(self, path: Path, tensors: Mapping[str, Tensor] | Iterable[Tensor]) -> str:
        partial = path.with_suffix(".partial")
        digest = xxhash.xxh3_128()
        try:
            spare, self._spare = self._spare, None
            if spare is not None:
                spare.rename(partial)
            with partial.open("wb" if spare is None else "r+b", buffering=0) as file:
                write(file, self.layout, tensors, hashed=digest)
                file.truncate()
            partial.rename(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise refuse_for_disk(error, path) from error
        return digest.hexdigest()

    def adopt(self, version: int, digest: str) -> bool:
        """Takes up a file from before a restart if it is what it was."""
        with contextlib.suppress(OSError):
            if file_digest(self.path(version)) == digest:
                self._digests[version] = digest
                return True
        return False

    def has(self, version: int) -> bool:
        return version in self._digests and self.path(version).is_file()

    def keep_only(self, versions: set[int]) -> None:
        """Removes what no round under way began with. What is not ours in the folder is left alone."""
        for version in set(self._digests) - versions:
            del self._digests[version]
        for path in self.folder.iterdir():
            is_version = path.suffix == ".safetensors" and path.stem.isdigit()
            if (is_version and int(path.stem) in versions) or path == self._spare or not path.is_file():
                continue
            if is_version and self._spare is None:
                self._spare = path.rename(self.folder / "spare")
            elif is_version or path.name in ("spare", "final.safetensors") or path.suffix == ".partial":
                path.unlink(missing_ok=True)


def make_folder(path: Path) -> Path:
    try:
        path.mkdir(exist_ok=True)
    except FileExistsError:
        raise UserError(f"{path} is a file, and the run needs a folder there: move it away.") from None
    return path


def file_digest(path: Path) -> str:
    """xxh3-128 of a file."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()
