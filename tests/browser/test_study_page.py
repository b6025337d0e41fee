"""The page of a study in a real browser: dark figures on a dark page, light ones on paper, and nothing cut on a phone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heloco.report.charts.drawing import draw
from heloco.report.charts.figures import Figure, Line, Panel
from heloco.report.page_writer import Text, render_study
from heloco.report.table_data import Cell, TableData
from support.browsers import silent_page

METHODS = ("heloco", "heloco-ramp", "mla", "async-nesterov", "sync-nesterov")
LUMINANCE = """
    const light = colour => { const [r, g, b] = colour.match(/[\\d.]+/g).map(Number); return .2126 * r + .7152 * g + .0722 * b; };
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("study")
    lines = [Line(name, [0, 1, 2, 3], [4 - i / 5, 3 - i / 7, 2.0, 1 + i / 9]) for i, name in enumerate(METHODS)]
    figure = Figure("by-time", "By time", "Five methods.", [Panel(f"panel {i}", lines, "seconds", "loss") for i in range(4)], 4)
    draw(figure, folder)
    cells = [Cell(f"{4 + i / 10:.3f} ± 0.115", f"paper {i}.00") for i in range(10)]
    table = TableData("Losses", ["paces", *(f"L {name}" for name in METHODS * 2)], [[Cell("1,6,6,6,6"), *cells]], "Of `mla`.")
    page = folder / "index.html"
    page.write_text(render_study("A study", [Text("", ["What it *is*."], is_markdown=True), table, figure], folder))
    return page


@pytest.fixture
def page(browser_path: str | None) -> Iterator[Any]:
    with silent_page(browser_path) as page:
        yield page


def lightness(page: Any, selector: str, what: str) -> list[float]:
    """Of each of these elements: 0 for black, 255 for white."""
    elements = f"[...document.querySelectorAll('{selector}')]"
    return page.evaluate(f"() => {{ {LUMINANCE} return {elements}.map(e => light(getComputedStyle(e).{what})); }}")


def test_a_dark_page_has_dark_figures_and_paper_is_light(page, path):
    page.goto(path.as_uri())
    for media, scheme, is_dark in (("screen", "dark", True), ("screen", "light", False), ("print", "dark", False)):
        page.emulate_media(media=media, color_scheme=scheme)
        [background] = lightness(page, "svg #f3-patch_1 path", "fill")
        texts = lightness(page, "svg text", "fill")
        assert len(texts) > 10
        if is_dark:
            assert background < 40 and min(texts) > 100
        else:
            assert background > 254 and max(texts) < 140


def test_on_a_phone_and_on_paper_every_number_is_on_the_page(page, path):
    for media, width in (("screen", 390), ("print", 718)):
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(media=media)
        page.goto(path.as_uri())
        rights = page.evaluate("[...document.querySelectorAll('td, th[scope=row]')].map(e => e.getBoundingClientRect().right)")
        assert max(rights) <= width
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    first = page.locator("td").first
    assert first.get_attribute("data-label") == "L heloco"
