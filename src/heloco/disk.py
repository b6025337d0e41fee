"""Atomic and durable writes: a kill at any moment leaves either the old file or the new one.

1. An fsync fails, and the system drops the data that it should have written. 2. The next fsync succeeds, although the data
is missing. So after a failed fsync the process can no longer trust its view of its files: `NotDurable` ends it, and a
restart continues from what is on the disk.
"""

import contextlib
import ctypes
import errno
import functools
import hashlib
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import xxhash
from safetensors import SafetensorError

from heloco.errors import DiskError, RunStopped

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
"""Errors of a machine that is short of memory or descriptors at the moment: the same call may succeed later."""
WRITE_PIECE_BYTES = 1 << 20
SMALL_MAPPING_BYTES = 8 << 20


class NotDurable(RunStopped):
    """A file could not be made durable. The process must stop; what was acknowledged before is safe."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(
            f"{path} could not be made durable ({error.strerror}), so the process stops: what was acknowledged is safe. "
            "Check the disk, free some space, then start it again: it continues from what is on the disk."
        )


@contextmanager
def disk_errors(path: Path, remedy: str) -> Iterator[None]:
    """Turns a full or unwritable disk into a DiskError that names the path and the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise DiskError(f"The disk is full while writing {path}: free some space, then {remedy}") from error
        raise DiskError(f"{path} cannot be written ({error.strerror}): choose or fix the place, then {remedy}") from error
    except SafetensorError as error:  # carries the operating system's error as text
        if any(f"os error {number}" in str(error) for number in FULL):
            raise DiskError(f"The disk is full while writing {path}: free some space, then {remedy}") from error
        raise


def make_durable(file: int, path: Path) -> None:
    """fsync of an open file or folder. Raises `NotDurable` with `path` if it fails."""
    try:
        os.fsync(file)
    except OSError as error:
        raise NotDurable(path, error) from error


def make_folder_durable(path: Path) -> None:
    """Makes renames in the folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        make_durable(handle, path)
    finally:
        os.close(handle)


def drop_cached_pages(file: int) -> None:
    """Drops the system's cache of a file, so that the next read comes from the disk.

    After a failed fsync the cache may hold pages that never reached the disk and are marked as written."""
    with contextlib.suppress(AttributeError, OSError):  # not on every system and file system
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def drop_mapped_pages(address: int, size: int) -> None:
    """Gives back whole pages of a mapping from a file or from Ray's store. Only for memory that was read and not written."""
    first, last = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if sys.platform == "linux" and first < last:
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def release_for(size: int) -> Callable[[int, int], None] | None:
    """How a mapping of this size is given back while it is read. A small one is not: that would take longer than reading it."""
    return drop_mapped_pages if size > SMALL_MAPPING_BYTES else None


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def file_digest(path: Path) -> str:
    """xxh3-128 of what is on the disk."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        drop_cached_pages(file.fileno())
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def write_all(file: BinaryIO, content: bytes | memoryview, before_piece: Callable[[], None] = lambda: None) -> None:
    """Writes to an unbuffered file in pieces of 1 MB. `before_piece` is called before each; what it raises ends the writing."""
    view, at = memoryview(content), 0
    while at < len(view):
        before_piece()
        at += file.write(view[at : at + WRITE_PIECE_BYTES])


def write_atomically(path: Path, content: bytes, *, mode: int = 0o666) -> None:
    """Writes a file so that a kill leaves the old content or the new. `mode` are its permissions
    from the beginning, less the umask."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            make_durable(file.fileno(), path)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    make_folder_durable(path.parent)


def make_readable(path: Path) -> None:
    """Gives a file the permissions of a file that is newly made here: some libraries leave it to its owner alone."""
    probe = path.with_name(f".{path.name}.mode")
    try:
        probe.touch()
        path.chmod(probe.stat().st_mode & 0o777)
    finally:
        probe.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """The SHA-256 of a file's content, as hexadecimal digits. The file is read piece by piece."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
