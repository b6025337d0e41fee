"""Names say what a thing holds: no participles, adverbs or prepositions for things that are assigned, passed or defined."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.repository import REPOSITORY

BANNED = {
    "found", "said", "made", "known", "there", "told", "of", "some", "own", "given", "handed", "shown", "gone", "lean", "doomed",
    "most", "how", "above", "Law", "Passes", "Door", "patiently", "Watching", "Shown", "Planned", "Standing",
    "agreed", "alike", "closing_unauthorized", "closing_unread", "completing", "converted", "decompressed", "edited", "explicit",
    "gapped", "guarded", "halved", "lasted", "MOST", "MOST_CONFIGS", "MOST_STEPS", "orthogonalised", "preparing",
    "progressed", "ranked", "requested", "showing", "unhurried", "unpacked", "windowed",
}  # fmt: skip
"""Compared without leading underscores."""
BANNED_IN_PACKAGE = {
    "asking", "arrived", "brought", "caught", "certain", "chosen", "collected", "damaged", "decoded", "described", "evaluated",
    "filled", "further", "labelled", "mirroring", "missing", "moved", "noted", "recorded", "stopping",
    "accepting", "applied", "being_removed", "connected", "copying", "counted", "dispatched", "elapsed", "incoming",
    "journaled", "lately", "missed", "offered", "pausing", "settled", "shared", "tidying", "unattended", "unchecked", "watching",
    "APART", "DRAWN", "LEAST", "attended", "broken", "differing", "drawn", "held", "least", "mixed", "nothing", "parted",
    "parting", "returned", "taken", "written", "wrong",
    "both", "dealt", "everything", "like", "loaded", "news", "parsed", "saving", "undone", "wasted",
}  # fmt: skip
"""Also not in `src`, its scripts of pages included."""
PREFIX = "of_"
"""What `of_worker` holds is not said: losses, rows or steps of a worker."""
FILES = sorted(path for folder in ("src", "tests", "benchmarks", "examples") for path in (REPOSITORY / folder).rglob("*.py"))
SCRIPTS = sorted((REPOSITORY / "src").rglob("*.js"))
ASSIGNED = re.compile(r"(?<![\w$.])([A-Za-z_$][\w$]*)\s*=(?![=>])|\b(?:const|let|var)\s+([A-Za-z_$][\w$]*)")
DESTRUCTURED = re.compile(r"\b(?:const|let|var)\s+[\[{]([^\]}]*)[\]}]|[\[{]([^\[\]{}]*)[\]}]\s*=(?![=>])")
PARAMETERS = re.compile(r"\(([^()]*)\)\s*=>|(?<![\w$.])([A-Za-z_$][\w$]*)\s*=>|\bfunction\b[^(]*\(([^()]*)\)")


def names_in(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that a file defines, assigns or takes as an argument."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or (
            isinstance(node, ast.ExceptHandler | ast.MatchAs) and node.name
        ):
            yield node.lineno, node.name
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname


def names_in_script(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that a script assigns or takes as an argument."""
    text = re.sub(r"/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for pattern in (ASSIGNED, DESTRUCTURED, PARAMETERS):
        for match in pattern.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield from ((line, name) for group in match.groups("") for name in re.findall(r"[A-Za-z_$][\w$]*", group))


def is_banned(name: str, path: Path) -> bool:
    banned = BANNED | BANNED_IN_PACKAGE if path.is_relative_to(REPOSITORY / "src") else BANNED
    return name.lstrip("_") in banned or name.lstrip("_").startswith(PREFIX)


@pytest.mark.parametrize("path", [*FILES, *SCRIPTS], ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_a_name_says_what_the_thing_holds(path):
    names = names_in_script(path) if path.suffix == ".js" else names_in(path)
    assert [f"line {line}: {name}" for line, name in names if is_banned(name, path)] == []


def test_the_list_finds_what_it_should(tmp_path):
    path = tmp_path / "names.py"
    path.write_text("def given(own, *, of_worker):\n    self.made = [_found for _found in own]\n")
    assert sorted(name for _, name in names_in(path) if is_banned(name, path)) == ["_found", "given", "made", "of_worker", "own"]


def test_the_list_finds_what_it_should_in_a_script(tmp_path):
    path = tmp_path / "names.js"
    path.write_text(
        "/* const told = 1; */ const {given, whole} = card, made = [], [own] = rows;\n"
        "for (const said of rows) call((some, [key]) => some === key, found => found.known, _there = 2);\n"
        "const text = {found: 1, most: text.shown == 2};\n"
    )
    banned = [(line, name) for line, name in names_in_script(path) if is_banned(name, path)]
    assert sorted(set(banned)) == [(1, "given"), (1, "made"), (1, "own"), (2, "_there"), (2, "found"), (2, "said"), (2, "some")]
