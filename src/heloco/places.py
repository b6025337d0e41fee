"""The folder for files that outlive a run."""

import os
from pathlib import Path


def cache_folder(folder: Path | None = None) -> Path:
    """The folder to use: `folder` if it is given, else $HELOCO_CACHE, else ~/.cache/heloco."""
    return folder or Path(os.environ.get("HELOCO_CACHE") or Path.home() / ".cache" / "heloco").expanduser()
