"""What `heloco serve` and `heloco status` show: the run, and the machines that take part."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table

from heloco.report.reading import CONFIG, META, Run
from heloco.report.terminal import Progress, duration, tables

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
        self._paused = ""

    def refresh(self) -> None:
        if self.run is None and (self.folder / CONFIG).exists() and (self.folder / META).exists():
            self.run = Run(self.folder)
            self.progress = Progress(self.run.summary, self.run.planned or 0, self.console)
            self._told = max(0, len(self.run.evals) - 1)  # of a run that is taken up only where it stands
        elif self.run is not None:
            self.run.refresh()
        if self.run is not None and self.progress is not None:
            self.progress.summary = self.run.summary

    def panel(self, status: dict[str, Any]) -> RenderableType:
        parts: list[RenderableType] = [self.progress.panel()] if self.progress else []
        return Group(*parts, machines_table(status))

    def tell(self, status: dict[str, Any]) -> None:
        """Elsewhere than on a terminal: a line for whoever comes or goes, for each pause and each evaluation."""
        here = {m["machine"]: m["name"] for m in status["machines"]}
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
            for line in self.run.evals[self._told :]:
                self.progress.tell(line)
            self._told = len(self.run.evals)


def machines(count: int) -> str:
    return "1 machine" if count == 1 else f"{count} machines"


def machines_table(status: dict[str, Any]) -> Table:
    """Who is here, what they do, and who contributed lately."""
    over = status["participation_over"]
    lately = f"{len(status['participants'])} contributed to the last {over} arrivals" if over else "nobody has contributed yet"
    workers = "1 worker" if status["seats"] == 1 else f"{status['seats']} workers"
    title = f"{machines(len(status['machines']))} for {workers}, {lately}"
    if status["paused"]:
        title = f"[yellow]paused: {status['paused']}[/]\n{title}"
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2), header_style="dim")
    for name in ("machine", "worker", "doing", "pace", "arrivals", "heard of"):
        table.add_column(name, justify="left" if name in ("machine", "doing") else "right")
    for machine in status["machines"]:
        held = machine["round"]
        doing = f"round {held[1]} of worker {held[0]}, step {machine['steps']}" if held else "waits"
        pace = "–" if machine["pace_s"] is None else f"{machine['pace_s']:.3g} s"
        seat = "spare" if machine["seat"] is None else str(machine["seat"])
        table.add_row(machine["name"], seat, doing, pace, str(machine["arrivals"]), f"{machine['silent_s']:.0f} s ago")
    return table


def status_lines(status: dict[str, Any]) -> list[str]:
    """A run's state in a few sentences."""
    state = f"ended: {status['ended']}" if status["ended"] else f"paused: {status['paused']}" if status["paused"] else "going"
    return [
        f"Run {status['run']} ({status['folder']}): {state}.",
        f"{status['arrivals']} of {status['planned']} arrivals, outer step {status['outer_step']}, "
        f"{duration(status['time_s'])} gone.",
    ]
