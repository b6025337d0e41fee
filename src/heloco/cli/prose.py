"""Sentences in the terminal: broken between words, where a terminal would break them anywhere."""

import os
import shutil
import sys
import textwrap

NARROW = 40
"""In a terminal that is narrower, lines are left as they are."""


def terminal_width() -> int | None:
    """The columns of the terminal, or what COLUMNS says; None if the output is no terminal: then lines stay whole."""
    if not sys.stdout.isatty() and not os.environ.get("COLUMNS"):
        return None
    return shutil.get_terminal_size().columns


def wrap_line(line: str, indent: int = 0) -> str:
    """The line in lines that fit into the terminal; all but the first begin with `indent` blanks. Words stay whole."""
    width = terminal_width()
    if width is None or width < NARROW or len(line) <= width:
        return line
    prefix = " " * indent
    return textwrap.fill(line, width, subsequent_indent=prefix, break_long_words=False, break_on_hyphens=False)
