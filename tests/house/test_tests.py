"""The tests themselves: a folder for each room, nothing shared but through `support/`, and no private of the package."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import heloco
from support.repository import REPOSITORY, TESTS

PACKAGE = Path(heloco.__file__).parent
BESIDES_ROOMS = {
    "synchronizer": "what is in files beside the rooms",
    "browser": "pages in a real browser",
    "faults": "processes that are killed, cut off, or run out of disk",
    "attack": "strangers and bad machines",
    "house": "the code itself, the README, what others add to it",
    "support": "what several test files use",
}
FILES = sorted(path for path in TESTS.rglob("*.py") if "__pycache__" not in path.parts)
USERS = [*FILES, *sorted((REPOSITORY / "benchmarks").rglob("*.py")), *sorted((REPOSITORY / "examples").rglob("*.py"))]
"""All that uses the package from outside."""
LINE_LIMIT = 400


def is_private(name: str) -> bool:
    named_tuple_methods = ("_replace", "_asdict")
    return name.startswith("_") and not name.startswith("__") and name not in ("_", *named_tuple_methods)


def private_names() -> set[str]:
    """Everything that a module of the package defines for itself: functions, classes, constants, attributes."""
    names: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return {name for name in names if is_private(name)}


def names_of_others(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of each attribute that is not `self`'s, import, and name in a text that is patched."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("setattr", "delattr"):
            texts = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            yield from ((node.lineno, text.rpartition(".")[2]) for text in texts if isinstance(text, str))


def test_there_is_a_folder_for_each_room():
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == rooms | BESIDES_ROOMS.keys()
    assert [path.name for path in TESTS.glob("*.py")] == ["conftest.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_no_test_imports_another(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        others = [module for module in modules if module.rpartition(".")[2].startswith(("test_", "conftest"))]
        assert not others, f"line {node.lineno}: what several tests use is in support/"


def test_no_test_benchmark_or_example_touches_a_private_of_the_package():
    privates = private_names()
    touched = [f"{path.relative_to(REPOSITORY)}:{line} {name}" for path in USERS for line, name in names_of_others(path)
               if name in privates]  # fmt: skip
    assert touched == []


def test_no_test_file_is_too_long_to_be_read_at_once():
    assert [path for path in FILES if len(path.read_text(encoding="utf-8").splitlines()) > LINE_LIMIT] == []
