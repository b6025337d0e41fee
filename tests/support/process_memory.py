"""How much memory a process has held."""

from pathlib import Path
from typing import Literal


def read_peak_bytes(pid: int | Literal["self"]) -> int:
    """The most memory that the process held so far, as Linux counts it."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    [peak] = [line.split() for line in lines if line.startswith("VmHWM:")]
    return int(peak[1]) * 1024
