"""The live page of a served run."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heloco.cluster.protocol.messages import Status


def page_of(folder: Path, status: "Callable[[], Status]") -> Any:
    """An ASGI app with the run's page. It is empty until the first evaluation, or for an external run until there is a model.

    `status` gives the run's own status; it may be called from any thread."""
    from heloco.report.page_process import PageProcess

    return PageProcess(folder, status)
