"""A run's settings by name: from flags, TOML or Python into a config, and back to TOML.

A setting is a field of one of the config's sections, or a knob of an outer rule: one that is built in, was registered, or comes
with an installed package. Rules declare their knobs (`outer/constants.py`), and those become settings of [outer] here.
"""

import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

from heloco.errors import UserError, nearest
from heloco.inner import INNER_OPTIMIZERS
from heloco.inner.options import WITH_SECOND_MOMENT
from heloco.inner.own_optimizers import BUILT_IN_OPTIMIZERS
from heloco.knobs import Knob
from heloco.methods import METHODS
from heloco.policy import SHARD_POLICIES, WEIGHTS, weight_knobs
from heloco.registry import Registry
from heloco.run.config import DERIVED, FIELDS, RECIPES, SECTIONS, RunConfig, Settings, by_section, knob_setting
from heloco.run.values import convert
from heloco.task import BUILT_IN_TASKS, TASKS

NAMED: dict[str, Registry[Any]] = {
    "method": METHODS, "weight": WEIGHTS, "assign": SHARD_POLICIES, "task": TASKS, "inner_optimizer": INNER_OPTIMIZERS,
}  # fmt: skip
"""The settings that name something which may come from outside this package."""
BUILT_IN_ELSEWHERE: dict[str, tuple[str, ...]] = {"task": BUILT_IN_TASKS, "inner_optimizer": BUILT_IN_OPTIMIZERS}
"""What they can name that is in none of these registries."""


def named_choices(setting: str) -> list[str]:
    """What one of these settings can name."""
    return [*BUILT_IN_ELSEWHERE.get(setting, ()), *NAMED[setting]]


def named_in(config: RunConfig) -> list[tuple[Registry[Any], str]]:
    """Each of these settings in a resolved config: what is named, and where it is looked up."""
    outer = config.outer.method, config.outer.weight or ""
    names = (*outer, config.rounds.assign, config.input.task, config.inner.inner_optimizer)
    return list(zip(NAMED.values(), names, strict=True))


def knob_settings() -> dict[str, Knob]:
    """The knobs of all rules and the options of all arrival weights, by the names of their settings."""
    knobs = {knob_setting(name): knob for method in METHODS.values() for name, knob in method.rule.knobs.items()}
    for weight in WEIGHTS:
        knobs |= {f"weight_{name}": knob for name, knob in weight_knobs(weight).items()}
    return knobs


def setting_sections() -> dict[str, str]:
    """The name of every setting -> its section."""
    return FIELDS | dict.fromkeys(knob_settings(), "outer")


def setting_types() -> dict[str, object]:
    """The name of every setting -> its type, or a union of types."""
    hints = {name: hint for kind in SECTIONS.values() for name, hint in get_type_hints(kind).items() if name in FIELDS}
    return hints | {name: knob.kind for name, knob in knob_settings().items()}


def with_fields(config: RunConfig, values: Mapping[str, object]) -> RunConfig:
    """The config with settings replaced by name, whatever section they are in."""
    types = setting_types()
    for name in values:
        if name not in types:
            raise UserError(f"There is no setting {name!r}; {nearest(name, list(types))}")
    settings = {name: convert(name, value, types[name]) for name, value in values.items()}
    knobs = {name: value for name, value in settings.items() if name not in FIELDS}
    if knobs:
        config = replace(config, outer=replace(config.outer, knobs={**config.outer.knobs, **knobs}))
    for section in SECTIONS:
        changes = {name: value for name, value in settings.items() if FIELDS.get(name) == section}
        if changes:
            config = replace(config, **{section: replace(getattr(config, section), **changes)})
    return config


