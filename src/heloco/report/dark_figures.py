"""Figures of matplotlib on a page that may be dark: each colour of the drawing has another one there.

In the drawing a colour becomes `var(--ink-4d4d4d, #4d4d4d)`. Only a dark page sets such a variable, so on a light page and on
paper every colour is its own.
"""

import re
from collections.abc import Iterable

from heloco.report.charts.figures import mix

DARK_PAPER, DARK_INK = "#15171a", "#e6e8ea"
"""What white and black become; `study.css` has the same colours."""
COLOUR = re.compile(r"#([0-9a-f]{6})\b")
GREY = 8
"""A colour whose parts differ by no more is grey."""
LUMINANCE = 0.24
"""The least luminance of a line on a dark page."""


def with_variables(style: str) -> str:
    """A style attribute in which a page can change the colours."""
    return COLOUR.sub(r"var(--ink-\1, #\1)", style)


def dark_rules(drawings: Iterable[str]) -> str:
    """The rules of a page that give these drawings their dark colours; empty if there are no drawings."""
    colours = sorted({colour for drawing in drawings for colour in re.findall(r"var\(--ink-([0-9a-f]{6}),", drawing)})
    if not colours:
        return ""
    variables = " ".join(f"--ink-{colour}: {on_dark(f'#{colour}')};" for colour in colours)
    return f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {variables} }} }}\n"


def on_dark(colour: str) -> str:
    """The colour that a dark page has instead: light and dark greys change places, other colours get light enough to be seen."""
    parts = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    if max(parts) - min(parts) <= GREY:
        return mix(DARK_INK, DARK_PAPER, sum(parts) / 3 / 255)
    share = 0.0
    while luminance(mix(colour, "#ffffff", share)) < LUMINANCE:
        share += 0.05
    return mix(colour, "#ffffff", share)


def luminance(colour: str) -> float:
    """The relative luminance of WCAG: 0 for black, 1 for white."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return sum(v * weight for v, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))
