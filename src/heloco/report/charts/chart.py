"""What a page draws, as data: curves are `figures.Figure`s, and next to them bars, spans of time and a map of blocks.

A chart has one view or several, of which a reader looks at one at a time: a measure, or a run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from heloco.report.charts.figures import METHOD_COLOURS, OTHER_COLOURS, Figure, Values, mix
from heloco.report.run_groups import RunGroup

RUN_COLOURS = (*METHOD_COLOURS.values(), *OTHER_COLOURS)
"""Okabe and Ito's palette, then Tol's muted one."""
WORKER_SCALE = ("#0d0887", "#6a00a8", "#b12a90", "#e16462", "#fca636")
"""From the first worker, or the fastest, to the last: matplotlib's plasma without its lightest part. Runs have another palette,
so that no colour stands for a run in one chart and for a worker in the next."""
WORKER_LIMIT = 12
"""The most colours of workers: more are drawn in groups."""
PIECES = ("#5f6b7a", "#b9a27c")
"""Two measures of the same workers or machines, side by side: neither a run's colour nor a worker's."""


@dataclass
class Series:
    """One colour of bars, with a value for each category."""

    label: str
    values: Values
    """One per category."""
    colour: str


@dataclass
class Bars:
    """Series side by side over categories, or stacked."""

    x_label: str
    y_label: str
    categories: list[str]
    series: list[Series]
    stacked: bool = False
    counts: bool = False
    """Whether the bars count something: the axis then has whole numbers only."""


@dataclass
class Spans:
    """Rows of bars over time with a tick at the end of each."""

    x_label: str
    rows: list[str]
    row: list[int]
    start: list[float]
    end: list[float]
    count: list[int]
    """How many rounds a bar stands for."""
    hover: list[str]
    colours: list[str]
    """The colour of each row."""


@dataclass
class Heat:
    """Blocks × arrivals. A column stands for one arrival or for several: `columns` has the first and the last of each."""

    blocks: list[str]
    sizes: list[int]
    columns: list[tuple[int, int]]
    about: list[str]
    """For each column, which arrivals it stands for, of which workers, and how stale they were."""
    cosine: list[list[float | None]]
    """Per block, per column: the mean over the column's arrivals."""
    case: list[str]
    """For each block, a letter per column: the most frequent of k|d|t|s, or a blank where the rule was not applied."""


Content = Figure | Bars | Spans | Heat


@dataclass
class View:
    """One of the drawings that a chart can show."""

    label: str
    content: Content
    notes: list[str] = field(default_factory=list)
    """Sentences under the chart: what was left out or drawn together."""


@dataclass
class Chart:
    """A chart of the page: its title, a sentence about it, and the drawings that a reader can choose from."""

    name: str
    title: str
    about: str
    views: list[View]
    """None: there is nothing to draw, and `about` says why."""
    by: Literal["", "view", "run"] = ""
    """What the views are: one for all, a choice of this chart's own, or one per run, chosen for all such charts at once."""
    switches: tuple[str, ...] = ("log", "smooth")
    """The switches of the page that change this chart."""
    wide: bool = False
    """As wide as the page, where it would stand next to another."""


def worker_colours(count: int) -> list[str]:
    """Colours for so many workers, machines or groups of them, as far apart as the scale allows."""
    colours = []
    for i in range(count):
        step, part = divmod(i * (len(WORKER_SCALE) - 1) / max(1, count - 1), 1)
        lower, upper = (WORKER_SCALE[min(int(step) + k, len(WORKER_SCALE) - 1)] for k in (0, 1))
        colours.append(mix(lower, upper, part))
    return colours


def run_colours(groups: Sequence[RunGroup]) -> list[tuple[str, bool]]:
    """(colour, dashed) of each group of runs: the first of a method has the method's colour, others what is left; then dashes
    begin."""
    free, looks = list(OTHER_COLOURS), list[tuple[str, bool]]()
    for i, group in enumerate(groups):
        colour = METHOD_COLOURS.get(group.method)
        if colour is None or any(colour == used for used, _ in looks):
            colour = free.pop(0) if free else None
        looks.append((colour, False) if colour else (RUN_COLOURS[i % len(RUN_COLOURS)], True))
    return looks


@dataclass
class Group:
    """Workers that are drawn as one: each by itself, or, where there are many, those of like pace."""

    label: str
    workers: list[int]
    colour: str


def worker_groups(paces: Sequence[float], limit: int = WORKER_LIMIT) -> list[Group]:
    """Each worker by itself, or, where there are many, those of like pace together."""
    order = sorted(range(len(paces)), key=lambda i: (paces[i], i))
    if len(paces) <= limit:
        members = [[i] for i in range(len(paces))]
    elif len(set(paces)) <= limit:
        members = [[i for i in order if paces[i] == pace] for pace in sorted(set(paces))]
    else:
        members = [order[i * len(order) // limit : (i + 1) * len(order) // limit] for i in range(limit)]
    return [Group(_label(part, paces), part, colour) for part, colour in zip(members, worker_colours(len(members)), strict=True)]


def seat_groups(count: int, limit: int = WORKER_LIMIT) -> list[Group]:
    """Groups workers whose paces say nothing: each by itself, or neighbours together if there are many."""
    group_size = -(-count // limit)
    parts = [list(range(begin, min(count, begin + group_size))) for begin in range(0, count, group_size)]
    names = [f"worker {part[0]}" if len(part) == 1 else f"workers {part[0]}–{part[-1]}" for part in parts]
    return [Group(name, part, colour) for name, part, colour in zip(names, parts, worker_colours(len(parts)), strict=True)]


def _label(workers: Sequence[int], paces: Sequence[float]) -> str:
    low, high = min(paces[i] for i in workers), max(paces[i] for i in workers)
    pace = f"{low:g} s" if low == high else f"{low:g}–{high:g} s"
    return f"worker {workers[0]} ({pace})" if len(workers) == 1 else f"{len(workers)} workers ({pace})"
