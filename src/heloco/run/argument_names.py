"""Sentences about settings, for people who write Python: with the names of arguments where the command line has flags."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from heloco.errors import RunStopped, UserError
from heloco.run.settings import NAMED, named_choices, setting_types
from heloco.run.values import convert

FLAG = re.compile(r"--([a-z][a-z0-9-]*)(?: ([^\s;:]*[^\s;:.,)]))?")
"""A flag, and the word after it, which may be its value."""
PLUGIN_REMEDY = "name its module with --plugin", "import the module that registers it"
"""What is done on the command line about an unknown name, and what in Python."""
OTHER_ARGUMENTS = ("out", "recipe")
"""The arguments of `heloco.simulate` that are flags too, and no settings."""


@contextmanager
def python_errors() -> Iterator[None]:
    """Inside, the sentences of errors name Python's arguments."""
    try:
        yield
    except (UserError, RunStopped) as error:
        error.args = (in_python(str(error)), *error.args[1:])
        raise


def in_python(sentence: str) -> str:
    """The sentence with `--outer-lr` as outer_lr, and `--assign flexible` as assign="flexible". Commands, which stand between
    backticks, stay as they are."""
    parts = sentence.replace(*PLUGIN_REMEDY).split("`")
    parts[::2] = [FLAG.sub(_argument, part) for part in parts[::2]]
    return "`".join(parts)


def _argument(match: re.Match[str]) -> str:
    name, word = match[1].replace("-", "_"), match[2]
    types = setting_types()
    if name not in types:
        return match[0].replace(match[0].split()[0], name, 1) if name in OTHER_ARGUMENTS else match[0]
    value = None if word is None else _value(name, word, types[name])
    rest = match[0].partition(" ")[2]
    return f"{name}={value}" if value is not None else " ".join(filter(None, (name, rest)))


def _value(name: str, word: str, kind: object) -> str | None:
    """The word as Python writes this setting's value; None if it is no value of it. Any word could be one of a text."""
    if name in NAMED:
        return f'"{word}"' if word in named_choices(name) else None
    try:
        value = convert(name, word, kind)
    except UserError:
        return None
    if isinstance(value, list):
        are_numbers = all(isinstance(item, float) for item in value)
        return f"[{', '.join(f'{item:g}' for item in value)}]" if are_numbers else None
    if isinstance(value, bool | int | float):
        return repr(value)
    return f'"{value}"' if kind is not str else None
