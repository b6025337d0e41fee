"""`heloco watch`: runs that are still going, in a browser or in the terminal."""

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from heloco.cli.addresses import add_token_flags, link_to
from heloco.cli.flags import Parser
from heloco.errors import RunStopped, UserError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from heloco.report.run_reader import Run
    from heloco.report.run_state import LastStatus

PATIENCE_S = 60.0
"""After this many seconds without news a run counts as gone. A crash and a restart take less."""
LOOK_EVERY_S = 0.5


def add_watch_flags(parser: Parser) -> None:
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="folders of runs of one task, or the address of one that is served"
    )
    add_token_flags(parser, "viewer")
    parser.add_argument("--text", action="store_true", help="in the terminal, until the runs have ended")
    parser.add_argument("--host", metavar="NAME", default="127.0.0.1", help="where to listen [127.0.0.1: this machine alone]")
    parser.add_argument("--port", metavar="N", default="8765", help="0: any free one [8765]")


def watch(arguments: argparse.Namespace) -> int:
    statuses: dict[Path, LastStatus] = {}
    with contextlib.ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGHUP):
            before = signal.signal(number, lambda number, _: sys.exit(128 + number))  # after copies of runs were removed
            stack.callback(signal.signal, number, before)
        folders = [local_folder(run, arguments, stack, statuses) for run in arguments.runs]
        return show(arguments, folders, statuses)


def local_folder(
    run: str, arguments: argparse.Namespace, stack: contextlib.ExitStack, statuses: "dict[Path, LastStatus]"
) -> Path:  # fmt: skip
    """The run's folder, or a local copy of it if the run is served elsewhere. What a run on real machines says of itself is added
    to `statuses`."""
    if not run.startswith(("https:", "ray:", "http:")):
        if is_real(Path(run)):
            from heloco.cli.status_poll import StatusPoll

            poll = StatusPoll(Path(run))
            stack.callback(poll.close)
            poll.start()
            statuses[Path(run)] = poll.last_status
        return Path(run)
    from heloco.cli.mirror import FolderMirror

    mirror = FolderMirror(link_to(run.rstrip("/"), arguments.token, arguments.token_file, "viewer"))
    stack.callback(mirror.close)
    mirror.start()
    statuses[mirror.folder] = mirror.last_status
    return mirror.folder


def is_real(folder: Path) -> bool:
    """Whether the folder has a run on real machines. What is wrong with the folder is said by whoever reads it."""
    from heloco.records.run_facts import read_facts
    from heloco.records.run_files import META

    try:
        return read_facts(folder / META).is_real
    except UserError:
        return False


def show(arguments: argparse.Namespace, folders: Sequence[Path], statuses: "Mapping[Path, LastStatus]") -> int:
    """Shows the runs in a browser, or in the terminal with --text. `statuses`: by a run's folder, what the run says of itself."""
    from heloco.report.run_reader import read_runs

    runs = read_runs(folders)
    if arguments.text:
        return in_the_terminal(runs, statuses)
    from heloco.report import live, page_writer

    page_writer.check_parts()
    live.check_parts()
    if not arguments.port.isdecimal() or int(arguments.port) > 65535:
        raise UserError(f"port cannot be {arguments.port!r}: give a number from 0 to 65535.")

    def began(address: str) -> None:
        print(f"Watching at {address} (Ctrl-C ends it).", flush=True)

    live.serve(runs, arguments.host, int(arguments.port), began, statuses)
    return 0


def in_the_terminal(runs: Sequence["Run"], statuses: "Mapping[Path, LastStatus] | None" = None) -> int:
    """One panel per run, redrawn as it grows. If the output is not a terminal, a line per evaluation and per change of a run's
    state. It goes on until all runs have ended, or are not heard of for a while. `statuses`: by a run's folder, what it says of
    itself."""
    from rich.console import Console
    from rich.live import Live

    from heloco.report.terminal import tables

    display = TerminalDisplay(runs, statuses or {}, Console())
    if display.console.is_terminal:
        with Live(display.panels(), console=display.console, refresh_per_second=4) as live:
            while display.look():
                live.update(display.panels())
                time.sleep(LOOK_EVERY_S)
            live.update(display.panels())
    else:
        while display.look():
            time.sleep(LOOK_EVERY_S)
    for run in runs:
        for table in tables(run.summary):
            display.console.print(table)
    display.check_end()
    return 0


class TerminalDisplay:
    """Runs and their states in the terminal."""

    def __init__(self, runs: Sequence["Run"], statuses: "Mapping[Path, LastStatus]", console: "Console") -> None:
        from heloco.report.run_state import watch_states
        from heloco.report.terminal import Progress

        self.runs, self.console = runs, console
        self._watches = watch_states(runs, statuses)
        self._states = [watch.look() for watch in self._watches]
        self._displays = [Progress(run.summary, run.facts, run.planned, console) for run in runs]
        self._printed = [0] * len(runs)
        self._shown_states: list[tuple[str, str] | None] = [None] * len(runs)
        self._silent_since_s: list[float | None] = [None] * len(runs)

    def look(self) -> bool:
        """Reads what is new, and prints it if the output is not a terminal. True if a run is still going."""
        for run, display in zip(self.runs, self._displays, strict=True):
            run.refresh()
            display.summary = run.summary
        self._states = [watch.look() for watch in self._watches]
        if not self.console.is_terminal:
            for i in range(len(self.runs)):
                self._print_news(i)
        have_ended = [self._has_ended(i) for i in range(len(self.runs))]
        return not all(have_ended)

    def _print_news(self, i: int) -> None:
        from heloco.report.state_terminal import state_line

        for stage in self.runs[i].stages[self._printed[i] :]:
            self._displays[i].print_line(stage)
        self._printed[i] = len(self.runs[i].stages)
        state = self._states[i]
        if (state.kind, state.reason) != self._shown_states[i]:
            self._shown_states[i] = (state.kind, state.reason)
            name = f"{state.name}: " if len(self.runs) > 1 else ""
            print(f"{name}{state_line(state)}", flush=True)

    def _has_ended(self, i: int) -> bool:
        """Whether nothing more is to be expected of a run."""
        state, run, now_s = self._states[i], self.runs[i], time.monotonic()
        if not state.has_ended and state.kind != "silent":
            self._silent_since_s[i] = None
            return run.is_whole
        if run.is_whole or state.kind in ("stopped", "gave-up") or (state.kind == "failed" and not run.facts.is_real):
            return True
        # 1. A run that is not heard of may come back. 2. A served run that failed is started again.
        # 3. The last lines of a finished run that is elsewhere may still be on their way.
        self._silent_since_s[i] = since_s = self._silent_since_s[i] or now_s
        return now_s - since_s > PATIENCE_S

    def check_end(self) -> None:
        """Raises RunStopped if a run has ended without its last arrival."""
        from heloco.report.state_terminal import end_sentence

        for state, run in zip(self._states, self.runs, strict=True):
            if not run.is_whole:
                raise RunStopped(end_sentence(state))

    def panels(self) -> "RenderableType":
        """A panel per run, with its state."""
        from rich.console import Group

        from heloco.report.state_terminal import state_panel

        return Group(*(state_panel(state, each) for state, each in zip(self._states, self._displays, strict=True)))
