"""Curves as data: panels of lines, a method's colour the same in every figure, and what the axes show."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

Values = Sequence[float | None]
"""None, NaN and infinities leave a gap."""
Kind = tuple[str, str | None, bool]

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
EQUAL = 0.002
"""Lines that differ by less than this part of what their panel shows are one line to the eye."""
SETTLING = 0.25
"""The part of a curve, from its start, that may be cut off at the top or bottom if it would squash the rest."""


@dataclass
class Line:
    """A curve: its points, an optional band around them, and its look."""

    label: str
    x: Sequence[float]
    y: Values
    spread: Values | None = None
    """Half the height of a band around the line."""
    colour: str | None = None
    dashed: bool = False
    paper: bool = False
    """Whether the line is a number of the paper. It is dotted, or a hollow mark if it is a single point."""
    stripe: tuple[int, int] | None = None
    """(i, n): n lines of the panel lie on each other, and this one is drawn in every n-th piece, beginning with piece i."""

    def __post_init__(self) -> None:
        assert len(self.x) == len(self.y) == len(self.y if self.spread is None else self.spread), self.label

    @property
    def kind(self) -> Kind:
        """Lines of one kind look alike, and share an entry of the legend."""
        name = f"{self.label} (paper)" if self.paper and "paper" not in self.label.lower() else self.label
        return name, self.colour, self.dashed

    def points(self) -> Iterator[tuple[float, float, float]]:
        """(x, lower, upper) wherever there is a value, the band included."""
        for i, (x, y) in enumerate(zip(self.x, insert_gaps(self.y), strict=True)):
            if not math.isnan(y):
                half = insert_gaps([self.spread[i] if self.spread else 0.0])[0]
                yield x, y - (0.0 if math.isnan(half) else half), y + (0.0 if math.isnan(half) else half)

    def last(self) -> float | None:
        """The last y of the line that is a number; None if there is none."""
        return next((y for y in reversed(insert_gaps(self.y)) if not math.isnan(y)), None)


@dataclass
class Panel:
    """Lines that share two axes."""

    title: str
    lines: list[Line]
    x_label: str
    y_label: str
    shows_all: bool = False
    """Whether the y axis shows all values, and 0."""
    counts: bool = False
    """Whether y counts something: its axis then has whole numbers only."""
    points: bool = False
    """Whether each value is a point, and no line joins them."""


@dataclass
class Figure:
    """Panels side by side with one title and one caption."""

    name: str
    """The name of the figure's files, without their ending."""
    title: str
    caption: str
    panels: list[Panel]
    columns: int = 2


@dataclass
class Range:
    """What an axis shows, and how far the data goes beyond it."""

    low: float
    high: float
    lowest: float | None = None
    highest: float | None = None


def insert_gaps(values: Values) -> list[float]:
    """The values, NaN where there is none."""
    return [math.nan if v is None or not math.isfinite(v) else float(v) for v in values]


# Colours


def method_of(label: str) -> str | None:
    """The method that a label begins with: 'mla, dropped' is mla's, 'mla-lookahead' is not."""
    fits = (name for name in METHOD_COLOURS if label.startswith(name) and not label[len(name) :][:1].strip(" ,:;(/"))
    return max(fits, key=len, default=None)


def colours_of(figure: Figure) -> dict[str, str]:
    """Each label's colour where none is given: the method's own, or the next of the cycle in the order of appearance."""
    lines = [line for panel in figure.panels for line in panel.lines if line.colour is None]
    colours = {line.label: METHOD_COLOURS[method] for line in lines if (method := method_of(line.label))}
    others = dict.fromkeys(line.label for line in lines if line.label not in colours and not line.paper)
    colours |= dict(zip(others, cycle(OTHER_COLOURS), strict=False))
    return dict.fromkeys((line.label for line in lines), PAPER_COLOUR) | colours


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
    lower, upper = (STALENESS_COLOURS[min(int(step) + i, len(STALENESS_COLOURS) - 1)] for i in (0, 1))
    return mix(lower, upper, part)


