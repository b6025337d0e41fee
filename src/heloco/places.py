"""The folder for files that outlive a run."""

import os
from pathlib import Path


def cache_folder(folder: Path | None = None) -> Path:
    """`chosen`, or $HELOCO_CACHE, or ~/.cache/heloco."""
    return folder or Path(os.environ.get("HELOCO_CACHE") or Path.home() / ".cache" / "heloco").expanduser()
