"""What a process holds in memory."""

import contextlib
import ctypes
import sys
from pathlib import Path

LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None) if LINUX else None


def return_free_memory() -> None:
    """Returns free memory between used blocks to the system, which glibc does only on request."""
    with contextlib.suppress(AttributeError):
        if _libc is not None:
            _libc.malloc_trim(0)


def memory_of(pid: int) -> dict[str, int]:
    """Memory of a process in bytes: its peak, and now its own memory, mapped files, and Ray's shared memory."""
    names = {"VmHWM": "peak", "RssAnon": "own", "RssFile": "files", "RssShmem": "shared"}
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = {line.partition(":")[0]: line.split() for line in lines}
    return {name: int(fields[field][1]) * 1024 for field, name in names.items()}
