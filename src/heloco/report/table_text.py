"""A table as text: in the terminal, as Markdown, as CSV."""

import csv
import io
import os
import sys
from collections.abc import Sequence

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from heloco.report.fitted_table import FittedTable
from heloco.report.table_data import Cell, TableData

WIDE = 170
"""The width if the output is no terminal: tables are then not broken because there is too little room."""
SPREAD = " ± "
STYLES = {"best": "bold green", "worst": "red", "good": "green", "bad": "red", "": ""}


def wide_console() -> Console:
    """A console for tables: as wide as the terminal, or as COLUMNS says. If the output is no terminal, `WIDE` columns."""
    return Console() if sys.stdout.isatty() or os.environ.get("COLUMNS") else Console(width=WIDE)


def in_terminal(data: TableData) -> Group:
    """The table for a terminal: the best values green and starred, notes under the numbers. What is too wide stands below."""
    table = Table()
    for i, name in enumerate(data.header):
        table.add_column(Text(name), justify="left" if i == 0 else "right")
    for row in data.rows:
        table.add_row(
            *(Text(_starred(cell), STYLES[cell.tone]) + Text(f"\n{cell.note}" * bool(cell.note), "dim") for cell in row)
        )
    return Group(Text(f"\n{data.title}", "bold"), FittedTable(table), Text(data.caption, "dim"))


def _starred(cell: Cell) -> str:
    return f"{cell.text} ★" if cell.tone == "best" else cell.text


def as_markdown(table: TableData) -> str:
    """The table as Markdown, with its title as a heading and its caption below. The best values are bold."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"

    def cell_text(cell: Cell) -> str:
        text = f"**{cell.text}**" if cell.tone == "best" else cell.text
        return f"{text} ({cell.note})" if cell.note else text

    lines = [line(table.header), line(["---"] * len(table.header)), *(line([cell_text(c) for c in row]) for row in table.rows)]
    return "\n".join([f"## {table.title}", "", *lines, *(["", table.caption] if table.caption else [])])


def as_csv(table: TableData, *, split_spreads: bool = False) -> str:
    """The table as CSV. If a column has notes, they are in a column of their own after it. `split_spreads`: so is the spread of
    "6.54 ± 0.02"."""
    has_notes = [any(row[i].note for row in table.rows) for i in range(len(table.header))]
    has_spreads = [split_spreads and any(SPREAD in row[i].text for row in table.rows) for i in range(len(table.header))]

    def parts(text: str, note: str, i: int) -> list[str]:
        value, _, spread = text.partition(SPREAD) if has_spreads[i] else (text, "", "")
        return [value, *([spread] if has_spreads[i] else []), *([note] if has_notes[i] else [])]

    file = io.StringIO()
    out = csv.writer(file, lineterminator="\n")
    out.writerow(
        [
            x
            for i, name in enumerate(table.header)
            for x in parts(f"{name}{SPREAD}{name}, ±" if has_spreads[i] else name, f"{name}, note", i)
        ]
    )
    for row in table.rows:
        out.writerow([x for i, cell in enumerate(row) for x in parts(cell.text, cell.note, i)])
    return file.getvalue()
