"""Keeps the memory of the synchronizer's process small: θ, m, and the pages of one mapped contribution that were read."""

import contextlib
import ctypes
import mmap
import sys
from pathlib import Path

LINUX = sys.platform == "linux"
M_MMAP_THRESHOLD = -3
_libc = ctypes.CDLL(None) if LINUX else None


def give_memory_back() -> None:
    """Makes glibc return blocks of a megabyte and more to the system when they are freed. By
    default it keeps them in the heap of each thread, and there are many threads: after 40 arrivals
    of 60 MB the process held 2.7 GB."""
    with contextlib.suppress(AttributeError):  # another C library
        if _libc is not None:
            _libc.mallopt(M_MMAP_THRESHOLD, 1 << 20)


def return_free_memory() -> None:
    """Returns free memory between used blocks to the system, which glibc does only on request."""
    with contextlib.suppress(AttributeError):
        if _libc is not None:
            _libc.malloc_trim(0)


def forget(address: int, size: int) -> None:
    """Drops whole pages of a mapping from a file or from Ray's store. Only for memory that was read and not written."""
    first, last = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if _libc is not None and first < last:
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def memory_of(pid: int) -> dict[str, int]:
    """Memory of a process in bytes: its peak, and now its own memory, mapped files, and Ray's shared memory."""
    names = {"VmHWM": "peak", "RssAnon": "own", "RssFile": "files", "RssShmem": "shared"}
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = {line.partition(":")[0]: line.split() for line in lines}
    return {name: int(fields[field][1]) * 1024 for field, name in names.items()}
