"""The pages: each is one HTML file that needs nothing else, from a template of its own over `base.html`.

A report is interactive: it takes its data as JSON and can be given more. The page of a study is a document without scripts.
"""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from heloco.errors import UserError
from heloco.report.charts.figures import Figure, caption_of, describe_figure
from heloco.report.dark_figures import dark_rules, with_variables
from heloco.report.table_data import TableData, Tone

TEMPLATES = Path(__file__).parent / "templates"
STYLES = ("report.css", "state.css")
"""Of a report; the second one is for live pages."""
LIVE_SCRIPTS = ("state.js", "live.js")
MARKS: dict[Tone, str] = {"worst": "✗", "good": "▲", "bad": "▼"}
"""Before the number, so that colour is never alone in saying it; the best is bold."""
KEY: dict[Tone, str] = {"best": "<b>bold</b> best", "worst": "✗ worst", "good": "▲ better", "bad": "▼ worse"}


@dataclass
class Text:
    """Paragraphs under a heading; an empty title leaves the heading out."""

    title: str
    paragraphs: list[str]
    is_markdown: bool = False
    """Whether the paragraphs are Markdown. They are plain text otherwise."""


Block = TableData | Figure | Text


def _render(template: str, *styles: str, rules: str = "", **values: Any) -> str:
    """The page of a template. `styles`: the files of its style sheets; `rules`: what comes after them."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    return environment.get_template(template).render(style="".join(map(_read, styles)) + rules, **values) + "\n"


def _read(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


# ---- a report


def check_parts() -> None:
    """Says what is missing before anything is read."""
    if find_spec("plotly") is None:
        raise UserError('A report needs plotly: pip install "heloco[report]"')


def as_json(data: Any) -> str:
    """JSON that may stand inside a script element: no text of it can end the element."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def render_report(data: dict[str, Any], *, live: bool = False) -> str:
    """The page of a report, from what `page_data` gives.

    Its policy lets only its own scripts run, by their digests, and nothing be fetched; a live page may ask where it came from
    for newer data. Plotly's script comes from its package."""
    check_parts()
    from plotly.offline import get_plotlyjs

    scripts = [get_plotlyjs(), _read("report.js"), *(map(_read, LIVE_SCRIPTS) if live else [])]
    assert not any("</script" in script.lower() or "\r" in script for script in scripts)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    values = {"title": data["title"], "scripts": scripts, "digests": digests, "data": as_json(data), "live": live}
    return _render("report.html", *STYLES[: 2 if live else 1], **values)


def render_waiting(reason: str) -> str:
    """The page of a run that has nothing to show yet; it loads itself again."""
    return _render("waiting.html", title="HeLoCo", reason=reason)


# ---- a study


def render_study(title: str, blocks: Sequence[Block], folder: Path) -> str:
    """Tables, figures and text as one document. Figures are taken from the SVG files that `draw` wrote into the folder. Captions
    are Markdown."""
    from markdown_it import MarkdownIt

    markdown = MarkdownIt("commonmark", {"html": False}).disable("image")  # markup is shown as it is, and nothing is fetched
    figures = {i: block for i, block in enumerate(blocks, start=1) if isinstance(block, Figure)}
    paths = {i: folder / f"{figure.name}.svg" for i, figure in figures.items()}
    drawings = {i: _inline_drawing(i, figures[i], path) for i, path in paths.items() if path.exists()}
    helpers = {
        "alignment_of": _alignment_of, "key_of": _key_of, "drawings": drawings, "caption_of": caption_of,
        "markdown": markdown.render, "inline_markdown": markdown.renderInline,
    }  # fmt: skip
    rules = dark_rules(drawings.values())
    return _render("study.html", "study.css", rules=rules, title=title, blocks=list(blocks), marks=MARKS, **helpers)


def _key_of(table: TableData) -> str:
    """The sentence that says what the tones of a table mean."""
    return " · ".join(text for tone, text in KEY.items() if any(cell.tone == tone for row in table.rows for cell in row))


def _alignment_of(table: TableData) -> list[str]:
    """The class of each column: numbers stand on the right."""
    columns = [[row[i].text for row in table.rows] for i in range(len(table.header))]
    return ["number" if i and are_numbers(texts) else "" for i, texts in enumerate(columns)]


def are_numbers(texts: Sequence[str]) -> bool:
    """Whether a column holds numbers, which stand on the right: '6.54 ± 0.02', '+1.2 %', '14,400', '–', but not '1,6,6'."""
    texts_shown = [text for text in texts if text.strip(" –—-")]
    number = r"[-+−±~<>≈]?\s?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?(:\d\d)*"
    return bool(texts_shown) and all(re.fullmatch(rf"(?=\D*\d){number}[^\d,]*(±.*|\(.*)?", text) for text in texts_shown)


def _inline_drawing(i: int, figure: Figure, path: Path) -> str:
    """An SVG file's drawing as part of a page: its ids made its own, what describes and styles a file left out."""
    from markupsafe import escape

    opening, _, drawing = path.read_text(encoding="utf-8").partition("<svg ")[2].partition(">")
    for element in ("title", "metadata", "style"):
        drawing = re.sub(rf"\s*<{element}\b.*?</{element}>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r"<[^>]*>", lambda tag: re.sub(r'(\bid="|href="#|url\(#)', rf"\1f{i}-", tag[0]), drawing)
    drawing = re.sub(r"<[^>]*>", lambda tag: re.sub(r'style="[^"]*"', lambda style: with_variables(style[0]), tag[0]), drawing)
    box = re.search(r'viewBox="0 0 ([\d.]+) [\d.]+"', opening)
    assert box, path
    width_px = 4 / 3 * float(box[1])  # on a narrow screen it scrolls before its letters become too small
    style = f"max-width:{1.15 * width_px:.0f}px;min-width:{0.72 * width_px:.0f}px"
    return f'<svg role="img" aria-label="{escape(describe_figure(figure))}" {box[0]} style="{style}">{drawing.strip()}'
