"""Curves as a paper prints them: panels, one legend, a method's colour the same in every figure. Only `draw` needs matplotlib."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heloco.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Sheet

Values = Sequence[float | None]
"""None, NaN and infinities leave a gap."""
Kind = tuple[str, str | None, bool]
Look = dict[str, Any]
"""Keywords of matplotlib's Line2D."""

METHOD_COLOURS = {
    "sync-nesterov": "#4d4d4d",
    "async-nesterov": "#56b4e9",
    "mla": "#0072b2",
    "heloco": "#d55e00",
    "heloco-ramp": "#009e73",
}
"""From Okabe and Ito's palette, which stays apart for colour-blind eyes: baselines cold, the corrected rules warm and green."""
OTHER_COLOURS = ("#cc79a7", "#e69f00", "#882255", "#999933", "#332288", "#44aa99", "#aa4499", "#b07d48")
PAPER_COLOUR = "#767676"
STALENESS_COLOURS = ("#00876c", "#79a534", "#dfaa00", "#e0691a", "#a50f2b")
"""From low to high. The red is much darker than the green, so that the ends differ without hue."""
MARKERS = "os^Dv<>ph"
TICKS = {"labelsize": 7.5, "color": "#444444", "major.width": 0.6, "major.size": 2.5}
STYLE: Any = {
    "svg.hashsalt": "heloco",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Helvetica", "Arial"],
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8.5,
    "axes.linewidth": 0.6,
    "axes.edgecolor": "#666666",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    **{f"{xy}tick.{what}": value for xy in "xy" for what, value in TICKS.items()},
    "lines.solid_capstyle": "round",
    "figure.constrained_layout.w_pad": 0.09,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.8,
}
PLAIN: Look = {"linewidth": 1.25, "linestyle": "-", "marker": ".", "markersize": 4}
DASHED: Look = {"linestyle": (0, (4, 1.6))}
PAPER: Look = {"linewidth": 1.0, "linestyle": (0, (1, 1.8)), "marker": "D", "markersize": 4.5, "markerfacecolor": "white"}
MARKED: Look = {"markersize": 4, "markeredgewidth": 0.5, "markeredgecolor": "white"}
FEW_LINES = 6
"""So many lines of a panel still get their last value written beside them."""
FEW_NAMES = 8
"""So many labels of a figure are told apart by colour alone."""
SETTLING = 0.25
"""The part of a curve, from its start, that may be cut off at the top or bottom if it would squash the rest."""


@dataclass
class Line:
    label: str
    x: Sequence[float]
    y: Values
    spread: Values | None = None
    """Half the height of a band around the line."""
    colour: str | None = None
    dashed: bool = False
    paper: bool = False
    """The paper's own number: dotted, or a hollow mark where it is a single point."""

    def __post_init__(self) -> None:
        assert len(self.x) == len(self.y) == len(self.y if self.spread is None else self.spread), self.label

    @property
    def kind(self) -> Kind:
        """Lines of one kind look alike, and share an entry of the legend."""
        name = f"{self.label} (paper)" if self.paper and "paper" not in self.label.lower() else self.label
        return name, self.colour, self.dashed

    def points(self) -> Iterator[tuple[float, float, float]]:
        """(x, lower, upper) wherever there is a value, the band included."""
        for i, (x, y) in enumerate(zip(self.x, _gapped(self.y), strict=True)):
            if not math.isnan(y):
                half = _gapped([self.spread[i] if self.spread else 0.0])[0]
                yield x, y - (0.0 if math.isnan(half) else half), y + (0.0 if math.isnan(half) else half)

    def last(self) -> float | None:
        return next((y for y in reversed(_gapped(self.y)) if not math.isnan(y)), None)


@dataclass
class Panel:
    title: str
    lines: list[Line]
    x_label: str
    y_label: str
    whole: bool = False
    """Its y axis shows everything, and 0."""


@dataclass
class Figure:
    name: str
    """Of its files, without ending."""
    title: str
    caption: str
    panels: list[Panel]
    columns: int = 2


@dataclass
class Range:
    """What an axis shows, and how far the data goes beyond it."""

    low: float
    high: float
    below: float | None = None
    above: float | None = None


