"""Tokenised sources on disk: a folder each, whole or not there at all.

An entry is written into a folder of its own next to its place and renamed into it as the last step, so that a process killed
half-way, a full disk or a second process at the same work leave nothing behind that could be taken for an entry.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from heloco.errors import UserError

from .parts import PARTS, PartName

try:
    import fcntl
except ImportError:  # not on this system: unfinished folders of killed processes then stay until they are an hour old
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
Tokens = npt.NDArray[np.unsignedinteger[Any]]

_UNFINISHED = ".unfinished-"
_STALE_S = 3600.0


def key(name: str, identity: Mapping[str, object], tokenizer_digest: str) -> str:
    """The entry's folder name: readable in front, and a digest of everything the tokens depend on."""
    content = json.dumps([FORMAT, identity, tokenizer_digest], sort_keys=True)
    readable = "".join(c if c.isalnum() or c in "._-" else "_" for c in name)[:40].lstrip(".")
    return f"{readable}-{hashlib.sha256(content.encode()).hexdigest()[:24]}"


@dataclass
class PartCount:
    """What one part of an entry holds."""

    tokens: int = 0
    text_bytes: int = 0
    documents: int = 0
    sha256: str = ""


@dataclass(frozen=True)
class Entry:
    """A whole entry on disk."""

    folder: Path
    dtype: str
    train: PartCount
    val: PartCount

    def tokens(self, part: PartName) -> Tokens:
        return np.memmap(_file(self.folder, part), dtype=np.dtype(self.dtype).newbyteorder("<"), mode="r")


def load(folder: Path) -> Entry | None:
    """The entry in `folder`; None where there is none, or one that is damaged."""
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        if meta["format"] != FORMAT:
            return None
        counts = {part: PartCount(**meta["parts"][part]) for part in PARTS}
        itemsize = np.dtype(meta["dtype"]).itemsize
        if any(_file(folder, part).stat().st_size != counts[part].tokens * itemsize for part in PARTS):
            return None
        return Entry(folder, meta["dtype"], counts["train"], counts["val"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


@dataclass
class _OpenPart:
    file: BinaryIO
    count: PartCount = field(default_factory=PartCount)
    digest: Any = field(default_factory=hashlib.sha256)


class EntryWriter:
    """Writes one entry; used as a context manager, it leaves either the committed entry or nothing."""

    def __init__(self, folder: Path, dtype: "np.dtype[Any]") -> None:
        self._final, self._dtype = folder, dtype

    def __enter__(self) -> "EntryWriter":
        with _disk_in_words(self._final.parent):
            self._final.parent.mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(prefix=_UNFINISHED, dir=self._final.parent))
        try:
            with _disk_in_words(self._final.parent):
                self._lock = _locked(self._folder / "lock")
                self._parts = {part: _OpenPart(_file(self._folder, part).open("wb")) for part in PARTS}
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for part in self._parts.values():
            with contextlib.suppress(OSError):  # a full disk was already reported
                part.file.close()
        self._lock.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def write(self, part: PartName, tokens: Tokens, text_bytes: int, documents: int) -> None:
        data = tokens.astype(self._dtype, copy=False).tobytes()
        out = self._parts[part]
        with _disk_in_words(self._final.parent):
            out.file.write(data)
        out.digest.update(data)
        out.count.tokens += len(tokens)
        out.count.text_bytes += text_bytes
        out.count.documents += documents

    def count(self, part: PartName) -> PartCount:
        return self._parts[part].count

    def commit(self, about: Mapping[str, object]) -> Entry:
        """Makes the entry real. Where another process was faster, its entry is the one that stays."""
        with _disk_in_words(self._final.parent):
            for part in self._parts.values():
                part.count.sha256 = part.digest.hexdigest()
                _sync_and_close(part.file)
            parts = {name: asdict(part.count) for name, part in self._parts.items()}
            meta = {"format": FORMAT, **about, "dtype": self._dtype.name, "parts": parts}
            with (self._folder / "meta.json").open("wb") as file:
                file.write(json.dumps(meta, indent=1, ensure_ascii=False).encode())
                _sync_and_close(file)
            return self._take_place()

    def _take_place(self) -> Entry:
        while True:
            try:
                self._folder.rename(self._final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                if entry := load(self._final):
                    return entry
                _discard(self._final)
                continue
            (self._final / "lock").unlink()
            counts = {name: part.count for name, part in self._parts.items()}
            return Entry(self._final, self._dtype.name, counts["train"], counts["val"])


def remove_unfinished(cache: Path) -> None:
    """Clears away what killed processes left."""
    for folder in cache.glob(_UNFINISHED + "*"):
        with contextlib.suppress(OSError):
            if _is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Whether no live process works in the folder: its lock is free, or it has no lock and nothing has changed for an hour."""
    lock = folder / "lock"
    if fcntl is None or not lock.exists():
        return time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir())) > _STALE_S
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
    return True


def _locked(path: Path) -> BinaryIO:
    """Creates a file that this process has locked.

    It is locked under another name and then renamed: other processes take an unlocked file to mean that its owner is gone.
    """
    file = path.with_suffix(".new").open("wb")
    if fcntl is not None:
        fcntl.flock(file, fcntl.LOCK_EX)
    path.with_suffix(".new").rename(path)
    return file


def _discard(folder: Path) -> None:
    """Moves a damaged entry out of the way, and only then deletes it, so nobody sees it half deleted."""
    with contextlib.suppress(FileNotFoundError):
        removed_path = folder.with_name(f"{_UNFINISHED}{os.getpid()}-{time.monotonic_ns()}")
        folder.rename(removed_path)
        if removed_path.is_dir():
            shutil.rmtree(removed_path, ignore_errors=True)
        else:
            removed_path.unlink()


def _sync_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _file(folder: Path, part: PartName) -> Path:
    return folder / f"{part}.bin"


@contextlib.contextmanager
def _disk_in_words(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"The disk is full while writing tokens to {cache}: free some space there, or choose another cache folder "
                f"with HELOCO_CACHE=/path. Nothing unfinished was left behind."
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise UserError(
                f"The cache folder {cache} cannot be written ({error.strerror}): choose another one with HELOCO_CACHE=/path."
            ) from error
        raise
