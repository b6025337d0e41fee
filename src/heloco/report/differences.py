"""The changes from one state of a page's data to the next, as short as they are: a live page gets these instead of everything.

A change is a list [operation, path, value]. "set" puts a value at the path, and "add" appends values to the list there. A path is
a list of keys and indices. `live.js` makes the changes, in their order.
"""

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

Change = list[Any]
Sequences = (list, tuple)
"""JSON knows only one kind."""


def differences(old: Any, new: Any) -> list[Change]:
    return list(_differences(old, new, []))


def _differences(old: Any, new: Any, path: list[str | int]) -> Iterator[Change]:
    if old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        for name, value in new.items():
            yield from _differences(old[name], value, [*path, name])
    elif isinstance(old, Sequences) and isinstance(new, Sequences) and old and len(new) >= len(old) and _is_worth_it(old, new):
        for index, before, after in zip(count(), old, new, strict=False):
            yield from _differences(before, after, [*path, index])
        if len(new) > len(old):
            yield ["add", path, new[len(old) :]]
    else:
        yield ["set", path, new]


def _is_worth_it(old: Sequence[Any], new: Sequence[Any]) -> bool:
    """Whether it is shorter to name the elements that changed than to send the list again."""
    if any(isinstance(value, dict | list | tuple) for value in old):
        return True
    changes = sum(bool(before != after) for before, after in zip(old, new, strict=False))
    return 4 * changes < len(new)
