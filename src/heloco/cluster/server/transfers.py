"""Files that come in from machines and go out to them. Nothing from outside is used before it was checked."""

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import xxhash
from torch import Tensor

from heloco.cluster.protocol.messages import RoundKey
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.disk import FULL, SCARCE, file_digest, write_all
from heloco.errors import UserError
from heloco.records.run_files import INCOMING
from heloco.wire.layout import Layout, map_tensors, write

ROUNDS = "rounds"
FINAL = "final.safetensors"


def refuse_for_disk(error: OSError, path: Path) -> Refused:
    """The refusal for an error of the disk: the request may be repeated later."""
    if error.errno in SCARCE:
        return Refused(RefusalCode.BUSY, f"The synchronizer is short of resources at the moment ({error.strerror}): ask again.")
    problem = "is full" if error.errno in FULL else f"cannot be written to ({error.strerror})"
    return Refused(
        RefusalCode.DISK,
        f"The synchronizer's disk {problem}, at {path.parent}: free some space there; machines wait and try again.",
    )


class Upload:
    """A file that is being received. It is hashed as it arrives, and its header must be exactly the layout's."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path, self.layout = path, layout
        self.size = 0
        self.turn = 0
        self._digest = xxhash.xxh3_128()
        self._file = path.open("w+b", buffering=0)
        self._lock = threading.Lock()
        self.is_sealed = False
        """Whether the file is mapped into memory, so that nobody may change it."""

    def begin(self, offset: int) -> int:
        """A connection takes over the transfer, and an earlier one may no longer write. Returns the turn to write with."""
        with self._lock:
            self._check_open()
            if offset != self.size:
                raise Refused(RefusalCode.OFFSET, f"{self.size} bytes have arrived: continue from there.", size=self.size)
            self.turn += 1
            return self.turn

    def write(self, turn: int, piece: bytes | memoryview) -> None:
        """Appends a piece to the file. `turn` is what `begin` returned.

        Raises Refused if another connection has taken over, the file is sealed, or the disk is full; what has arrived stays.
        If the file gets too long or its header is not the layout's, Refused is raised too, and the transfer begins again from
        zero.
        """
        with self._lock:
            self._check_not_sealed()
            if turn != self.turn:
                raise Refused(RefusalCode.OFFSET, "Another connection has taken this transfer over.", size=self.size)
            if self.size + len(piece) > self.layout.size:
                self._restart()
                raise Refused(RefusalCode.TOO_LONG, f"The body is longer than the {self.layout.size} bytes of the model's file.")
            self._check_header(piece)
            digest = self._digest.copy()
            digest.update(piece)
            try:
                write_all(self._file, piece)
            except OSError as error:
                self._file.truncate(self.size)
                self._file.seek(self.size)
                raise refuse_for_disk(error, self.path) from error
            self.size, self._digest = self.size + len(piece), digest

    def _check_header(self, piece: bytes | memoryview) -> None:
        header_part = self.layout.header[self.size : self.size + len(piece)]
        if bytes(piece[: len(header_part)]) != header_part:
            self._restart()
            raise Refused(RefusalCode.LAYOUT, "The tensors are not of this run's model: names, shapes or dtypes differ.")

    @property
    def is_complete(self) -> bool:
        """Whether as many bytes have arrived as the layout's file has."""
        return self.size == self.layout.size

    def digest(self) -> str:
        """The xxh3-128 hash of the bytes that have arrived, as hexadecimal digits."""
        return self._digest.hexdigest()

    def fileno(self) -> int:
        """The descriptor of the open file, for making it durable."""
        return self._file.fileno()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a complete upload, mapped from its file. It must be sealed while they are used."""
        with self._lock:
            self._check_open()
            try:
                return map_tensors(self._file.fileno(), self.layout)
            except OSError as error:
                raise refuse_for_disk(error, self.path) from error

    def restart(self) -> None:
        """Removes what has arrived, so that the sender can begin again from zero. Raises Refused if the file is sealed."""
        with self._lock:
            self._check_open()
            self._check_not_sealed()
            self._restart()

    def _restart(self) -> None:
        self._file.truncate(0)
        self._file.seek(0)
        self.size, self._digest = 0, xxhash.xxh3_128()

    def _check_open(self) -> None:
        if self._file.closed:
            raise Refused(RefusalCode.NOT_HELD, "The round was given up in the meantime, or handed in: take a fresh one.")

    def _check_not_sealed(self) -> None:
        if self.is_sealed:
            raise Refused(RefusalCode.BUSY, "What has arrived is being taken in: ask again.")

    @contextmanager
    def sealed(self) -> Iterator[None]:
        """Nobody may change the file inside this context, because it is mapped into memory."""
        with self._lock:
            self._check_open()
            self._check_not_sealed()
            self.is_sealed = True
        try:
            yield
        finally:
            self.is_sealed = False

    def close(self, *, remove: bool) -> None:
        """Closes the file after the piece that is being written. Later calls of `begin` and `write` are refused. `remove`
        deletes the file."""
        with self._lock:  # 1. a connection still writes, 2. the file is closed, 3. another file gets its descriptor
            self.turn += 1
            self._file.close()
        if remove:
            self.path.unlink(missing_ok=True)


class Uploads:
    """The contributions that are being received, in a folder of their own until they move to the journal."""

    def __init__(self, run: Path) -> None:
        self.folder = make_folder(run / INCOMING)
        self._open: dict[RoundKey, Upload] = {}
        for path in self.folder.glob("*.partial"):  # from before a restart: they will be sent again
            path.unlink()

    def get(self, key: RoundKey) -> Upload | None:
        """The upload of a round; None if nothing of it has been received."""
        return self._open.get(key)

    def open(self, key: RoundKey, layout: Layout) -> Upload:
        """The upload of a round, begun if there is none yet. Raises `Refused` if the disk is full."""
        if key not in self._open:
            path = self.folder / f"{key.worker}-{key.round}-{key.version}.partial"
            try:
                self._open[key] = Upload(path, layout)
            except OSError as error:
                raise refuse_for_disk(error, path) from error
        return self._open[key]

    def drop(self, key: RoundKey, *, remove: bool) -> None:
        """Closes the upload of a round, if there is one. `remove`: its file is deleted too."""
        if upload := self._open.pop(key, None):
            upload.close(remove=remove)

    def close(self) -> None:
        """Closes all uploads, and deletes their files."""
        for key in list(self._open):
            self.drop(key, remove=True)


class SnapshotStore:
    """The start files of rounds: one for each version that a machine holds. So an interrupted transfer can continue, and
    the synchronizer's memory does not grow with the machines. The digest of each file is in its dispatch event."""

    def __init__(self, run: Path, layout: Layout) -> None:
        self.folder = make_folder(run / ROUNDS)
        self.layout = layout
        self._digests: dict[int, str] = {}
        self._has_final = False
        self._final_lock = threading.Lock()
        self._spare: Path | None = None
        """A file that is no longer needed. Overwriting it is several times as fast as making a new one."""

    def path(self, version: int) -> Path:
        """Where the start file of a version is, whether it exists or not."""
        return self.folder / f"{version}.safetensors"

    def write(self, version: int, tensors: Mapping[str, Tensor] | Iterable[Tensor]) -> str:
        """Writes the start file of a version unless it exists, and returns its digest."""
        if version not in self._digests:
            self._digests[version] = self._write(self.path(version), tensors)
        return self._digests[version]

    def write_final(self, tensors: Mapping[str, Tensor]) -> Path:
        """Writes the outer model of a run that has ended, once for all who call this at the same time. `keep_only` removes the
        file if the run is resumed."""
        path = self.folder / FINAL
        with self._final_lock:
            if not self._has_final or not path.is_file():
                self._write(path, tensors)
                self._has_final = True
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
        """Takes over a file from before a restart. False if it is missing or its digest is wrong."""
        with contextlib.suppress(OSError):
            if file_digest(self.path(version)) == digest:
                self._digests[version] = digest
                return True
        return False

    def has(self, version: int) -> bool:
        """Whether the start file of a version is there and its digest is known."""
        return version in self._digests and self.path(version).is_file()

    def keep_only(self, versions: set[int]) -> None:
        """Removes the start files of all other versions. Foreign files in the folder are left alone."""
        for version in set(self._digests) - versions:
            del self._digests[version]
        for path in self.folder.iterdir():
            is_version = path.suffix == ".safetensors" and path.stem.isdigit()
            if (is_version and int(path.stem) in versions) or path == self._spare or not path.is_file():
                continue
            if is_version and self._spare is None:
                self._spare = path.rename(self.folder / "spare")
            elif is_version or path.name in ("spare", FINAL) or path.suffix == ".partial":
                path.unlink(missing_ok=True)


def make_folder(path: Path) -> Path:
    """Makes a folder of the run unless it exists. Raises UserError if a file is in its place."""
    try:
        path.mkdir(exist_ok=True)
    except FileExistsError:
        raise UserError(f"{path} is a file, and the run needs a folder there: move it away.") from None
    return path
