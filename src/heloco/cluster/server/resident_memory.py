"""What a synchronizer's process holds in memory: θ, m, and what was looked at of one contribution, which is a mapped file."""

import contextlib
import ctypes
import mmap
import sys
from pathlib import Path

LINUX = sys.platform == "linux"
M_MMAP_THRESHOLD = -3
_libc = ctypes.CDLL(None) if LINUX else None


def give_memory_back() -> None:
    """Blocks of a megabyte and more go back to the system when they are freed. Left to itself, glibc comes to keep them in each
    thread's own heap, and there are many threads: 40 arrivals of 60 MB left 2.7 GB behind."""
    with contextlib.suppress(AttributeError):  # of another C library
        if _libc is not None:
            _libc.mallopt(M_MMAP_THRESHOLD, 1 << 20)


def return_free_memory() -> None:
    """Gives free memory between blocks that are still in use back to the system, which glibc does only when asked to."""
    with contextlib.suppress(AttributeError):
        if _libc is not None:
            _libc.malloc_trim(0)


def forget(address: int, size: int) -> None:
    """Whole pages of what is mapped from a file or from Ray's store, and was only read."""
    first, last = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if _libc is not None and first < last:
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def memory_of(pid: int) -> dict[str, int]:
    """Bytes: the peak, and now what is the process's own, mapped files, and Ray's shared memory."""
    names = {"VmHWM": "peak", "RssAnon": "own", "RssFile": "files", "RssShmem": "shared"}
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = {line.partition(":")[0]: line.split() for line in lines}
    return {ours: int(fields[theirs][1]) * 1024 for theirs, ours in names.items()}
