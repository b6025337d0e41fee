"""Public things explain themselves: what `heloco` exports with its methods, every public class, the whole protocol, and all
functions and methods that another room may call."""

import ast
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import heloco
from heloco.run.config import BEST
from support.rooms import MODULES, PACKAGE, aliases_of, crossing_names, definitions, name_of, places

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


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


def public_definitions(path: Path) -> Iterator[tuple[str, ast.AST]]:
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
    silent = [name for name, node in public_definitions(path) if (is_protocol or "." not in name) and not ast.get_docstring(node)]
    assert silent == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_docstring_says_more_than_the_name(path):
    for name, node in public_definitions(path):
        words = "".join(letter for letter in (ast.get_docstring(node) or "-").lower() if letter.isalnum())
        assert words != name.rpartition(".")[2].lower().replace("_", ""), f"{path}: {name}"


def test_the_class_names_the_method_that_the_default_recipe_has():
    documentation = " ".join((heloco.HeLoCo.__doc__ or "").split())
    assert f"The default of `heloco train` and `heloco.simulate`, `{BEST['method']}`," in documentation


def test_the_example_of_a_task_runs():
    lines = (heloco.DatasetTask.__doc__ or "").splitlines()
    names: dict[str, Any] = {"heloco": heloco, "torch": torch}
    exec(inspect.cleandoc("\n".join(line for line in lines if line.startswith(" " * 8))), names)
    result = names["result"]
    assert len(result.tape) == 10 and result.loss < result.evals[0].mean["loss"]


CROSSING = sorted(crossing_names(inside_cluster=True))
"""Functions and classes that another room uses."""
TRIVIAL_BASES = ("Protocol", "Struct", "Generic", "NamedTuple", "Enum", "StrEnum", "IntEnum", "AbstractContextManager")


def functions_of(node: ast.ClassDef) -> dict[str, FunctionNode]:
    """The public methods and properties of a class by name; of overloads the last, which has the body."""
    return {m.name: m for m in node.body if isinstance(m, FunctionNode) and not m.name.startswith("_")}


def members_of(node: ast.ClassDef) -> set[str]:
    """The names of everything that objects of a class have, as far as the class itself says so."""
    stored = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    stored |= {n.id for part in node.body for n in ast.walk(part) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return stored | functions_of(node).keys()


def bases_of(path: Path, node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """(name in the source, full name) of each base of a class."""
    aliases = {alias: name for _, name, alias in aliases_of(path)}
    for base in node.bases:
        first, _, rest = ast.unparse(base).partition("[")[0].partition(".")
        full = aliases.get(first, f"{name_of(path)}.{first}") + (f".{rest}" if rest else "")
        yield rest or first, places().get(full, full)


@functools.cache
def protocols() -> list[ast.ClassDef]:
    classes = [(path, node) for path, node in definitions().values() if isinstance(node, ast.ClassDef)]
    return [node for path, node in classes if ("Protocol", "typing.Protocol") in bases_of(path, node)]


def explained_by_protocols(node: ast.ClassDef) -> set[str]:
    """The methods that are documented in a protocol which the class fulfils, whether it names the protocol or not."""
    explained: set[str] = set()
    members = members_of(node)
    for protocol in protocols():
        functions = functions_of(protocol)
        if protocol is not node and functions and functions.keys() <= members:
            explained |= {name for name, function in functions.items() if ast.get_docstring(function)}
    return explained


def explained_by_bases(path: Path, node: ast.ClassDef) -> Iterator[str]:
    """The methods that a base class documents, and those of other libraries' classes, which their documentation explains."""
    for short, base in bases_of(path, node):
        if base in definitions():
            base_path, base_node = definitions()[base]
            assert isinstance(base_node, ast.ClassDef)
            yield from (name for name, function in functions_of(base_node).items() if ast.get_docstring(function))
            yield from explained_by_bases(base_path, base_node)
        elif short not in TRIVIAL_BASES and "." in base and not base.startswith("heloco."):
            module, _, name = base.rpartition(".")
            yield from dir(getattr(pytest.importorskip(module), name))


def is_explained_by_its_class(node: ast.ClassDef, name: str) -> bool:
    """Whether this is a member of a protocol that has no body, and the protocol has a docstring."""
    is_protocol = any(ast.unparse(base) == "Protocol" for base in node.bases)
    return is_protocol and ast.unparse(functions_of(node)[name].body[-1]) == "..." and bool(ast.get_docstring(node))


@pytest.mark.parametrize("name", CROSSING)
def test_what_another_room_uses_has_a_docstring(name):
    path, node = definitions()[name]
    if not isinstance(node, ast.ClassDef):
        assert node.name.startswith("_") or ast.get_docstring(node)
        return
    explained = {*explained_by_protocols(node), *explained_by_bases(path, node)}
    silent = {each for each, function in functions_of(node).items() if not ast.get_docstring(function)} - explained
    assert {each for each in silent if not is_explained_by_its_class(node, each)} == set()
