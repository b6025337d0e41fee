"""`heloco report` and `heloco compare`: pages and tables of finished or running runs."""

import argparse
import os
import shlex
import sys
from pathlib import Path

from heloco.cli.flags import Parser
from heloco.errors import UserError, nearest

FORMATS = ("table", "markdown", "csv")


def add_report_flags(parser: Parser) -> None:
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN", help="folders of runs of one task")
    parser.add_argument("--out", type=Path, metavar="FILE", default=Path("report.html"), help="[report.html]")


def report_command(folder: Path) -> str:
    """The command that makes the page of this run, to be pasted into a shell."""
    return f"heloco report {shlex.quote(str(folder))}"


def report(arguments: argparse.Namespace) -> int:
    from heloco.report.page_data import render_runs
    from heloco.report.page_writer import check_parts
    from heloco.report.run_reader import read_runs

    check_parts()
    out: Path = arguments.out
    if out.is_dir():
        raise UserError(f"{out} is a folder: name the file to write, e.g. --out {out / 'report.html'}.")
    write(out, render_runs(read_runs(arguments.folders)))
    print(f"Wrote {out} ({out.stat().st_size / 1e6:.1f} MB): open it in a browser.")
    return 0


def write(out: Path, page: str) -> None:
    """Writes the page atomically: if the disk is full, the old file stays."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_text(page, encoding="utf-8")
            temporary.replace(out)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): choose another --out.") from error


def add_compare_flags(parser: Parser) -> None:
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN", help="folders of runs of one task")
    parser.add_argument("--at-tokens", metavar="N", help="the budget of tokens (or samples) [what all runs reached]")
    parser.add_argument("--at-time", metavar="S", help="the budget of seconds, virtual or real [what all runs reached]")
    parser.add_argument("--format", metavar="{table,markdown,csv}", default="table", help="[table]")


def compare(arguments: argparse.Namespace) -> int:
    from heloco.report.compare import tables_at
    from heloco.report.run_reader import read_runs
    from heloco.report.table_text import as_csv, as_markdown, in_terminal, wide_console

    if arguments.format not in FORMATS:
        raise UserError(f"There is no format {arguments.format!r}; {nearest(arguments.format, FORMATS)}")
    budgets = {name: _budget(name, getattr(arguments, name)) for name in ("at_tokens", "at_time")}
    tables = tables_at(read_runs(arguments.folders), units=budgets["at_tokens"], time_s=budgets["at_time"])
    if arguments.format == "table":
        for table in tables:
            wide_console().print(in_terminal(table))
    elif arguments.format == "markdown":
        print("\n\n".join(map(as_markdown, tables)))
    else:
        sys.stdout.write("\n".join(as_csv(table, split_spreads=True) for table in tables))
    return 0


def _budget(name: str, text: str | None) -> float | None:
    try:
        value = None if text is None else float(text.replace("_", "").replace(",", ""))
    except ValueError:
        value = -1.0
    if value is not None and not 0 <= value < float("inf"):
        raise UserError(f"--{name.replace('_', '-')} cannot be {text!r}: give a number ≥ 0.")
    return value
