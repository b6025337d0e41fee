"""Processes of a run with faults that are started again by their parent."""

import sys
from collections.abc import Callable
from pathlib import Path

from heloco.cli.warm_restart import WarmRestart, Wording
from heloco.errors import RunStopped


def restart_until_done(name: str, work: Callable[[], int], progress_file: Path, wording: Wording) -> None:
    """Does the work in a child that is restarted as `heloco serve` and `heloco join` do it, and exits with its code."""

    def progress() -> int:
        return progress_file.stat().st_size if progress_file.exists() else 0

    def tell(text: str) -> None:
        print(f"{name}: {text}", file=sys.stderr, flush=True)

    try:
        code = WarmRestart(lambda _: work(), progress, wording, tell).run()
    except RunStopped as error:
        tell(str(error))
        code = 2
    sys.exit(code)
