"""A constant of a rule is declared once: everything else that names it is derived from the declaration."""

import ast
import inspect
import pydoc
from pathlib import Path
from typing import Annotated, Any, Literal, Unpack

import pytest
import torch

import heloco as package
from heloco.cli.main import parser
from heloco.knobs import Knob
from heloco.methods import METHODS
from heloco.outer import MLA, DelayedNesterov, HeLoCo, Nesterov, OuterOptimizer
from heloco.outer.constants import LookaheadKnobs
from heloco.outer.kernels.coefficients import NAMES
from heloco.run import RunConfig, resolve, with_fields
from heloco.run.config import knob_setting, outer_knobs
from heloco.run.settings import with_recipe
from support.runs import heloco

PACKAGE = Path(package.__file__).parent
RULES = [Nesterov, MLA, DelayedNesterov, HeLoCo]
EXAMPLES = {float: "0.25", int: "7", bool: "true"}


def help_of(thing: object) -> str:
    """What `help(thing)` shows, without line breaks and the bars at the left."""
    return " ".join(word for word in pydoc.plain(pydoc.render_doc(thing)).split() if word != "|")


class BoostKnobs(LookaheadKnobs, total=False):
    boost: Annotated[float, Knob(1.5, "How much longer each step is.", "[0, 9]")]
    mode: Annotated[Literal["up", "down"], Knob("up", "Where to.")]


class Boosted(MLA, knobs=BoostKnobs, lookahead=True):
    """MLA with two constants more.

    {knobs}
    """

    def __init__(self, params: Any, **knobs: Unpack[BoostKnobs]) -> None:
        OuterOptimizer.__init__(self, params, knobs)


def test_a_new_constant_is_everywhere_after_one_declaration(nothing_stays_registered):  # noqa: ARG001
    package.register_method("boosted", Boosted)
    signature = inspect.signature(Boosted).parameters
    assert (signature["boost"].default, signature["boost"].annotation, signature["lookahead"].default) == (1.5, float, True)
    assert "boost = 1.5, in [0, 9] How much longer each step is. mode = 'up', one of 'up', 'down' Where to." in help_of(Boosted)
    assert Boosted([torch.zeros(1)]).defaults["boost"] == 1.5 and METHODS["boosted"].knobs()["boost"] == 1.5
    assert resolve(with_fields(RunConfig(), {"method": "boosted"})).outer.knobs["boost"] == 1.5
    assert "How much longer each step is." in " ".join(heloco("train", "--help").out.split())
    for wrong in ({"boost": 10.0}, {"mode": "left"}):
        with pytest.raises(ValueError, match=r"(boost|mode) is"):
            Boosted([torch.zeros(1)], **wrong)


@pytest.mark.parametrize("rule", RULES)
def test_signature_help_config_and_flags_follow_the_declaration(rule):
    signature, documentation = inspect.signature(rule).parameters, help_of(rule)
    for name, knob in rule.knobs.items():
        assert (signature[name].default, signature[name].annotation) == (knob.default, knob.kind)
        assert f"{name} = {knob.default!r}" in documentation and " ".join(knob.about.split()) in documentation
        example = EXAMPLES.get(knob.kind) or knob.choices[-1]
        flag = f"--{knob_setting(name).replace('_', '-')}"
        assert vars(parser().parse_all(["train", flag, example]))[f"config.{knob_setting(name)}"] == example
    assert {*signature} == {"params", *rule.knobs, *({"fused"} if rule is Nesterov else ())}


def test_every_number_of_the_correction_is_in_the_kernels_table():
    numbers = [name for name, knob in HeLoCo.knobs.items() if knob.kind is float and name not in MLA.knobs]
    assert numbers == ["c_ok", "k_s", "k_d", "kappa", "beta_max", "eps", "c_bad"]
    assert [name for name in NAMES if name in numbers] == numbers


def test_a_methods_options_are_those_that_differ_from_its_rules():
    for method in METHODS.values():
        assert [name for name, value in method.options.items() if method.rule.knobs[name].default == value] == []


def literal_defaults(path: Path) -> list[str]:
    """Parameters of functions whose default is a number."""
    functions = [n for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.FunctionDef)]
    names = []
    for function in functions:
        arguments = function.args
        positional = [*arguments.posonlyargs, *arguments.args]
        pairs = [
            *zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True),
            *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
        ]
        names += [argument.arg for argument, default in pairs if isinstance(default, ast.Constant) and default.value is not None]
    return names


def test_no_function_of_the_rules_has_a_default_of_its_own_for_a_constant():
    constants = {name for rule in RULES for name in rule.knobs}
    repeated = [(path.name, name) for path in (PACKAGE / "outer").rglob("*.py") for name in literal_defaults(path)
                if name in constants]  # fmt: skip
    assert repeated == []


# ---- what help(heloco.HeLoCo) says


def test_help_shows_the_equation_and_which_published_form_it_is():
    documentation = help_of(package.HeLoCo)
    for text in (
        "m ← μm + (1−μ)G", "θ ← θ − η(G + μm)", "Δ − βc‖Δ‖ m/‖m‖", "λ = min(k_d(1−c)conf, 1)",
        "The default is the one printed in the paper (method `heloco`).", "(method `heloco-ramp`)",
        "`params`: the model's parameters, or groups of them. Each knob is a keyword.",
    ):  # fmt: skip
        assert text in documentation
    assert "knob_values" not in documentation


def test_help_shows_how_the_default_method_is_made():
    [line] = [line for line in (inspect.getdoc(package.HeLoCo) or "").splitlines() if "heloco.METHODS[" in line]
    names: dict[str, Any] = {"heloco": package, "params": [torch.zeros(2)]}
    exec(line.strip(), names)
    default = resolve(with_fields(RunConfig(), with_recipe("best", {})))
    [group] = names["outer"].param_groups
    knobs = outer_knobs(default.outer)
    assert {name: group[name] for name in knobs} == knobs and isinstance(names["outer"], HeLoCo)


def example_of(rule: type[OuterOptimizer]) -> str:
    """The lines of code in its docstring."""
    return inspect.cleandoc((inspect.getdoc(rule) or "").partition("Example:\n\n")[2].partition("\n\n")[0])


@pytest.mark.parametrize("rule", RULES)
def test_the_example_of_a_rule_runs_and_makes_its_first_step(rule):
    """Δ = 0.1 and m = 0. Nesterov: θ −= η(1 + μ)ρΔ. MLA and HeLoCo: m = (1 − μ)ρΔ. Delayed Nesterov at the first of 4: ρ = 1."""
    model, workers = torch.nn.Linear(2, 1), 4
    before = [p.detach().clone() for p in model.parameters()]
    names: dict[str, Any] = {"heloco": package, "model": model, "workers": workers}
    names |= {"trained": [p - 0.1 for p in before], "deltas": [torch.full_like(p, 0.1) for p in before]}
    exec(example_of(rule), names)
    steps = {
        Nesterov: 0.7 * 1.9 * 0.1 / 4, MLA: 0.7 * 1.09 * 0.1 / 2, HeLoCo: 0.7 * 1.09 * 0.1 / 2, DelayedNesterov: 0.7 * 0.1 / 4,
    }  # fmt: skip
    for p, theta in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(theta - p, torch.full_like(p, steps[rule]))
    assert [each.case for each in names["outer"].outcomes] == ["skipped"] * 2, "there is no momentum yet"
