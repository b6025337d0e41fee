"""The live page of a run that is served, and the run's files from elsewhere."""

from pathlib import Path
from typing import Any


def page_of(folder: Path) -> Any:
    """An ASGI app with the run's page, from when its first evaluation is there; where none is made, from when it has a model."""
    from heloco.report.page_process import PageProcess

    return PageProcess(folder)
