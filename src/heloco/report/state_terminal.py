"""The state of a watched run in the terminal: a line, and a table of its machines."""

import time
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from heloco.report.fitted_table import FittedTable
from heloco.report.run_state import MachineState, Presence, RunState, StateKind
from heloco.report.terminal import Progress
from heloco.report.wording import duration

STYLES: dict[StateKind, str] = {
    "going": "bold green", "paused": "bold yellow", "silent": "bold red", "suspended": "bold yellow",
    "finished": "bold green", "stopped": "bold yellow", "gave-up": "bold red", "failed": "bold red",
}  # fmt: skip
PRESENCE: dict[Presence, str] = {"here": "here", "away": "not back yet", "gone": "gone", "unknown": "not known"}


def clock_time(at: float) -> str:
    """A time of the clock here; with its day if that is not today."""
    local = time.localtime(at)
    is_today = local[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M:%S", local)


def head_of(state: RunState) -> str:
    """What goes on, and why."""
    since = f" since {clock_time(state.news_at)}" if state.kind == "silent" and state.news_at is not None else ""
    return f"{state.label}{since}" + (f": {state.reason}" if state.reason else "")


def progress_parts(state: RunState) -> Iterator[str]:
    """How far the run is, how fast, and how long it still takes."""
    yield f"{state.arrivals:,} of {state.planned:,} arrivals"
    if state.per_minute is not None and state.kind in ("going", "paused"):
        yield f"{state.per_minute:g} a minute"
    if state.left_s is not None:
        yield f"about {duration(state.left_s)} left"
    if state.news_at is not None and state.kind != "silent":
        yield f"last news {clock_time(state.news_at)}"


def state_line(state: RunState) -> str:
    """A run's state in one line."""
    return " · ".join((head_of(state), *progress_parts(state)))


def end_sentence(state: RunState) -> str:
    """Why there is nothing more to see of a run that did not reach its last arrival, and how it goes on."""
    goes_on = f" `{state.goes_on}` goes on with it." if state.goes_on else ""
    return f"{state.name} is {head_of(state).removesuffix('.')}.{goes_on}"


def state_panel(state: RunState, progress: Progress) -> RenderableType:
    """A run with its state, its progress, and its machines if it has any."""
    parts: list[RenderableType] = [
        Text(head_of(state), STYLES[state.kind]),
        progress.panel(" · ".join(progress_parts(state))),
    ]
    if state.goes_on:
        parts.insert(1, Text(f"{state.goes_on} goes on with it."))
    if state.machines:
        parts.append(FittedTable(machine_states_table(state)))
    return Group(*parts)


def machine_states_table(state: RunState) -> Table:
    """The machines of a run: which are here, and when each was last heard of."""
    caption = f"{state.machines_left_out} more are left out" if state.machines_left_out else None
    table = Table(box=None, padding=(0, 2), header_style="dim", caption=caption, caption_justify="left")
    for name in ("machine", "is", "last heard of", "worker", "arrivals", "per minute"):
        table.add_column(name, justify="right" if name in ("worker", "arrivals", "per minute") else "left")
    for machine in state.machines:
        rate = "–" if machine.per_minute is None else f"{machine.per_minute:g}"
        presence = PRESENCE[machine.presence] + (f" ({machine.why})" if machine.why else "")
        table.add_row(
            *map(Text, (machine.name, presence, heard_in_words(machine), machine.worker, f"{machine.arrivals:,}", rate))
        )
    return table


def heard_in_words(machine: MachineState) -> str:
    if machine.heard_at is not None:
        return clock_time(machine.heard_at)
    return f"{machine.heard_run} into the run" if machine.heard_run else "–"