def _gapped(values: Values) -> list[float]:
    return [math.nan if v is None or not math.isfinite(v) else float(v) for v in values]


# Colours


def method_of(label: str) -> str | None:
    """The method that a label begins with: 'mla, dropped' is mla's, 'mla-lookahead' is not."""
    fits = (name for name in METHOD_COLOURS if label.startswith(name) and not label[len(name) :][:1].strip(" ,:;(/"))
    return max(fits, key=len, default=None)


def colours_of(figure: Figure) -> dict[str, str]:
    """Each label's colour where none is given: the method's own, or the next of the cycle in the order of appearance."""
    lines = [line for panel in figure.panels for line in panel.lines if line.colour is None]
    found = {line.label: METHOD_COLOURS[method] for line in lines if (method := method_of(line.label))}
    others = dict.fromkeys(line.label for line in lines if line.label not in found and not line.paper)
    found |= dict(zip(others, cycle(OTHER_COLOURS), strict=False))
    return dict.fromkeys((line.label for line in lines), PAPER_COLOUR) | found


def staleness_level(paces: Sequence[float]) -> float:
    """How much staler than among equal workers the typical worker is: 0 for equal paces, growing without bound.

    A worker with the share s of all arrivals has a mean staleness of 1/s − 1. Averaged over arrivals that is K − 1 whatever the
    paces, so workers count alike, each in proportion: the mean over workers of log((1/s)/K), the divergence of the shares from
    equal ones.
    """
    rate = sum(1 / pace for pace in paces)
    return max(0.0, sum(math.log(pace * rate / len(paces)) for pace in paces) / len(paces))


def staleness_colour(paces: Sequence[float]) -> str:
    """Green for low, yellow for moderate, red for high staleness; one scale for all figures, red from (1, 15, 15, 15, 15) on."""
    position = math.sqrt(min(1.0, staleness_level(paces) / 0.8))  # the level is quadratic in small differences
    step, part = divmod(position * (len(STALENESS_COLOURS) - 1), 1)
    here, there = (STALENESS_COLOURS[min(int(step) + i, len(STALENESS_COLOURS) - 1)] for i in (0, 1))
    return _mixed(here, there, part)


