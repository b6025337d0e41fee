"""The changes that a live page gets, made as the page makes them."""

from typing import Any

from heloco.report.differences import Change


def with_changes(data: Any, changes: list[Change]) -> Any:
    """The data after the changes, as `live.js` makes them. Changes the data in place."""
    root = [data]
    for operation, path, value in changes:
        place: Any = root
        steps: list[Any] = [0, *path]
        last = steps.pop()
        for step in steps:
            place = place[step]
        if operation == "set":
            place[last] = value
        else:
            place[last].extend(value)
    return root[0]
