"""The page: one file that parses, needs nothing from outside, says everything it was given and nothing as markup."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from heloco.report.charts.drawing import draw
from heloco.report.charts.figures import (
    METHOD_COLOURS,
    OTHER_COLOURS,
    PAPER_COLOUR,
    STALENESS_COLOURS,
    Figure,
    Line,
    Panel,
)
from heloco.report.dark_figures import DARK_INK, DARK_PAPER, luminance, on_dark
from heloco.report.page_writer import Text, are_numbers, render_study
from heloco.report.table_data import Cell, TableData

EVIL = "<script>alert('1')</script> & \"co\""
VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Holds a page to its own structure, every tag closed in turn; keeps the tags, and the texts with the tag they stand in."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(html)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.open[-1] if self.open else "", data.strip()))

    def texts_of(self, tag: str) -> list[str]:
        return [text for where, text in self.texts if where == tag]

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


TABLE = TableData(
    "Table 1",
    ["paces", "mla", "heloco", "gain"],
    [
        [Cell("1,6,6"), Cell("7.22", "paper 7.20", "worst"), Cell("6.98", "paper 6.90", "best"), Cell("+3.3 %", tone="good")],
        [Cell("1,1,6"), Cell("6.85"), Cell("–"), Cell("−0.1 %", tone="bad")],
    ],
    "Nats per token.",
)


def a_figure(name: str) -> Figure:
    lines = [Line("mla", [0, 1, 2], [3, 2, 1], spread=[0.1] * 3), Line(f'id="x" {EVIL}', [2], [1], paper=True)]
    return Figure(
        name, f"Title of {name}", "A caption.", [Panel("left", lines, "steps", "loss"), Panel("right", lines, "steps", "loss")]
    )


@pytest.fixture(scope="module")
def html(tmp_path_factory) -> str:
    folder: Path = tmp_path_factory.mktemp("page")
    figures = [a_figure("one"), a_figure("two")]
    for figure in figures:
        draw(figure, folder / "figures")
    odd = TableData(EVIL, [EVIL, "n"], [[Cell(EVIL, EVIL), Cell("1")]], EVIL)
    blocks = [Text(EVIL, ["A first paragraph.", EVIL]), TABLE, *figures, odd, Figure("gone", EVIL, EVIL, [])]
    return render_study(f"A study {EVIL}", blocks, folder / "figures")


@pytest.fixture(scope="module")
def page(html) -> Page:
    return Page(html)


def test_it_is_one_document_with_a_title_and_a_language(html, page):
    assert html.startswith("<!DOCTYPE html>")
    assert page.all("html") == [{"lang": "en"}]
    assert page.texts_of("title") == page.texts_of("h1") == [f"A study {EVIL}"]
    assert any(meta.get("name") == "viewport" for meta in page.all("meta"))


def test_it_takes_nothing_from_outside(html, page):
    for tag, attributes in page.tags:
        for name in ("src", "href", "xlink:href", "action", "data", "srcset"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    assert "://" not in html
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)


def test_texts_are_never_markup(page):
    assert not page.all("script")
    for where in ("p", "h2", "th", "small", "a", "text", "figcaption"):
        assert any(EVIL in text for text in page.texts_of(where)), where


def test_ids_are_unique_and_every_reference_has_its_target(html, page):
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    references = {
        value[1:] for _, attributes in page.tags for name, value in attributes.items() if name.endswith("href") and value
    }
    references |= set(re.findall(r"url\(#([^)]+)\)", html)) | {
        a["aria-describedby"] for a in page.all("table") if "aria-describedby" in a
    }
    assert any(reference.startswith("f3-") for reference in references)
    assert references <= set(ids)


def test_labels_that_look_like_ids_stay_as_they_are(page):
    assert page.texts_of("text").count(f'id="x" {EVIL} (paper)') == 2


def test_a_table_has_all_its_cells_with_their_headings(html, page):
    assert [a["scope"] for a in page.all("th")] == ["col"] * 4 + ["row"] * 2 + ["col"] * 2 + ["row"]
    assert len(page.all("td")) == 3 * 2 + 1
    texts = page.texts_of("td") + page.texts_of("th") + page.texts_of("b") + page.texts_of("small")
    for cell in (cell for row in TABLE.rows for cell in row):
        assert cell.text in texts
        assert not cell.note or cell.note in texts
    assert set(TABLE.header) <= set(texts)
    assert "Nats per token." in html


def test_colour_is_never_alone_in_saying_what_is_best_or_worst(html, page):
    assert '<td data-label="heloco" class="number best"><b>6.98</b>' in html
    marks = [a for a in page.all("span") if a.get("class") == "mark"]
    assert [mark["aria-label"] for mark in marks] == ["worst", "good", "bad"]
    assert "✗ worst · ▲ better · ▼ worse" in html
    assert html.count('class="key"') == 1, "a table without tones needs no key"


def test_figures_are_described_and_captioned(page):
    labels = [svg["aria-label"] for svg in page.all("svg")]
    assert len(labels) == 2
    assert labels[0].startswith("Title of one. 2 panels. left: loss against steps; right: loss against steps. Lines: mla; ")
    assert all(svg["role"] == "img" for svg in page.all("svg"))
    assert page.texts_of("figcaption") == ["A caption.", "A caption.", EVIL]


def test_a_figure_that_was_not_drawn_says_what_is_missing(page):
    assert page.texts_of("code") == ['pip install "heloco[figures]"']


def test_both_colour_schemes_print_and_narrow_screens_are_provided_for(html):
    for rule in ("prefers-color-scheme: dark", "@media print", "@media (max-width", "overflow-x: auto"):
        assert rule in html


def test_markdown_is_rendered_and_its_markup_is_text(tmp_path):
    about = "Run `heloco study` with **care**, see [the page](#part-1).\n\n- one\n- two <b>three</b>\n\n![x](http://a/b.png)"
    table = TableData("T", ["a", "b"], [[Cell("`a`"), Cell("1")]], "Losses of `mla` *here*, not of c_ok_x.")
    html = render_study("S", [Text("", [about], is_markdown=True), Text("", ["Plain *text*."]), table], tmp_path)
    page = Page(html)
    assert page.texts_of("code") == ["heloco study", "mla"] and page.texts_of("strong") == ["care"]
    assert page.texts_of("em") == ["here"] and {"href": "#part-1"} in page.all("a")
    assert page.texts_of("li") == ["one", "two <b>three</b>"] and not page.all("b") and not page.all("img")
    assert "Plain *text*." in page.texts_of("p"), "what is computed is no Markdown"
    assert "`a`" in page.texts_of("th") and "not of c_ok_x." in html


def test_every_colour_of_a_drawing_has_another_one_on_a_dark_page(html, page):
    styles = [a["style"] for _, a in page.tags if a.get("style") and ("fill" in a["style"] or "stroke" in a["style"])]
    colours = {colour for style in styles for colour in re.findall(r"#[0-9a-f]{6}", style)}
    assert METHOD_COLOURS["mla"] in colours and "#ffffff" in colours
    for style in styles:
        assert all(f"var(--ink-{colour[1:]}, {colour})" in style for colour in re.findall(r"#[0-9a-f]{6}", style))
    [rules] = re.findall(r"@media screen and \(prefers-color-scheme: dark\) { :root { (.*?) } }", html)
    dark = dict(re.findall(r"--ink-([0-9a-f]{6}): (#[0-9a-f]{6});", rules))
    assert {f"#{colour}" for colour in dark} == colours
    assert (dark["ffffff"], on_dark("#000000")) == (DARK_PAPER, DARK_INK)


def test_lines_stand_out_on_a_dark_page_and_light_ones_keep_their_colour():
    paper = luminance(DARK_PAPER)
    for colour in (*METHOD_COLOURS.values(), *OTHER_COLOURS, *STALENESS_COLOURS, PAPER_COLOUR, "#444444", "#666666"):
        assert (luminance(on_dark(colour)) + 0.05) / (paper + 0.05) > 3.2, colour
    assert on_dark(METHOD_COLOURS["async-nesterov"]) == METHOD_COLOURS["async-nesterov"]
    assert luminance(on_dark("#e4e4e4")) < 0.05, "the grid stays in the background"


def test_the_contents_link_to_every_part_and_a_short_page_has_none(page, tmp_path):
    links = [a["href"] for a in page.all("a")]
    assert links == [f"#part-{i}" for i in range(1, 7)]
    short = Page(render_study("Short", [Text("", ["Alone."])], tmp_path))
    assert not short.all("nav")
    assert not short.all("h2")
    assert short.texts_of("p") == ["Alone."]


def test_a_row_that_does_not_fit_its_header_is_refused():
    with pytest.raises(ValueError, match="does not fit its header"):
        TableData("", ["a", "b"], [[Cell("1")]])


@pytest.mark.parametrize(
    ("texts", "numeric"),
    [
        (["6.54", "–", "7"], True),
        (["6.54 ± 0.02", "+1.2 %", "−3", "14,400", "1:20:05", ".5", "3 (of 5)"], True),
        (["1,6,6", "1,1,6"], False),
        (["1, 6, 6"], False),
        (["300 of 80 steps"], False),
        (["mla"], False),
        (["–"], False),
        ([], False),
    ],
)
def test_columns_of_numbers_stand_on_the_right(texts, numeric):
    assert are_numbers(texts) is numeric
