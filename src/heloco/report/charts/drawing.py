"""Figures as a paper prints them, drawn with matplotlib: panels and one legend."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heloco.errors import UserError
from heloco.report.charts.figures import Figure, Kind, Line, Panel, Range, colours_of, insert_gaps, mix, y_ranges

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Sheet

Look = dict[str, Any]
"""Keywords of matplotlib's Line2D."""

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
STRIPE = 4.0
"""The length of a piece where lines that lie on each other take turns, in line widths."""
MARKED: Look = {"markersize": 4, "markeredgewidth": 0.5, "markeredgecolor": "white"}
FEW_LINES = 6
"""The most lines of a panel that get their last value written next to them."""
FEW_NAMES = 8
"""The most labels of a figure that differ by colour alone."""


def available() -> bool:
    """Whether matplotlib is installed, which `draw` needs."""
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


def _has_marker(line: Line, look: Look) -> list[int]:
    """Where a line has marks: at points without neighbours, which would not show, and along it where marks tell lines apart."""
    y = [math.nan, *insert_gaps(line.y), math.nan]
    alone = [i for i in range(len(line.y)) if not math.isnan(y[i + 1]) and math.isnan(y[i]) and math.isnan(y[i + 2])]
    if line.paper or look["marker"] not in MARKERS:
        return alone
    places, every = range(len(line.y)), max(1, len(line.y) // 6)
    return sorted({*alone, *places[MARKERS.index(look["marker"]) % every :: every], *places[-1:]})


def _draw_panel(axes: "Axes", panel: Panel, looks: dict[Kind, Look], y_range: Range, height_in: float) -> None:
    from matplotlib.ticker import MaxNLocator

    for line in panel.lines:
        look, y = looks[line.kind], insert_gaps(line.y)
        axes.plot(
            list(line.x), y, **(look | _own_look(panel, line)), markevery=None if panel.points else _has_marker(line, look),
            zorder=4 if len(y) == 1 else 2.5 if line.paper else 3,
        )  # fmt: skip
        if line.spread is not None:
            low, high = ([v + sign * half for v, half in zip(y, insert_gaps(line.spread), strict=True)] for sign in (-1, 1))
            axes.fill_between(list(line.x), low, high, color=look["color"], alpha=0.16, linewidth=0, zorder=2)
    axes.set_title(panel.title)
    axes.set_ylim(y_range.low, y_range.high)
    if panel.counts:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02)
    largest = max((abs(x) for line in panel.lines for x in line.x), default=0)
    if largest >= 5000:
        axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x else "0")
    values = [y for line in panel.lines for _, *band in line.points() for y in band]
    beyond = [f"↑ to {max(values):.4g}"] if values and max(values) > y_range.high else []
    beyond += [f"↓ to {min(values):.4g}"] if values and min(values) < y_range.low else []
    axes.set_title("  ".join(beyond), loc="right", fontsize=7, fontweight="normal", color="#666666")
    if not panel.points and sum(not line.paper for line in panel.lines) <= FEW_LINES:
        _write_last_values(axes, panel, looks, y_range, height_in)


def _own_look(panel: Panel, line: Line) -> Look:
    """What a line has of its own in a panel: points are not joined, and lines that lie on each other take turns."""
    if panel.points:
        return {"linestyle": "none"}
    if line.stripe is None or line.stripe[0] == 0:
        return {}
    place, count = line.stripe
    return {"linestyle": (0, (STRIPE * (count - place), STRIPE * place))}


def _write_last_values(axes: "Axes", panel: Panel, looks: dict[Kind, Look], y_range: Range, height_in: float) -> None:
    """Writes each line's last value to the right of the axes, in its colour, pushed apart where values would overlap."""
    from matplotlib.colors import to_hex

    ends = [(line.last(), to_hex(looks[line.kind]["color"])) for line in panel.lines if not line.paper]
    finite_ends = sorted((y, colour) for y, colour in ends if y is not None)
    heights = [(y - y_range.low) / (y_range.high - y_range.low) for y, _ in finite_ends]
    for (y, colour), at in zip(finite_ends, spaced(heights, 9.5 / 72 / height_in), strict=True):
        axes.annotate(
            f"{y:.2f}" if 0.1 <= abs(y) < 1000 else f"{y:.3g}", (1, at), (3, 0), xycoords="axes fraction",
            textcoords="offset points", va="center", color=mix(colour, "#000000", 0.2), fontsize=7,
        )  # fmt: skip


def spaced(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending positions at least a gap apart: neighbours that are too close are centred together around their heights."""
    groups: list[tuple[float, int]] = []  # (centre, members)
    for at in heights:
        centre, members = at, 1
        while groups and centre - groups[-1][0] < gap * (members + groups[-1][1]) / 2:
            other, more = groups.pop()
            centre, members = (centre * members + other * more) / (members + more), members + more
        groups.append((centre, members))
    return [centre + gap * (i - (members - 1) / 2) for centre, members in groups for i in range(members)]


def _label_axes(sheet: "Sheet", figure: Figure, grid: "list[Axes]", columns: int) -> None:
    """Labels the axes. A label that all panels have in common is written once."""
    pairs = list(zip(grid, figure.panels, strict=False))
    one_x, one_y = (len({getattr(panel, name) for panel in figure.panels}) == 1 for name in ("x_label", "y_label"))
    same_x = one_x and len({axes.get_xlim() for axes, _ in pairs}) == 1
    for i, (axes, panel) in enumerate(pairs):
        if not one_y:
            axes.set_ylabel(panel.y_label)
        elif i % columns:
            axes.tick_params(left=False, labelleft=False)
        if not one_x:
            axes.set_xlabel(panel.x_label)
        elif same_x and i + columns < len(pairs):
            axes.tick_params(labelbottom=False)
    if one_x:
        sheet.supxlabel(figure.panels[0].x_label, fontsize=8.5)
    if one_y:
        sheet.supylabel(figure.panels[0].y_label, fontsize=8.5)


def _legend(sheet: "Sheet", figure: Figure, looks: dict[Kind, Look], free: "Sequence[Axes]") -> None:
    """Draws one legend for all panels: in the place of a missing panel, above them, or next to them if it is long."""
    from matplotlib.lines import Line2D

    names, handles = [name for name, *_ in looks], []
    lines = [line for panel in figure.panels for line in panel.lines]
    for kind, look in looks.items():
        kind_lines = [line for line in lines if line.kind == kind]
        has_markers = any(_has_marker(line, look) for line in kind_lines)
        has_lines = any(len(line.y) > 1 for line in kind_lines)
        look = (
            look | {"linewidth": 1.8} | ({} if has_markers else {"marker": "none"}) | ({} if has_lines else {"linestyle": "none"})
        )
        handles.append(Line2D([], [], **look))
    widths = [0.075 * len(name) + 0.6 for name in names]  # inches, about
    columns = len(names) if sum(widths) < sheet.get_figwidth() else max(1, int(sheet.get_figwidth() / max(widths)))
    if len(names) > FEW_NAMES:
        sheet.legend(handles, names, loc="outside right upper")
    elif len(free) and max(widths, default=0) < sheet.get_figwidth() / figure.columns:
        free[0].legend(handles, names, loc="center left", labelspacing=0.8)
    elif names:
        sheet.legend(handles, names, loc="outside upper center", ncols=columns)
