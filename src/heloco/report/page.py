"""Tables, figures and text as one HTML file that needs nothing else: no network, no script, on a phone, in the dark, on paper."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Literal

from heloco.report.figures import Figure, caption_of

Tone = Literal["", "best", "worst", "good", "bad"]
MARKS: dict[Tone, str] = {"worst": "✗", "good": "▲", "bad": "▼"}
"""Before the number, so that colour is never alone in saying it; the best is bold."""
KEY: dict[Tone, str] = {"best": "<b>bold</b> best", "worst": "✗ worst", "good": "▲ better", "bad": "▼ worse"}


@dataclass
class Cell:
    text: str
    note: str = ""
    """Small print under it: the paper's number, for one."""
    tone: Tone = ""


@dataclass
class TableData:
    title: str
    header: list[str]
    rows: list[list[Cell]]
    """The first cell of a row is its heading."""
    caption: str = ""


@dataclass
class Text:
    title: str
    paragraphs: list[str]


Block = TableData | Figure | Text


def write_page(path: Path, title: str, blocks: Sequence[Block], folder: Path) -> None:
    """Figures are taken from the SVG files that `figures.draw` wrote into the folder."""
    sections = "\n".join(_section(i, block, folder) for i, block in enumerate(blocks, 1))
    named = [(i, block.title) for i, block in enumerate(blocks, 1) if block.title]
    links = "".join(f'<li><a href="#part-{i}">{escape(name)}</a></li>' for i, name in named)
    contents = f'<nav aria-label="Contents"><ol>{links}</ol></nav>' if len(named) > 2 else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PAGE.format(title=escape(title), style=STYLE, contents=contents, sections=sections), encoding="utf-8")


def _section(i: int, block: Block, folder: Path) -> str:
    heading = f'<h2 id="part-{i}">{escape(block.title)}</h2>' if block.title else ""
    if isinstance(block, TableData):
        body = _table(i, block)
    elif isinstance(block, Figure):
        body = _figure(i, block, folder)
    else:
        body = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in block.paragraphs)
    return f"<section>{heading}\n{body}</section>"


# Tables


def _table(i: int, table: TableData) -> str:
    numeric = [column > 0 and _numeric([row[column].text for row in table.rows]) for column in range(len(table.header))]
    head = "".join(
        f'<th scope="col"{_class("number" * n)}>{escape(name)}</th>' for name, n in zip(table.header, numeric, strict=True)
    )
    rows = "\n".join(f"<tr>{''.join(_cells(row, numeric))}</tr>" for row in table.rows)
    tones = [KEY[tone] for tone in KEY if any(cell.tone == tone for row in table.rows for cell in row)]
    caption = " ".join(part for part in (escape(table.caption), _spanned("key", " · ".join(tones))) if part)
    below = f'<p class="caption" id="caption-{i}">{caption}</p>' if caption else ""
    named = f'aria-label="{escape(table.title)}"' + (f' aria-describedby="caption-{i}"' if caption else "")
    # A wide table scrolls by itself, also from the keyboard.
    return (
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(table.title)}, table">'
        f"<table {named}>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>{below}"
    )


def _cells(row: Sequence[Cell], numeric: Sequence[bool]) -> Iterator[str]:
    for column, (cell, number) in enumerate(zip(row, numeric, strict=True)):
        mark = f'<span class="mark" role="img" aria-label="{cell.tone}">{MARKS[cell.tone]}</span> ' if cell.tone in MARKS else ""
        text = f"<b>{escape(cell.text)}</b>" if cell.tone == "best" else escape(cell.text)
        note = f"<small>{escape(cell.note)}</small>" if cell.note else ""
        kind = _class("number" * number, cell.tone)
        yield f"<td{kind}>{mark}{text}{note}</td>" if column else f'<th scope="row"{kind}>{mark}{text}{note}</th>'


def _class(*names: str) -> str:
    said = " ".join(name for name in names if name)
    return f' class="{said}"' if said else ""


def _spanned(name: str, inner: str) -> str:
    return f'<span class="{name}">{inner}</span>' if inner else ""


def _numeric(texts: Sequence[str]) -> bool:
    """Whether a column holds numbers, which stand on the right: '6.54 ± 0.02', '+1.2 %', '14,400', '–', but not '1,6,6'."""
    said = [text for text in texts if text.strip(" –—-")]
    number = r"[-+−±~<>≈]?\s?(\d{1,3}(,\d{3})+|\d+)?(\.\d+)?(:\d\d)*"
    return bool(said) and all(re.fullmatch(rf"(?=\D*\d){number}[^\d,]*(±.*|\(.*)?", text) for text in said)


# Figures


def _figure(i: int, figure: Figure, folder: Path) -> str:
    path = folder / f"{figure.name}.svg"
    if path.exists():
        drawing = _inlined(i, figure, path)
        inner = f'<div class="card" tabindex="0" role="region" aria-label="{escape(figure.title)}, figure">{drawing}</div>'
    else:
        inner = '<p class="card">Not drawn: figures need matplotlib, <code>pip install "heloco[figures]"</code>.</p>'
    return f'<figure>{inner}<figcaption class="caption">{escape(caption_of(figure))}</figcaption></figure>'