def _mixed(one: str, other: str, part: float) -> str:
    pairs = ((int(one[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in pairs)


# What the axes show


def y_range(lines: Sequence[Line], everything: bool = False) -> Range:
    """Everything, unless a steep start would take more than a third of the height: then where the curves settle."""
    settled: list[float] = []
    whole: list[float] = []
    for line in lines:
        points = list(line.points())
        start = points[0][0] + SETTLING * (points[-1][0] - points[0][0]) if len(points) > 4 and not everything else -math.inf
        whole += [y for _, *both in points for y in both]
        settled += [y for x, *both in points for y in both if x >= start]
    if not whole:
        return Range(0.0, 1.0)
    settled += [0.0] if everything else []
    low, high = min(settled), max(settled)
    span = high - low
    below, above = (end if abs(end - edge) > span / 2 else None for end, edge in ((min(whole), low), (max(whole), high)))
    low, high = (low if below is not None else min(low, min(whole))), (high if above is not None else max(high, max(whole)))
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    return Range(low - margin, high + margin, below, above)


def y_ranges(figure: Figure) -> dict[str, Range]:
    """By label of the y axis: panels that measure the same thing share one range."""
    labels = dict.fromkeys(panel.y_label for panel in figure.panels)
    alike = {label: [panel for panel in figure.panels if panel.y_label == label] for label in labels}
    return {label: y_range([ln for p in of for ln in p.lines], any(p.whole for p in of)) for label, of in alike.items()}


def caption_of(figure: Figure) -> str:
    """The figure's caption, and what its axes leave out."""
    ranges = y_ranges(figure)
    sentences = [figure.caption] if figure.caption else []
    for label, seen in ranges.items():
        outside = [f"up to {seen.above:.4g} lie above"] if seen.above is not None else []
        outside += [f"down to {seen.below:.4g} lie below"] if seen.below is not None else []
        if outside:
            axis = "the y axis" if len(ranges) == 1 else f"the axis of {label}"
            sentences.append(f"Early values {' and '.join(outside)} {axis}, which shows where the curves settle.")
    return " ".join(sentences)


# Drawing


def available() -> bool:
    """Whether `draw` can draw."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        return False
    return True


def draw(figure: Figure, folder: Path) -> list[Path]:
    """Writes NAME.svg and NAME.png, the same bytes for the same figure."""
    if not available():
        raise UserError('Drawing figures needs matplotlib: pip install "heloco[figures]"')
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    svg, png = folder / f"{figure.name}.svg", folder / f"{figure.name}.png"
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's matplotlibrc says
        matplotlib.rcParams.update(STYLE)
        sheet = _sheet(figure)
        sheet.savefig(svg, metadata={"Title": figure.title, "Creator": "heloco", "Date": None})
        sheet.savefig(png, dpi=160, metadata={"Title": figure.title, "Software": None})
    return [svg, png]


def _sheet(figure: Figure) -> "Sheet":
    import matplotlib.figure

    columns = max(1, min(figure.columns, len(figure.panels)))
    rows = max(1, math.ceil(len(figure.panels) / columns))
    width = {1: 6.2, 2: 4.1, 3: 3.2}.get(columns, 2.7)
    height = 0.3 + 0.62 * width
    sheet = matplotlib.figure.Figure(figsize=(width * columns, height * rows + 0.4), layout="constrained")
    grid: list[Axes] = [*sheet.subplots(rows, columns, squeeze=False).flat]
    looks, ranges = looks_of(figure), y_ranges(figure)
    for axes, panel in zip(grid, figure.panels, strict=False):
        _draw_panel(axes, panel, looks, ranges[panel.y_label], height - 0.55)
    for axes in grid[len(figure.panels) :]:
        axes.set_axis_off()
    _label_axes(sheet, figure, grid, columns)
    _legend(sheet, figure, looks, grid[len(figure.panels) :])
    return sheet


def looks_of(figure: Figure) -> dict[Kind, Look]:
    """How each kind of line is drawn, in the order of appearance. Where there are too many for colours, marks tell them apart."""
    colours, looks = colours_of(figure), dict[Kind, Look]()
    lines = [line for panel in figure.panels for line in panel.lines]
    many = len({line.kind for line in lines}) > FEW_NAMES
    for line in lines:
        look = {"color": line.colour or colours[line.label]} | PLAIN | (DASHED if line.dashed else {})
        if line.paper:
            look |= PAPER
        elif many:
            look |= MARKED | {"marker": MARKERS[len(looks) % len(MARKERS)]}
        looks.setdefault(line.kind, look)
    return looks


def _marked(line: Line, look: Look) -> list[int]:
    """Where a line has marks: at points without neighbours, which would not show, and along it where marks tell lines apart."""
    y = [math.nan, *_gapped(line.y), math.nan]
    alone = [i for i in range(len(line.y)) if not math.isnan(y[i + 1]) and math.isnan(y[i]) and math.isnan(y[i + 2])]
    if line.paper or look["marker"] not in MARKERS:
        return alone
    places, every = range(len(line.y)), max(1, len(line.y) // 6)
    return sorted({*alone, *places[MARKERS.index(look["marker"]) % every :: every], *places[-1:]})


def _draw_panel(axes: "Axes", panel: Panel, looks: dict[Kind, Look], seen: Range, height_in: float) -> None:
    for line in panel.lines:
        look, y = looks[line.kind], _gapped(line.y)
        axes.plot(list(line.x), y, **look, markevery=_marked(line, look), zorder=4 if len(y) == 1 else 2.5 if line.paper else 3)
        if line.spread is not None:
            low, high = ([v + sign * half for v, half in zip(y, _gapped(line.spread), strict=True)] for sign in (-1, 1))
            axes.fill_between(list(line.x), low, high, color=look["color"], alpha=0.16, linewidth=0, zorder=2)
    axes.set_title(panel.title)
    axes.set_ylim(seen.low, seen.high)
    axes.margins(x=0.02)
    largest = max((abs(x) for line in panel.lines for x in line.x), default=0)
    if largest >= 5000:
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x else "0")
    own = [y for line in panel.lines for _, *both in line.points() for y in both]
    beyond = [f"↑ to {max(own):.4g}"] if own and max(own) > seen.high else []
    beyond += [f"↓ to {min(own):.4g}"] if own and min(own) < seen.low else []
    axes.set_title("  ".join(beyond), loc="right", fontsize=7, fontweight="normal", color="#666666")
    if sum(not line.paper for line in panel.lines) <= FEW_LINES:
        _write_last_values(axes, panel, looks, seen, height_in)


def _write_last_values(axes: "Axes", panel: Panel, looks: dict[Kind, Look], seen: Range, height_in: float) -> None:
    """Right of the axes, in the lines' colours, pushed apart where they would overlap."""
    from matplotlib.colors import to_hex

    ends = [(line.last(), to_hex(looks[line.kind]["color"])) for line in panel.lines if not line.paper]
    ends_there = sorted((y, colour) for y, colour in ends if y is not None)
    wanted = [(y - seen.low) / (seen.high - seen.low) for y, _ in ends_there]
    for (y, colour), at in zip(ends_there, spaced(wanted, 9.5 / 72 / height_in), strict=True):
        axes.annotate(
            f"{y:.2f}" if 0.1 <= abs(y) < 1000 else f"{y:.3g}", (1, at), (3, 0), xycoords="axes fraction",
            textcoords="offset points", va="center", color=_mixed(colour, "#000000", 0.2), fontsize=7,
        )  # fmt: skip


def spaced(wanted: Sequence[float], gap: float) -> list[float]:
    """Ascending positions at least a gap apart: neighbours that are too close are centred together where they wanted to be."""
    groups: list[tuple[float, int]] = []  # (centre, members)
    for at in wanted:
        centre, members = at, 1
        while groups and centre - groups[-1][0] < gap * (members + groups[-1][1]) / 2:
            other, more = groups.pop()
            centre, members = (centre * members + other * more) / (members + more), members + more
        groups.append((centre, members))
    return [centre + gap * (i - (members - 1) / 2) for centre, members in groups for i in range(members)]


def _label_axes(sheet: "Sheet", figure: Figure, grid: "list[Axes]", columns: int) -> None:
    """What all panels have in common is written once."""
    used = list(zip(grid, figure.panels, strict=False))
    one_x, one_y = (len({getattr(panel, name) for panel in figure.panels}) == 1 for name in ("x_label", "y_label"))
    same_x = one_x and len({axes.get_xlim() for axes, _ in used}) == 1
    for i, (axes, panel) in enumerate(used):
        if not one_y:
            axes.set_ylabel(panel.y_label)
        elif i % columns:
            axes.tick_params(left=False, labelleft=False)
        if not one_x:
            axes.set_xlabel(panel.x_label)
        elif same_x and i + columns < len(used):
            axes.tick_params(labelbottom=False)
    if one_x:
        sheet.supxlabel(figure.panels[0].x_label, fontsize=8.5)
    if one_y:
        sheet.supylabel(figure.panels[0].y_label, fontsize=8.5)


def _legend(sheet: "Sheet", figure: Figure, looks: dict[Kind, Look], free: "Sequence[Axes]") -> None:
    """Once for all panels: in the place of a missing one, or above them, or, if long, beside them."""
    from matplotlib.lines import Line2D

    names, handles = [name for name, *_ in looks], []
    lines = [line for panel in figure.panels for line in panel.lines]
    for kind, look in looks.items():
        alike = [line for line in lines if line.kind == kind]
        marked = any(_marked(line, look) for line in alike)
        joined = any(len(line.y) > 1 for line in alike)
        look = look | {"linewidth": 1.8} | ({} if marked else {"marker": "none"}) | ({} if joined else {"linestyle": "none"})
        handles.append(Line2D([], [], **look))
    widths = [0.075 * len(name) + 0.6 for name in names]  # inches, about
    columns = len(names) if sum(widths) < sheet.get_figwidth() else max(1, int(sheet.get_figwidth() / max(widths)))
    if len(names) > FEW_NAMES:
        sheet.legend(handles, names, loc="outside right upper")
    elif len(free) and max(widths, default=0) < sheet.get_figwidth() / figure.columns:
        free[0].legend(handles, names, loc="center left", labelspacing=0.8)
    elif names:
        sheet.legend(handles, names, loc="outside upper center", ncols=columns)
