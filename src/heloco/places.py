"""The folder for files that outlive a run."""

import os
from pathlib import Path


def cache_folder(chosen: Path | None = None) -> Path:
    """`chosen`, or $HELOCO_CACHE, or ~/.cache/heloco."""
    return chosen or Path(os.environ.get("HELOCO_CACHE") or Path.home() / ".cache" / "heloco").expanduser()
