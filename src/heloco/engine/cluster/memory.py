"""What a synchronizer's process holds in memory: at most four models, its own program included where that is less than one.

θ and m are two; a contribution is a mapped file, which counts as far as it was looked at. What is forgotten here is not lost: it
stays in the system's cache or in Ray's store, and comes back when it is looked at again.
"""

import contextlib
import ctypes
import mmap
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

LINUX = sys.platform == "linux"
MOST, FROM = 3.9, 3.25
"""Where more than so many models would be in memory, what was read of a contribution is forgotten while it is used, from so many
on. That takes time, for it is looked at more than once."""
WORTH = 1 << 28
"""Bytes of a model that are worth it: beside a smaller one the program itself is what counts."""
LOOK_S = 0.001
M_MMAP_THRESHOLD = -3
_libc = ctypes.CDLL(None) if LINUX else None


def give_memory_back() -> None:
    """Blocks of a megabyte and more go back to the system when they are freed. Left to itself, glibc comes to keep them in each
    thread's own heap, and there are many threads: 40 arrivals of 60 MB left 2.7 GB behind."""
    with contextlib.suppress(AttributeError):  # of another C library
        if _libc is not None:
            _libc.mallopt(M_MMAP_THRESHOLD, 1 << 20)


def return_free_memory() -> None:
    """Gives free memory between blocks that are still in use back to the system, which glibc does only
    when asked to."""
    with contextlib.suppress(AttributeError):
        if _libc is not None:
            _libc.malloc_trim(0)


def forget(address: int, size: int) -> None:
    """Whole pages of what is mapped from a file or from Ray's store, and was only read."""
    first, last = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if _libc is not None and first < last:
        _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


@contextlib.contextmanager
def lean(mapped: Mapping[str, Tensor], model_bytes: int, models: int = 1) -> Iterator[None]:
    """If need be, forgets again and again what was read of these tensors of a mapped file, to which nobody may write. `models`:
    how many come into memory with their use."""
    if not LINUX or model_bytes < WORTH or resident_bytes() + models * model_bytes < MOST * model_bytes:
        yield
        return
    parts = [(t.data_ptr(), t.nbytes) for t in mapped.values() if t.nbytes]
    over = threading.Event()

    def forgetting() -> None:
        while not over.wait(LOOK_S):
            if resident_bytes() > FROM * model_bytes:
                for part in parts:
                    forget(*part)

    thread = threading.Thread(target=forgetting, name="heloco-lean", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def memory_of(pid: int) -> dict[str, int]:
    """Bytes: the peak, and now what is the process's own, mapped files, and Ray's shared memory."""
    names = {"VmHWM": "peak", "RssAnon": "own", "RssFile": "files", "RssShmem": "shared"}
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = {line.partition(":")[0]: line.split() for line in lines}
    return {ours: int(found[theirs][1]) * 1024 for theirs, ours in names.items()}
