"""Tables in a narrow terminal: nothing is cut, numbers stay whole, and what is too wide stands below."""

import io
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from heloco.report.fitted_table import share_room, split_columns
from heloco.report.table_data import Cell, TableData
from heloco.report.table_text import in_terminal
from support.runs import heloco
from support.terminals import on_a_terminal, without_colours

WIDE = TableData(
    "Losses of every method",
    ["paces", *(f"L method-{i}" for i in range(8)), "the order"],
    [
        [
            Cell(row),
            *(Cell(f"{4 + i / 10:.3f} ± 0.115", f"paper {i}.00", "best" if i == 0 else "") for i in range(8)),
            Cell(order),
        ]
        for row, order in (("1,6,6,6,6", "sync-nesterov < heloco < async-nesterov < mla"), ("1,1,1,1,1", "heloco < mla"))
    ],
    "A caption that is longer than a narrow terminal is wide, so it takes several lines of it.",
)


def render(table: TableData, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(in_terminal(table))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 300])
def test_every_cell_is_whole_at_every_width(width):
    lines = render(WIDE, width)
    assert max(map(cell_len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text
    for row in WIDE.rows:
        for cell in row[1:-1]:
            assert cell.text in text and cell.note in text
    words = text.replace("│", " ").replace("┃", " ").split()
    assert all(words.count(word) >= 1 for word in ["sync-nesterov", "<", "heloco", "<", "async-nesterov", "<", "mla"])
    assert all(words.count(f"method-{i}") == 1 for i in range(8))


def test_each_part_begins_with_the_names_of_the_rows():
    lines = render(WIDE, 80)
    parts = sum(line.startswith("┏") for line in lines)
    assert parts > 1
    assert sum("1,6,6,6,6" in line for line in lines) == sum("paces" in line for line in lines) == parts
    assert sum(line.startswith("┏") for line in render(WIDE, 300)) == 1


def test_a_name_that_is_wider_than_the_terminal_goes_on_in_the_next_line():
    name = "a-very-long-name-of-a-run-in-a-deep-folder/" * 3
    lines = render(TableData("Runs", ["run", "loss"], [[Cell(name), Cell("4.125")]]), 60)
    assert max(map(cell_len, lines)) <= 60
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in lines if line.startswith("│")]
    assert "".join(row[0] for row in rows) == name and [row[1] for row in rows if row[1]] == ["4.125"]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(10, 120))
def test_columns_are_spread_over_parts_that_fit(widths, room):
    parts = split_columns(widths, room)
    assert [c for part in parts for c in part[1:]] == list(range(1, len(widths)))
    assert all(part[0] == 0 for part in parts)
    assert all(sum(widths[c] for c in part) <= room for part in parts if len(part) > 2)
    for part in parts:
        narrowest = [widths[c] for c in part]
        column_widths = share_room(narrowest, [width + 7 for width in narrowest], room)
        assert sum(column_widths) <= max(room, len(part) + sum(narrowest[:-1])) and all(width >= 1 for width in column_widths)


# ---- the commands, in a terminal of 80 columns


@pytest.fixture(scope="module")
def folders(unbroken, tmp_path_factory) -> list[Path]:
    top = tmp_path_factory.mktemp("narrow")
    names = ("mla-with-a-long-name-of-its-own", "heloco-ramp")
    methods = ("mla", "heloco-ramp")
    settings = ("--arrivals", "12", "--eval-every", "3")
    return [
        Path(shutil.copytree(unbroken("--method", method, *settings), top / name))
        for name, method in zip(names, methods, strict=True)
    ]


def in_eighty_columns(*arguments: str | Path) -> list[str]:
    code, drawn = on_a_terminal(*arguments, columns=80)
    lines = without_colours(drawn).splitlines()
    assert code == 0, drawn
    assert "…" not in drawn
    assert max(map(cell_len, lines)) <= 80, [line for line in lines if cell_len(line) > 80]
    return lines


def test_compare_shows_all_its_numbers_in_eighty_columns(folders):
    text = "\n".join(in_eighty_columns("compare", *folders))
    table = heloco("compare", *folders, "--format", "csv").out.split("\n\n")[0].splitlines()
    for line in table[1:]:
        assert all(value in text for value in line.split(",")[1:])
    assert all(name in text for name in table[0].split(",") if " " not in name)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("methods",), "heloco-adaptive"),
        (("study", "--list"), "sensitivity"),
        (("schedule", "--paces", "1,1,2,6", "--arrivals", "30"), "mean staleness"),
        (
            ("plan", "--params", "124M", "--step", "0.5,1", "--link", "100mbit,80ms", "--workers", "4", "--simulate"),
            "synchronizer",
        ),
    ],
)
def test_other_commands_fit_into_eighty_columns(arguments, word):
    assert any(word in line for line in in_eighty_columns(*arguments))


def test_columns_is_heeded_where_the_output_is_no_terminal(folders, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = heloco("compare", *folders).out.splitlines()
    assert max(map(cell_len, lines)) <= 80 and "…" not in "".join(lines)
    monkeypatch.delenv("COLUMNS")
    assert max(map(cell_len, heloco("compare", *folders).out.splitlines())) > 80
