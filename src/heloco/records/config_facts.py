"""config.toml: the settings that reports and displays compute with. `run/config.py` declares them, and all others."""

import tomllib
from pathlib import Path

import msgspec
from msgspec import Struct

from heloco.errors import UserError
from heloco.records.run_facts import Count, Size, edited_error


class InputFacts(Struct, frozen=True):
    """Of the section [input]."""

    task: str


class LengthFacts(Struct, frozen=True):
    """Of the section [run]."""

    arrivals: Count
    eval_every: Size

    @property
    def milestone_interval(self) -> int:
        """The number of arrivals between two sentences about training losses, if nothing is evaluated: as if it were."""
        return self.eval_every or self.arrivals


class ParticipationFacts(Struct, frozen=True):
    """Of the section [cluster]."""

    min_workers: Count
    participation: Size


class ConfigFacts(Struct, frozen=True):
    """Each field is a section of the config. A setting has no default here, because a config.toml has all settings."""

    input: InputFacts
    run: LengthFacts
    cluster: ParticipationFacts


def read_config(path: Path) -> ConfigFacts:
    """The settings in a config.toml. What is wrong with the file is a `UserError`."""
    return parse_config(_read_text(path), path)


def parse_config(text: str, source: Path | str) -> ConfigFacts:
    """The settings in the text of a config.toml. `source` is the name of the text in error messages."""
    try:
        return msgspec.convert(_parse_toml(text, source), ConfigFacts)
    except msgspec.ValidationError as error:
        raise edited_error(source, error) from error


def read_all_settings(path: Path) -> dict[str, dict[str, object]]:
    """All settings in a config.toml by section and name. They are shown and compared as they are, and not computed with."""
    document = _parse_toml(_read_text(path), path)
    return {section: entries for section, entries in document.items() if isinstance(entries, dict)}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error


def _parse_toml(text: str, source: Path | str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _unreadable(source, error) from error


def _unreadable(source: Path | str, error: Exception) -> UserError:
    return UserError(f"{source} cannot be read ({error}): restore it, or start the run again.")