def with_recipe(name: str, settings: Settings, *, is_real: bool = False) -> Settings:
    """The chosen settings, and the recipe's where nothing was chosen and they fit. `is_real`: for a run on real machines."""
    if name not in RECIPES:
        raise UserError(f"There is no recipe {name!r}; {nearest(name, list(RECIPES))}")
    recipe = RECIPES[name]
    fitting = without_derived(recipe, [setting for setting in settings if settings[setting] != ""])
    values = {"lr": recipe["lr"]} if "lr" in recipe else {}  # it is the recipe's own, not derived from its model
    values |= fitting | settings
    keeps_state = convert("keep_state", values.get("keep_state", False), bool)
    if is_real or not keeps_state or values.get("inner_optimizer", "adamw") not in WITH_SECOND_MOMENT:
        values = _without_unchosen("second_moment", values, settings)
    if values.get("task") == "external":  # each machine has its own data
        values = _without_unchosen("assign", values, settings)
    return values


def _without_unchosen(name: str, values: Settings, settings: Settings) -> Settings:
    return {setting: value for setting, value in values.items() if setting != name or setting in settings}


def check_knob_names(config: RunConfig, chosen_names: Collection[str]) -> None:
    """Raises UserError if a setting that only real machines use was chosen in a simulation, and its rule has a knob of the same
    name: the knob was meant."""
    knobs = METHODS.find(config.outer.method).rule.knobs
    for name in chosen_names:
        if FIELDS.get(name) == "cluster" and name in knobs:
            flag = knob_setting(name).replace("_", "-")
            raise UserError(f"{name} is a setting of runs on real machines: the knob of {config.outer.method} is --{flag}.")


# ---- TOML


def read_toml(path: Path, overridden: Collection[str] = (), *, for_task: bool = False) -> Settings:
    """The settings of a TOML file with the sections of RunConfig.

    A run's own config.toml is effective: it also holds what was derived from other settings. What was derived from a setting that
    is `overridden` is left out, to be derived again. `for_task`: without what the synchronizer alone needs, the outer rule and
    the shard policy. These need not be installed where only the task is built.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"There is no config file {path}: check the path.") from None
    except OSError as error:
        raise UserError(
            f"The config file {path} cannot be read ({error.strerror}): give a TOML file that you may read."
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not valid TOML ({error}): fix that line.") from error
    return parse_toml(text, str(path), overridden, for_task=for_task)


def parse_toml(text: str, path: str, overridden: Collection[str] = (), *, for_task: bool = False) -> Settings:
    """The settings in TOML text, as `read_toml` gives them for a file. `path` is the name of the text in error messages."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML ({error}): fix that line.") from error
    values: Settings = {}
    is_effective = document.pop("effective", False) is True
    sections = setting_sections()
    for section, entries in document.items():
        if section not in SECTIONS or not isinstance(entries, dict):
            raise UserError(f"{path}: there is no section [{section}]; {nearest(section, list(SECTIONS))}")
        for name, value in entries.items():
            if for_task and (section == "outer" or name == "assign"):
                continue
            if name in NAMED and name not in overridden and value not in named_choices(name):
                NAMED[name].find(str(value))  # says what is missing, before its knobs are unknown
            if sections.get(name) != section:
                settings = [each for each, setting_section in sections.items() if setting_section == section]
                raise UserError(f"{path}: [{section}] has no setting {name!r}; {nearest(name, settings)}")
            values[name] = value
    return without_derived(values, overridden) if is_effective else values


def without_derived(values: Settings, chosen_names: Collection[str]) -> Settings:
    """The values that are not derived from something that was given."""
    stale = {derived for name in chosen_names for derived in DERIVED.get(name, ())}
    stale |= knob_settings().keys() if "method" in chosen_names else set()
    return {name: value for name, value in values.items() if name not in stale}


def to_toml(config: RunConfig) -> str:
    """The config as TOML. Its values are numbers, booleans, strings and lists of them, which TOML writes as JSON does."""
    lines = ["effective = true", ""]
    for section, entries in by_section(config).items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {_toml(value)}" for name, value in entries.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def section_to_toml(config: RunConfig, section: str, names: Collection[str]) -> str:
    """The settings of these names in one section, as TOML; empty if there are none."""
    entries = by_section(config)[section]
    return "\n".join([f"[{section}]", *(f"{name} = {_toml(entries[name])}" for name in sorted(names)), ""]) if names else ""


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")  # the one that JSON leaves as it is