def mix(one: str, other: str, part: float) -> str:
    """A colour between two: `part` 0 is the one, 1 the other."""
    pairs = ((int(one[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in pairs)


def striped(lines: Sequence[Line]) -> list[Line]:
    """The lines of a panel, those that lie on each other with stripes, so that the last one drawn does not hide the others."""
    values = [y for line in lines for y in insert_gaps(line.y) if not math.isnan(y)]
    tolerance = EQUAL * (max(values) - min(values)) if values else 0.0
    bundles: list[list[int]] = []
    for i, line in enumerate(lines):
        bundle = next((bundle for bundle in bundles if _are_equal(lines[bundle[0]], line, tolerance)), None)
        if bundle is None:
            bundles.append([i])
        else:
            bundle.append(i)
    stripe_of = {i: (k, len(bundle)) for bundle in bundles if len(bundle) > 1 for k, i in enumerate(bundle)}
    return [replace(line, stripe=stripe_of.get(i)) for i, line in enumerate(lines)]


def _are_equal(one: Line, other: Line, tolerance: float) -> bool:
    """Whether two lines lie on each other as far as both go."""
    length = min(len(one.x), len(other.x))
    if length < 2 or list(one.x[:length]) != list(other.x[:length]):
        return False
    pairs = list(zip(insert_gaps(one.y[:length]), insert_gaps(other.y[:length]), strict=True))
    return any(not math.isnan(a) for a, _ in pairs) and all(
        abs(a - b) <= tolerance or (math.isnan(a) and math.isnan(b)) for a, b in pairs
    )


# What the axes show


def y_range(lines: Sequence[Line], shows_all: bool = False, counts: bool = False) -> Range:
    """What the y axis of these lines shows: all of them, unless a steep start would take more than a third of the height. Then it
    shows where the curves settle. With `shows_all` it shows all of them, and 0, in any case. With `counts` it has room for half a
    one at both ends."""
    late_values: list[float] = []
    values: list[float] = []
    for line in lines:
        points = list(line.points())
        start = points[0][0] + SETTLING * (points[-1][0] - points[0][0]) if len(points) > 4 and not shows_all else -math.inf
        values += [y for _, *band in points for y in band]
        late_values += [y for x, *band in points for y in band if x >= start]
    if not values:
        return Range(0.0, 1.0)
    late_values += [0.0] if shows_all else []
    low, high = min(late_values), max(late_values)
    span = high - low
    lowest, highest = (end if abs(end - edge) > span / 2 else None for end, edge in ((min(values), low), (max(values), high)))
    low, high = (low if lowest is not None else min(low, min(values))), (high if highest is not None else max(high, max(values)))
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    margin = max(0.06 * (high - low), 0.6) if counts else margin
    return Range(low - margin, high + margin, lowest, highest)


def y_ranges(figure: Figure) -> dict[str, Range]:
    """Returns a range for each label of a y axis. Panels that measure the same thing share it."""
    labels = dict.fromkeys(panel.y_label for panel in figure.panels)
    panels_of_label = {label: [panel for panel in figure.panels if panel.y_label == label] for label in labels}
    return {
        label: y_range(
            [line for panel in panels for line in panel.lines],
            any(panel.shows_all for panel in panels),
            any(panel.counts for panel in panels),
        )
        for label, panels in panels_of_label.items()
    }


def caption_of(figure: Figure) -> str:
    """The figure's caption, and what its axes leave out."""
    ranges = y_ranges(figure)
    sentences = [figure.caption] if figure.caption else []
    for label, y_range in ranges.items():
        outside = [f"up to {y_range.highest:.4g} lie above"] if y_range.highest is not None else []
        outside += [f"down to {y_range.lowest:.4g} lie below"] if y_range.lowest is not None else []
        if outside:
            axis = "the y axis" if len(ranges) == 1 else f"the axis of {label}"
            sentences.append(f"Early values {' and '.join(outside)} {axis}, which shows where the curves settle.")
    return " ".join(sentences)


def describe_figure(figure: Figure) -> str:
    """The figure in words, for those who do not see it."""
    panels = [f"{panel.title}: {panel.y_label} against {panel.x_label}".removeprefix(": ") for panel in figure.panels]
    labels = dict.fromkeys(line.label for panel in figure.panels for line in panel.lines)
    return f"{figure.title}. {len(panels)} panel{'s' * (len(panels) != 1)}. {'; '.join(panels)}. Lines: {'; '.join(labels)}."
