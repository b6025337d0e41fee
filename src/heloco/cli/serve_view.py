"""What `heloco serve` and `heloco status` show: the run, and the machines that take part."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from heloco.errors import UserError
from heloco.report.reading import CONFIG, META, Run
from heloco.report.terminal import Progress, duration, number, tables

if TYPE_CHECKING:
    from heloco.cli.serve import Engine

LOOK_EVERY_S = 0.25


def follow(engine: "Engine", folder: Path, stopping: Callable[[], bool]) -> str:
    """Looks on until the run has ended, and says why it did; empty where `stopping` came first."""
    console = Console()
    view = View(folder, console)
    if not console.is_terminal:
        return _looking(engine, view, stopping, view.tell)
    with Live(console=console, refresh_per_second=4) as live:
        ended = _looking(engine, view, stopping, lambda status: live.update(view.panel(status)))
    if view.run is not None:
        for table in tables(view.run.summary):
            console.print(table)
    return ended


def _looking(engine: "Engine", view: "View", stopping: Callable[[], bool], show: Callable[[dict[str, Any]], Any]) -> str:
    while True:
        status = engine.status()
        view.refresh()
        show(status)
        if status["ended"]:
            return str(status["ended"])
        if not status["machines"] and (trouble := engine.trouble()):
            engine.stop(f"its local workers could not start: {trouble}")
        if stopping():
            return ""
        time.sleep(LOOK_EVERY_S)


class View:
    """What the run's folder tells, and what is new in it."""

    def __init__(self, folder: Path, console: Console) -> None:
        self.folder, self.console = folder, console
        self.run: Run | None = None
        self.progress: Progress | None = None
        self._told = 0
        self._known: dict[str, str] = {}
        self._paused = self._trouble = ""

    def refresh(self) -> None:
        """Reads what is new. If that fails, it says so once and tries again at the next look: the run
        itself goes on."""
        try:
            self._read()
            self._trouble = ""
        except UserError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                self.console.print(f"What the run has written cannot be shown at the moment: {error}", markup=False)

    def _read(self) -> None:
        if self.run is None and (self.folder / CONFIG).exists() and (self.folder / META).exists():
            self.run = Run(self.folder)
            self.progress = Progress(self.run.summary, self.run.planned or 0, self.console)
            self._told = max(0, len(self.run.progress_lines) - 1)  # of a run that is taken up only where it stands
        elif self.run is not None:
            self.run.refresh()
        if self.run is not None and self.progress is not None:
            self.progress.summary = self.run.summary

    def panel(self, status: dict[str, Any]) -> RenderableType:
        parts: list[RenderableType] = [self.progress.panel()] if self.progress else []
        return Group(*parts, machines_table(status))

    def tell(self, status: dict[str, Any]) -> None:
        """Elsewhere than on a terminal: a line for whoever comes or goes, for each pause and each evaluation."""
        here = {m["machine"]: m["name"] for m in status["machines"] if not m["away"]}
        for machine, name in here.items():
            if machine not in self._known:
                print(f"{name} is here ({machines(len(here))}).", flush=True)
        for machine, name in self._known.items():
            if machine not in here:
                print(f"{name} is gone ({machines(len(here))}).", flush=True)
        self._known = here
        if status["paused"] != self._paused:
            self._paused = status["paused"]
            print(f"The run pauses: {self._paused}." if self._paused else "The run goes on.", flush=True)
        if self.run is not None and self.progress is not None:
            for line in self.run.progress_lines[self._told :]:
                self.progress.tell(line)
            self._told = len(self.run.progress_lines)


def machines(count: int) -> str:
    return "1 machine" if count == 1 else f"{count} machines"


def machines_table(status: dict[str, Any]) -> RenderableType:
    """Who is here, what they do, and who contributed lately."""
    over = status["participation_over"]
    lately = f"{len(status['participants'])} contributed to the last {over} arrivals" if over else "nobody has contributed yet"
    workers = "1 worker" if status["seats"] == 1 else f"{status['seats']} workers"
    title = Text(f"{machines(len(status['machines']))} for {workers}, {lately}{per_minute(status)}", "italic")
    above = [Text(f"paused: {status['paused']}", "yellow")] if status["paused"] else []
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("machine", "worker", "doing", "pace", "arrivals", "share", "stale", "per min", "heard of"):
        left = name in ("machine", "doing")
        table.add_column(name, justify="left" if left else "right", no_wrap=not left, overflow="ellipsis")
    for machine in status["machines"]:
        table.add_row(*map(Text, _machine_cells(machine)))
    said = f"share, mean staleness and arrivals per minute: over the last {over} arrivals"
    parts: list[RenderableType] = [*above, title]
    if status["machines"]:
        parts += [table, *([Text(said, "dim")] if over else [])]
    return Group(*parts)


def _machine_cells(machine: dict[str, Any]) -> list[str]:
    held, seat, share = machine["round"], machine["seat"], machine["share"]
    return [
        machine["name"],
        ("spare" if seat is None else str(seat)) + (f", now {held[0]}" if held and held[0] != seat else ""),
        "not back yet" if machine["away"] else f"step {machine['steps']}" if held else "waits",
        _figure(machine["pace_s"], " s"),
        str(machine["arrivals"]),
        "–" if share is None else f"{share:.0%}",
        number(machine["staleness"], 1),
        _figure(machine["per_minute"]),
        f"{machine['silent_s']:.0f} s ago",
    ]


def _figure(value: float | None, unit: str = "") -> str:
    return "–" if value is None else f"{value:,.0f}{unit}" if value >= 1000 else f"{value:.3g}{unit}"


def per_minute(status: dict[str, Any]) -> str:
    rate = status["per_minute"]
    return "" if rate is None else f" ({_figure(rate)} a minute)"


def status_lines(status: dict[str, Any]) -> list[str]:
    """A run's state in a few sentences."""
    state = f"ended: {status['ended']}" if status["ended"] else f"paused: {status['paused']}" if status["paused"] else "going"
    return [
        f"Run {status['run']} ({status['folder']}): {state}.",
        f"{status['arrivals']} of {status['planned']} arrivals, outer step {status['outer_step']}, "
        f"{duration(status['time_s'])} gone.",
    ]
