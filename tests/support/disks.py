"""Small disks, and disks without space."""

import contextlib
import gc
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted_disk(folder: Path, size: str) -> Iterator[Path]:
    """A disk of its own, of that size."""
    folder.mkdir()
    if not shutil.which("mount"):
        pytest.skip("there is no mount command here")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        gc.collect()  # tensors of a file on it may still be mapped into memory
        subprocess.run(["umount", folder], check=True)


def fill_disk(ballast: Path, room: int = 0) -> None:
    """Writes to `ballast` until its disk is full, but for `room` bytes."""
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    os.truncate(ballast, ballast.stat().st_size - room)
