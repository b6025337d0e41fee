"""Public things explain themselves: what `heloco` exports with its methods, every public class, the whole protocol."""

import ast
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import heloco
from heloco.run.config import BEST

PACKAGE = Path(heloco.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def function_of(member: Any) -> Any:
    """The function of a method or a property, whatever it is wrapped in; None if it is something else."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, functools.cached_property):
        return member.func
    if isinstance(member, staticmethod | classmethod):
        return member.__func__
    return member if inspect.isfunction(member) else None


def methods_of(exported: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class that this package defines, its bases' too."""
    for base in exported.__mro__:
        if base.__module__.startswith("heloco"):
            yield from ((f"{base.__name__}.{name}", function_of(m)) for name, m in vars(base).items() if not name.startswith("_"))


@pytest.mark.parametrize("name", [name for name in heloco.__all__ if not name.startswith("_")])
def test_what_the_package_exports_has_a_docstring(name):
    exported = getattr(heloco, name)
    if inspect.isclass(exported):
        generated = f"{exported.__name__}("  # a dataclass without a docstring gets its signature
        assert exported.__dict__.get("__doc__") and not exported.__doc__.startswith(generated)
        assert [method for method, function in methods_of(exported) if function is not None and not function.__doc__] == []
    else:
        assert (exported if inspect.isfunction(exported) else type(exported)).__doc__


def definitions(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """(name, node) of every public class, and of its public methods."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name, node
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and not member.name.startswith("_"):
                    yield f"{node.name}.{member.name}", member


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_every_public_class_has_a_docstring_and_in_the_protocol_every_method(path):
    is_protocol = path.is_relative_to(PACKAGE / "cluster" / "protocol")
    silent = [name for name, node in definitions(path) if (is_protocol or "." not in name) and not ast.get_docstring(node)]
    assert silent == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_docstring_says_more_than_the_name(path):
    for name, node in definitions(path):
        words = "".join(letter for letter in (ast.get_docstring(node) or "-").lower() if letter.isalnum())
        assert words != name.rpartition(".")[2].lower().replace("_", ""), f"{path}: {name}"


def test_the_class_names_the_method_that_the_default_recipe_has():
    documentation = " ".join((heloco.HeLoCo.__doc__ or "").split())
    assert f"The default of `heloco train` and `heloco.simulate`, `{BEST['method']}`," in documentation