def _inlined(i: int, figure: Figure, path: Path) -> str:
    """An SVG file's drawing as part of a page: its ids made its own, what describes and styles a file left out."""
    opening, _, drawing = path.read_text(encoding="utf-8").partition("<svg ")[2].partition(">")
    for left_out in ("title", "metadata", "style"):
        drawing = re.sub(rf"\s*<{left_out}\b.*?</{left_out}>", "", drawing, flags=re.DOTALL)
    drawing = re.sub(r"<[^>]*>", lambda tag: re.sub(r'(\bid="|href="#|url\(#)', rf"\1f{i}-", tag[0]), drawing)
    box = re.search(r'viewBox="0 0 ([\d.]+) [\d.]+"', opening)
    assert box, path
    width_px = 4 / 3 * float(box[1])  # on a narrow screen it scrolls before its letters become too small
    style = f"max-width:{1.15 * width_px:.0f}px;min-width:{0.72 * width_px:.0f}px"
    return f'<svg role="img" aria-label="{escape(described(figure))}" {box[0]} style="{style}">{drawing.strip()}'


def described(figure: Figure) -> str:
    """The figure in words, for those who do not see it."""
    panels = [f"{panel.title}: {panel.y_label} against {panel.x_label}".removeprefix(": ") for panel in figure.panels]
    labels = dict.fromkeys(line.label for panel in figure.panels for line in panel.lines)
    return f"{figure.title}. {len(panels)} panel{'s' * (len(panels) != 1)}. {'; '.join(panels)}. Lines: {'; '.join(labels)}."


PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
{contents}
{sections}
</main>
</body>
</html>
"""

STYLE = """
:root { --paper: #fff; --ink: #1c1e21; --soft: #5b6168; --rule: #d9dce0; --strong: #8d949c; --link: #0b5cad;
  --best: #d9f2e3; --worst: #fbe1dd; --good: #1b7a43; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --paper: #15171a; --ink: #e6e8ea; --soft: #a2a9b1; --rule: #33383e;
  --strong: #6d757e; --link: #7db7f2; --best: #17402a; --worst: #4f231f; --good: #6fd39a; --bad: #ff9c91; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif;
  -webkit-text-size-adjust: 100%; }
main { max-width: 76rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 1rem; }
h2 { font-size: 1.2rem; line-height: 1.3; margin: 0 0 .75rem; }
section { margin-top: 2.75rem; }
p { max-width: 46rem; margin: 0 0 .8rem; overflow-wrap: break-word; }
a { color: var(--link); }
nav ol { margin: 0; padding: .75rem 0 .75rem 1.4rem; border-block: 1px solid var(--rule);
  columns: 20rem; column-gap: 2.5rem; font-size: .925rem; }
nav li { break-inside: avoid; padding: .1rem 0; }
.wide, .card { overflow-x: auto; }
.wide:focus-visible, .card:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
table { border-collapse: collapse; font-size: .9rem; line-height: 1.35; font-variant-numeric: tabular-nums;
  border-block: 2px solid var(--strong); }
th, td { padding: .35rem .65rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule); }
tbody tr:last-child > * { border-bottom: 0; }
thead th { border-bottom: 1px solid var(--strong); vertical-align: bottom; font-weight: 600; }
th[scope=row] { position: sticky; left: 0; background: var(--paper); font-weight: 500; white-space: nowrap; }
.number { text-align: right; }
td.number { white-space: nowrap; }
small { display: block; color: var(--soft); font-size: .8em; font-weight: 400; }
.best { background: var(--best) !important; }
.worst { background: var(--worst) !important; }
.good { color: var(--good); }
.bad, .worst .mark { color: var(--bad); }
.mark { font-size: .75em; }
.best small, .worst small { color: inherit; opacity: .8; }
.caption { max-width: 60rem; margin: .6rem 0 0; color: var(--soft); font-size: .9rem; }
.key { white-space: nowrap; }
figure { margin: 0; }
.card { background: #fff; color: #1c1e21; border: 1px solid var(--rule); border-radius: 8px; padding: .9rem; max-width: none; }
.card svg { display: block; width: 100%; height: auto; margin: 0 auto; }
.card svg * { stroke-linejoin: round; stroke-linecap: butt; }
.card svg text { font-family: system-ui, "Segoe UI", Roboto, Helvetica, Arial, sans-serif !important; }
@media (max-width: 40rem) {
  main { padding: 1.25rem 1rem 3rem; }
  h1 { font-size: 1.4rem; }
  th, td { padding: .35rem .55rem; }
  .card { padding: .5rem; }
}
@media print {
  :root { --paper: #fff; --ink: #000; --soft: #444; --rule: #ccc; --strong: #777;
    --best: #d9f2e3; --worst: #fbe1dd; --good: #1b7a43; --bad: #b3261e; }
  body { font-size: 10pt; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  main { max-width: none; padding: 0; }
  nav { display: none; }
  section { margin-top: 1.5rem; }
  .wide, .card { overflow: visible; }
  .card { border: 0; padding: 0; }
  .card svg { min-width: 0 !important; }
  table { font-size: 7.5pt; }
  th, td { padding: .2rem .35rem; }
  h2 { break-after: avoid; }
  figure, tr { break-inside: avoid; }
}
"""
