"""Tables that a terminal never cuts: columns that do not fit stand in a further part below, after the first column again."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

WHOLE = 24
"""Cells of up to this width are not broken: a number stays with its spread. Longer ones are broken between words."""


@dataclass(frozen=True)
class _Widths:
    """How wide a column may be."""

    narrowest: int
    """Nothing is broken but long texts, between words."""
    widest: int
    """Everything is in one line."""


@dataclass
class FittedTable:
    """A table of rich as wide as the terminal allows. If it is too wide, first headings and long texts are broken between words,
    and then the columns are spread over several parts."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table, width = self.table, options.max_width
        _, right, _, left = table.padding
        border = bool(table.box)
        edge, per_column = int(border), left + right + int(border)
        widths = [_widths(console, column.header, list(column.cells)) for column in table.columns]
        if edge + sum(per_column + each.widest for each in widths) <= width or not widths:
            yield table
            return
        first = min(widths[0].narrowest, max(1, width // 3))
        widths[0] = _Widths(first, max(first, widths[0].widest))
        parts = split_columns([per_column + each.narrowest for each in widths], width - edge)
        for i, part in enumerate(parts):
            room = width - edge - per_column * len(part)
            column_widths = share_room([widths[c].narrowest for c in part], [widths[c].widest for c in part], room)
            yield self._part(console, part, column_widths, is_first=i == 0, is_last=i == len(parts) - 1)

    def _part(
        self, console: Console, part: Sequence[int], column_widths: Sequence[int], *, is_first: bool, is_last: bool
    ) -> Table:
        """The table with some of its columns."""
        table = self.table
        result = Table(
            title=table.title if is_first else None, caption=table.caption if is_last else None, box=table.box,
            padding=table.padding, header_style=table.header_style, title_justify=table.title_justify,
            caption_justify=table.caption_justify,
        )  # fmt: skip
        for c, width in zip(part, column_widths, strict=True):
            column = table.columns[c]
            result.add_column(column.header, justify=column.justify, style=column.style, width=width, overflow="fold")
        cells = [list(table.columns[c].cells) for c in part]
        for i, row in enumerate(table.rows):
            result.add_row(*(_text(console, column[i]) for column in cells), end_section=row.end_section)
        return result


def split_columns(widths: Sequence[int], room: int) -> list[list[int]]:
    """Which columns stand together, if each part has the first column and is at most `room` wide."""
    parts, used = [[0]], widths[0]
    for c in range(1, len(widths)):
        if len(parts[-1]) > 1 and used + widths[c] > room:
            parts.append([0])
            used = widths[0]
        parts[-1].append(c)
        used += widths[c]
    return parts


def share_room(narrowest: Sequence[int], widest: Sequence[int], room: int) -> list[int]:
    """The width of each column of a part: its least, and what is left goes to the first that can use it. If even the least is too
    much, the last column has what is left."""
    widths, free = list(narrowest), room - sum(narrowest)
    if free < 0:
        widths[-1] = max(1, widths[-1] + free)
        return widths
    for i, wanted in enumerate(widest):
        more = min(free, wanted - widths[i])
        widths[i] += more
        free -= more
    return widths


def _text(console: Console, cell: RenderableType) -> Text:
    return cell if isinstance(cell, Text) else console.render_str(str(cell), highlight=False)


def _widths(console: Console, header: RenderableType, cells: Sequence[RenderableType]) -> _Widths:
    title = _text(console, header).plain
    lines = [line for cell in cells for line in _text(console, cell).plain.split("\n")]
    unbroken = [*title.split(), *(word for line in lines for word in (line.split() if cell_len(line) > WHOLE else [line]))]
    longest_word = max(map(cell_len, unbroken), default=0)
    return _Widths(max(1, longest_word), max(map(cell_len, [title, *lines, "-"])))
