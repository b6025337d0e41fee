"""The modules of the package, what each imports, and which functions and classes one room uses of another."""

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import heloco

PACKAGE = Path(heloco.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))
DEFINITION_NODES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def inner_room_of(path: Path) -> str:
    """The same, but `cluster/` has rooms of its own."""
    parts = path.relative_to(PACKAGE).parts
    return "/".join(parts[:2]) if parts[0] == "cluster" and len(parts) > 2 else room_of(path)


def name_of(path: Path) -> str:
    parts = ["heloco", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """(line, absolute module or module.name) of every import in a file, inside functions too."""
    yield from ((line, name) for line, name, _ in aliases_of(path))


def aliases_of(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, absolute module or module.name, its name in this file) of every import in a file, inside functions too."""
    package = name_of(path) if path.name == "__init__.py" else name_of(path).rpartition(".")[0]
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package_parts = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*package_parts, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}", alias.asname or alias.name) for alias in node.names)


@functools.cache
def definitions() -> Mapping[str, tuple[Path, Definition]]:
    """Functions and classes at the top of a module, by their full names."""
    return {
        f"{name_of(path)}.{node.name}": (path, node)
        for path in MODULES
        for node in parse(path).body
        if isinstance(node, DEFINITION_NODES)
    }


@functools.cache
def places() -> Mapping[str, str]:
    """What a room's `__init__` imports: the name under which others import it from there -> its full name."""
    faces = [path for path in MODULES if path.name == "__init__.py"]
    return {f"{name_of(path)}.{name.rpartition('.')[2]}": name for path in faces for _, name in imports_of(path)}


def used_names(path: Path) -> Iterator[str]:
    """The full names that a file imports, and those that it takes from a module that it imports: `blocks.block_name`."""
    aliases = {alias: name for _, name, alias in aliases_of(path)}
    attributes = (node for node in ast.walk(parse(path)) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
    taken = (f"{aliases[node.value.id]}.{node.attr}" for node in attributes if node.value.id in aliases)
    yield from (places().get(name, name) for name in (*aliases.values(), *taken))


def crossing_names(*, inside_cluster: bool = False) -> set[str]:
    """The functions and classes at the top of a module that a file of another room uses; `inside_cluster`: also of another room
    of `cluster/`."""
    room = inner_room_of if inside_cluster else room_of
    used = {(name, room(path)) for path in MODULES for name in used_names(path)}
    return {name for name, user in used if name in definitions() and room(definitions()[name][0]) != user}
