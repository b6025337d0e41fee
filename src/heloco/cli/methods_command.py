"""`heloco methods`: the outer methods, their equations, and the flags of their knobs."""

import argparse
import json
import sys
from typing import Any

from heloco.cli.flags import Parser, flag_of, format_value
from heloco.cli.prose import wrap_line

INDENT = 8
"""Where the further lines of a long one begin."""


def add_methods_flags(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


WHAT_TO_USE = """What to use
    If data may move between machines: the default, heloco-adaptive with --assign flexible.
    If a shard must stay on its machine: the same with --assign fixed.
    For the paper's setting: --recipe paper, with any --method. results/README.md compares them."""


def methods(arguments: argparse.Namespace) -> int:
    from heloco.methods import METHODS
    from heloco.run.config import knob_setting
    from heloco.run.settings import NAMED

    for problem in (problem for registry in NAMED.values() for problem in registry.problems()):
        print(f"heloco: {problem}", file=sys.stderr)
    descriptions: list[dict[str, Any]] = [
        {
            "name": m.name, "about": m.about, "equation": m.equation, "rule": m.rule.__name__,
            "weight": m.weight, "flexible_weight": m.weight_for("flexible"), "barrier": m.barrier, "knobs": m.knobs(),
            "settings": {knob_setting(name): value for name, value in m.knobs().items() if value is not None},
        }
        for m in METHODS.values()
    ]  # fmt: skip
    if arguments.json:
        print(json.dumps(descriptions, indent=1, ensure_ascii=False))
        return 0
    for method in descriptions:
        knobs = " ".join(f"{flag_of(name)} {format_value(value)}" for name, value in method["settings"].items())
        weights = dict.fromkeys((method["weight"], method["flexible_weight"]))
        print(method["name"])
        rho = f"ρ: {', with flexible shards '.join(weights)}   knobs: {knobs}"
        for line in filter(None, (method["about"], method["equation"], rho)):
            print(wrap_line(f"    {line}", INDENT))
        print()
    for line in WHAT_TO_USE.splitlines():
        print(wrap_line(line, INDENT))
    return 0
