"""`heloco watch`: runs that are still going, in a browser or in the terminal."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from heloco.cli.addresses import add_token_flags, link_to
from heloco.cli.flags import Parser
from heloco.errors import RunStopped, UserError

if TYPE_CHECKING:
    from heloco.cli.mirror import FolderMirror
    from heloco.report.run_reader import Run


def add_watch_flags(parser: Parser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="folders of runs of one task, or the address of one that is served"
    )
    add_token_flags(parser, "viewer")
    parser.add_argument("--text", action="store_true", help="in the terminal, until the runs have ended")
    parser.add_argument("--host", metavar="NAME", default="127.0.0.1", help="where to listen [127.0.0.1: this machine alone]")
    parser.add_argument("--port", metavar="N", default="8765", help="0: any free one [8765]")


def watch(arguments: argparse.Namespace) -> int:
    mirrors: list[FolderMirror] = []
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGHUP):
            before = signal.signal(number, lambda number, _: sys.exit(128 + number))  # after copies of runs were removed
            stack.callback(signal.signal, number, before)
        folders = [local_folder(run, arguments, stack, mirrors) for run in arguments.runs]
        return show(arguments, folders, lambda: reason_to_give_up(mirrors))


def reason_to_give_up(mirrors: Sequence["FolderMirror"]) -> str | None:
    """Why one of the runs counts as gone; None if none does."""
    reasons = (mirror.reason_to_give_up() for mirror in mirrors)
    return next((reason for reason in reasons if reason is not None), None)


def local_folder(run: str, arguments: argparse.Namespace, stack: contextlib.ExitStack, mirrors: list["FolderMirror"]) -> Path:
    """The run's folder, or a local copy of it if the run is served elsewhere."""
    if not run.startswith(("https:", "ray:", "http:")):
        return Path(run)
    from heloco.cli.mirror import FolderMirror

    mirror = FolderMirror(link_to(run.rstrip("/"), arguments.token, arguments.token_file, "viewer"))
    stack.callback(mirror.close)
    mirror.start()
    mirrors.append(mirror)
    return mirror.folder


def show(arguments: argparse.Namespace, folders: Sequence[Path], find_reason: Callable[[], str | None]) -> int:
    """`find_reason` returns why the display is given up; None if it goes on."""
    from heloco.report.run_reader import read_runs

    runs = read_runs(folders)
    if arguments.text:
        return in_the_terminal(runs, find_reason)
    from heloco.report import live, page_writer

    page_writer.check_parts()
    live.check_parts()
    if not arguments.port.isdecimal() or int(arguments.port) > 65535:
        raise UserError(f"port cannot be {arguments.port!r}: give a number from 0 to 65535.")
    live.serve(
        runs, arguments.host, int(arguments.port), lambda address: print(f"Watching at {address} (Ctrl-C ends it).", flush=True)
    )
    return 0


def in_the_terminal(runs: Sequence["Run"], find_reason: Callable[[], str | None] = lambda: None) -> int:
    """One panel per run, redrawn as it grows. If the output is not a terminal, one line per
    evaluation. `find_reason` returns why it is given up; None if it goes on."""
    import time

    from rich.console import Console, Group
    from rich.live import Live

    from heloco.report.terminal import Progress, tables

    console = Console()
    displays = [Progress(run.summary, run.facts, run.planned, console) for run in runs]
    printed = [0] * len(runs)

    def look() -> bool:
        """Reads what is new. True if a run is still going."""
        for i, (run, progress) in enumerate(zip(runs, displays, strict=True)):
            run.refresh()
            progress.summary = run.summary
            if not console.is_terminal:
                for stage in run.stages[printed[i] :]:
                    progress.print_line(stage)
                printed[i] = len(run.stages)
        is_going = not all(run.is_whole for run in runs)
        if is_going and (why := find_reason()) is not None:
            raise RunStopped(why)
        return is_going

    if console.is_terminal:
        with Live(Group(*(p.panel() for p in displays)), console=console, refresh_per_second=4) as live:
            while look():
                live.update(Group(*(p.panel() for p in displays)))
                time.sleep(0.5)
            live.update(Group(*(p.panel() for p in displays)))
    else:
        while look():
            time.sleep(0.5)
    for run in runs:
        for table in tables(run.summary):
            console.print(table)
    return 0
