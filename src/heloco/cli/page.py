"""The live page of a served run."""

from pathlib import Path
from typing import Any


def page_of(folder: Path) -> Any:
    """An ASGI app with the run's page. It is empty until the first evaluation, or for an external run until there is a model."""
    from heloco.report.page_process import PageProcess

    return PageProcess(folder)
