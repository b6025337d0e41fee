"""Reports how far the preparation of a corpus is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .libraries import library

Progress = Callable[[str, int, int], None]
"""Called with a source's name, the bytes done and the bytes in all."""


@contextmanager
def rich_progress() -> Iterator[Progress]:
    """A bar per source on standard error, from the first report on. What it gives is `prepare`'s `progress`."""
    rich = library("rich.progress", "The progress bar")
    console = library("rich.console", "The progress bar").Console(stderr=True)
    columns = (
        rich.TextColumn("tokenising {task.description}"),
        rich.BarColumn(),
        rich.DownloadColumn(),
        rich.TransferSpeedColumn(),
        rich.TimeRemainingColumn(),
    )
    bars = rich.Progress(*columns, console=console)
    tasks: dict[str, int] = {}

    def report(source: str, bytes_done: int, total: int) -> None:
        if not tasks:
            bars.start()
        if source not in tasks:
            tasks[source] = bars.add_task(source, total=total)
        bars.update(tasks[source], completed=bytes_done, total=total)

    try:
        yield report
    finally:
        if tasks:
            bars.stop()
