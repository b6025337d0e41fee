"""Replaces every sentence that is made for people, so that a test can show that no program reads it."""

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from msgspec import Struct, structs

from heloco.cluster.client.run_client import MachineStopRequested, NotHeld, RunEnded
from heloco.cluster.client.worker import Abandoned
from heloco.cluster.protocol.link import LinkDown
from heloco.cluster.protocol.refusals import Refused
from heloco.errors import RunStopped, UserError
from heloco.wire.layout import Layout

PROSE = ("text", "reason", "sentence", "barred_because", "error", "difference")
"""The names of the fields that hold sentences. None stays None: then there is no sentence."""
ROOMS = ("heloco.cluster.", "heloco.records.", "heloco.rounds", "heloco.rulings", "heloco.policy.")
REPLAY = "heloco.cluster.server.replay"
"""A module with sentences that a run does not load."""
WITHIN_THEIR_MODULE = ("MachineRecord", "ScorerAnswer")
"""These are made in the module that defines them, and decoded nowhere else."""
ERRORS = (Refused, RunEnded, NotHeld, MachineStopRequested, LinkDown, RunStopped, UserError, Abandoned)
"""Exceptions whose sentence decides nothing. It is the last of their values."""
Reword = Callable[[str], str]


class Reworded:
    """Takes a class's place where its objects are made: they get other sentences. To `isinstance` both are the same."""

    def __init__(self, original: type[Struct], fields: list[str], reword: Reword) -> None:
        self.original, self.fields, self.reword = original, fields, reword

    def __call__(self, *values: Any, **named: Any) -> Any:
        return self._reworded(self.original(*values, **named))

    def __getattr__(self, name: str) -> Any:
        """A class method that makes an object."""
        make = getattr(self.original, name)
        return lambda *values: self._reworded(make(*values))

    def _reworded(self, message: Any) -> Any:
        return structs.replace(message, **{field: _other(getattr(message, field), self.reword) for field in self.fields})

    def __instancecheck__(self, instance: Any) -> bool:
        return isinstance(instance, self.original)

    def __or__(self, other: Any) -> Any:
        return self.original | (other.original if isinstance(other, Reworded) else other)

    __ror__ = __or__


def classes_with_prose() -> Iterator[tuple[type, list[str]]]:
    """The classes of these rooms that hold sentences, and the names of the fields."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(ROOMS)]
    classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    for each in sorted(classes, key=lambda value: (value.__module__, value.__qualname__)):
        if each.__module__.startswith(ROOMS):
            fields = getattr(each, "__struct_fields__", getattr(each, "__dataclass_fields__", ()))
            if prose := [field for field in fields if field in PROSE]:
                yield each, prose


def reword_all(monkeypatch: pytest.MonkeyPatch, reword: Reword) -> set[str]:
    """Rewords what errors, refusals, pauses, endings, waits, events and rulings say. Returns the classes' names."""
    importlib.import_module(REPLAY)
    classes = dict(classes_with_prose())
    for each, fields in classes.items():
        if dataclasses.is_dataclass(each):
            monkeypatch.setattr(each, "__init__", _reworded_init(each.__init__, fields, reword))
            continue
        for name, module in list(sys.modules.items()):
            if _makes(name, each) and vars(module).get(each.__name__) is each:
                monkeypatch.setattr(module, each.__name__, Reworded(each, fields, reword))
    for name in ("difference", "untrainable"):
        monkeypatch.setattr(Layout, name, _reworded_answer(getattr(Layout, name), reword))
    for error in ERRORS:
        monkeypatch.setattr(error, "__init__", _reworded_error(error.__init__, reword))
    return {each.__name__ for each in (*classes, *ERRORS)}


def _makes(module: str, struct: type) -> bool:
    """Whether a module may make objects of the class. Some only decode them, and give the class as a type to do so."""
    if module == struct.__module__:
        return struct.__name__ in WITHIN_THEIR_MODULE
    return module.startswith("heloco.cluster.") and not module.startswith(("heloco.cluster.gateway.", REPLAY))


def _other(text: str | None, reword: Reword) -> str | None:
    return None if text is None else reword(text)


def _reworded_answer(method: Any, reword: Reword) -> Any:
    @functools.wraps(method)
    def reworded(*values: Any) -> str | None:
        return _other(method(*values), reword)

    return reworded


def _reworded_init(init: Any, fields: list[str], reword: Reword) -> Any:
    @functools.wraps(init)
    def reworded(self: Any, *values: Any, **named: Any) -> None:
        init(self, *values, **named)
        for field in fields:
            object.__setattr__(self, field, _other(getattr(self, field), reword))

    return reworded


def _reworded_error(init: Any, reword: Reword) -> Any:
    @functools.wraps(init)
    def reworded(self: Any, *values: Any, **named: Any) -> None:
        init(self, *values[:-1], *map(reword, values[-1:]), **named)

    return reworded


def without_prose(value: Any) -> Any:
    """A message, an event or a record as plain values, without its sentences and without the run's folder."""
    if isinstance(value, dict):
        return {name: without_prose(inner) for name, inner in value.items() if name not in (*PROSE, "folder")}
    if isinstance(value, list | tuple):
        return [without_prose(inner) for inner in value]
    return without_prose(msgspec.to_builtins(value)) if isinstance(value, Struct) else value
