"""One flag per field of a run's config, with its docstring as help. An unknown flag is answered with the nearest name."""

import argparse
import ast
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, get_args, get_origin

from heloco.errors import UserError, nearest
from heloco.registry import PLUGIN_FLAG, PLUGINS, import_plugins

if TYPE_CHECKING:
    from heloco.run.config import RunConfig, Settings

PLUGIN_HELP = "import this module, or file, before: it registers rules, weights, tasks, … of your own (docs/extend.md)"


class Parser(argparse.ArgumentParser):
    """argparse with full sentences as errors. `add_flags(parser)` is called when the parser is used: one of some twenty is."""

    def __init__(
        self, *args: Any, add_flags: "Callable[[Parser], None] | None" = None, has_plugins: bool = False, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._add_flags, self._has_plugins = add_flags, has_plugins
        self._negative_number_matcher = re.compile(r"-(\.?\d|inf|nan)")  # `--paces -1,2` is a bad value, not a flag

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        if self._add_flags is not None:
            self._add_flags(self)
            self._add_flags = None
            if self._has_plugins:
                self.add_argument(PLUGIN_FLAG, metavar="MODULE", help=PLUGIN_HELP)
        return super().parse_known_args(*args, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message[0].upper()}{message[1:]}. See `{self.prog} --help`.")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            raise UserError(f"There is no command {value!r}; {nearest(value, list(action.choices))} See `{self.prog} --help`.")

    def parse_all(self, words: list[str]) -> argparse.Namespace:
        """Like parse_args, but the error for an unknown option names the nearest option of the command."""
        arguments: argparse.Namespace
        arguments, unknown = self.parse_known_args(words)
        if unknown:
            command: Parser = getattr(arguments, "parser", self)
            options = [option for action in command._actions for option in action.option_strings if option.startswith("--")]
            word = unknown[0].split("=")[0]
            if word.startswith("-"):
                raise UserError(f"There is no option {word} for `{command.prog}`; {nearest(word, options)}")
            raise UserError(f"`{command.prog}` does not know what to do with {word!r}: see `{command.prog} --help`.")
        return arguments


def take_plugins(words: list[str]) -> list[str]:
    """The words without `--plugin MODULE`, wherever it stands. The modules are imported here, before rules' knobs become flags,
    and in all processes that this one starts."""
    rest, plugins = [], []
    remaining = iter(words)
    for word in remaining:
        flag, sign, value = word.partition("=")
        plugin = (value if sign else next(remaining, "")) if flag == PLUGIN_FLAG else None
        if plugin is None:
            rest.append(word)
        elif plugin:
            plugins.append(str(Path(plugin).resolve()) if plugin.endswith(".py") else plugin)
        else:
            raise UserError(f"{PLUGIN_FLAG} needs the name of a module, or a file such as ./my_rules.py.")
    if plugins:
        earlier = os.environ.get(PLUGINS, "").split(os.pathsep)
        os.environ[PLUGINS] = os.pathsep.join(dict.fromkeys(filter(None, (*earlier, *plugins))))
        import_plugins()
    return rest


@cache
def field_docs(kind: type) -> dict[str, str]:
    """The string under each field of a dataclass."""
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    docs, name = {}, None
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif name and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs[name] = " ".join(node.value.value.split())
            name = None
    return docs


def add_config_flags(parser: argparse.ArgumentParser, without: Collection[str] = (), *, is_real: bool = False) -> None:
    from heloco.run.config import SECTIONS, RunConfig
    from heloco.run.settings import (
        NAMED,
        knob_settings,
        named_choices,
        setting_sections,
        setting_types,
        with_fields,
        with_recipe,
    )

    defaults, knobs, types = with_fields(RunConfig(), with_recipe("best", {}, is_real=is_real)), knob_settings(), setting_types()
    groups = {section: parser.add_argument_group(section) for section in SECTIONS}
    docs = {name: text for kind in SECTIONS.values() for name, text in field_docs(kind).items()}
    docs |= {name: f"{knob.about} Unset: the method's own." for name, knob in knobs.items()}
    for name, section in setting_sections().items():
        if name in without:
            continue
        default = None if name in knobs else getattr(getattr(defaults, section), name)
        suffix = "" if default in (None, [], "") else f" [{format_value(default)}]"
        is_choice = name in NAMED and name != "method"  # `heloco methods` lists those
        groups[section].add_argument(
            flag_of(name),
            dest=f"config.{name}",
            metavar="{" + ",".join(named_choices(name)) + "}" if is_choice else _metavar(types[name]),
            default=argparse.SUPPRESS,
            nargs="?" if _is_bool(types[name]) else None,
            const="true" if _is_bool(types[name]) else None,
            help=(docs.get(name, "") + suffix).replace("%", "%%"),
        )


def given_fields(arguments: argparse.Namespace) -> "Settings":
    """Config fields that were set by flags."""
    return {key.removeprefix("config."): value for key, value in vars(arguments).items() if key.startswith("config.")}


def flag_of(setting: str) -> str:
    """The flag of a setting of a run's config."""
    return f"--{setting.replace('_', '-')}"


def format_value(value: Any) -> str:
    """A setting's value as its flag takes it."""
    if isinstance(value, list):
        return ",".join(f"{item:g}" if isinstance(item, float) else str(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _is_bool(hint: Any) -> bool:
    return hint is bool or bool in get_args(hint)


def _metavar(hint: Any) -> str:
    if float in get_args(hint) and type(None) not in get_args(hint):
        return "X|off"
    for option in (hint, *get_args(hint)):
        if type(option) is not type and get_origin(option) is not None and "Literal" in str(get_origin(option)):
            return "{" + ",".join(map(str, get_args(option))) + "}"
    if get_origin(hint) is list:
        return "X,X,…"
    names = {int: "N", float: "X", bool: "true|false", str: "TEXT"}
    return next((names[option] for option in (hint, *get_args(hint)) if option in names), "TEXT")


def warn_of_rates(config: "RunConfig") -> None:
    """Prints to stderr which learning rates are far above their defaults."""
    from heloco.run.rates import rate_warnings

    for warning in rate_warnings(config):
        print(f"heloco: warning: {warning}", file=sys.stderr, flush=True)


def fail(message: str) -> int:
    """Prints a sentence to stderr and returns exit code 2."""
    print(f"heloco: {message}", file=sys.stderr)
    return 2
