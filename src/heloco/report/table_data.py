"""A table as data: the page, the terminal and files show it each in its own way."""

from dataclasses import dataclass
from typing import Literal

Tone = Literal["", "best", "worst", "good", "bad"]


@dataclass
class Cell:
    """A cell of a table: its text, and how it is emphasised."""

    text: str
    note: str = ""
    """Small print under the text, for example the paper's number."""
    tone: Tone = ""


@dataclass
class TableData:
    """A table with a title and a caption. Every row has as many cells as the header."""

    title: str
    header: list[str]
    rows: list[list[Cell]]
    """The first cell of a row is its heading."""
    caption: str = ""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.header) for row in self.rows):
            raise ValueError(f"a row of {self.title!r} does not fit its header")
