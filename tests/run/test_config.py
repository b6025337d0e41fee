"""The config: from TOML, flags or Python to the same checked values, and back to TOML without loss."""

import math
import tomllib
from dataclasses import fields
from typing import Literal, get_args, get_origin

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from heloco.cli.flags import field_docs, given_fields
from heloco.cli.main import parser
from heloco.errors import UserError
from heloco.methods import METHODS
from heloco.policy import NormGuard, make_guard
from heloco.run import RunConfig, resolve, with_fields
from heloco.run.config import FIELDS, RECIPES, SECTIONS, by_section
from heloco.run.settings import knob_settings, read_toml, setting_sections, setting_types, to_toml, with_recipe
from heloco.task.gpt import PRESETS
from support.runs import heloco


def config_with(**values: object) -> RunConfig:
    return resolve(with_fields(RunConfig(), values))


# ---- what `resolve` fills in


@pytest.mark.parametrize("method", METHODS)
def test_resolving_fills_in_the_methods_own_values(method):
    outer = by_section(config_with(method=method, paces=[1, 2, 3]))["outer"]
    knobs = {("outer_lr" if name == "lr" else name): value for name, value in METHODS[method].knobs().items()}
    if method == "delayed-nesterov":
        knobs["delay"] = 3
    assert {name: outer[name] for name in knobs} == knobs
    assert outer["weight"] == METHODS[method].weight
    rest = {name for name, value in outer.items() if value is not None} - set(knobs)
    assert rest == {"method", "weight", "drop", "drop_above", "norm_limit", "norm_policy"}, "a knob of another method"


def test_what_was_given_is_not_filled_in():
    config = config_with(
        method="delayed-nesterov", delay=2, outer_lr=0.1, weight="share", schedule_steps=9, preset="5m", width=64
    )
    assert (config.outer.knobs["delay"], config.outer.knobs["outer_lr"], config.outer.weight) == (2, 0.1, "share")
    assert config.inner.schedule_steps == 9
    assert (config.model.width, config.model.heads, config.model.context) == (64, 8, 256)


@pytest.mark.parametrize(("arrivals", "steps", "workers", "length"), [(300, 80, 5, 4800), (8, 2, 5, 3), (1, 1, 5, 1)])
def test_the_cosine_is_as_long_as_a_workers_part_of_the_run(arrivals, steps, workers, length):
    config = config_with(arrivals=arrivals, inner_steps=steps, paces=[1.0] * workers)
    assert config.inner.schedule_steps == length


@pytest.mark.parametrize(("workers", "arrivals"), [(1, 120), (5, 120), (6, 120), (7, 140), (64, 1280)])
def test_a_run_takes_in_enough_contributions_of_each_worker(workers, arrivals):
    settings = {"paces": [1.0], "workers": workers}
    assert resolve(with_fields(RunConfig(), settings)).run.arrivals == arrivals
    assert resolve(with_fields(RunConfig(), settings | {"arrivals": 7})).run.arrivals == 7


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_sizes_are_filled_in(name):
    model, preset = config_with(preset=name).model, PRESETS[name]
    assert (model.width, model.layers, model.heads, model.context) == (preset.width, preset.layers, preset.heads, preset.context)


def test_any_number_of_workers_has_the_paces_in_turn():
    assert config_with(paces=[2.5], workers=3).rounds.paces == [2.5, 2.5, 2.5]
    assert config_with(paces=[1, 2], workers=2).rounds.paces == [1, 2]
    assert config_with(paces=[1, 2, 6], workers=7).rounds.paces == [1, 2, 6, 1, 2, 6, 1]
    assert config_with(paces=[1, 2, 6], workers=2).rounds.paces == [1, 2]


# ---- recipes


def best(*, is_real: bool = False, **chosen: object) -> RunConfig:
    return config_with(**with_recipe("best", chosen, is_real=is_real))


def test_the_best_recipe_holds_where_nothing_is_chosen():
    config = best()
    assert (config.outer.method, config.outer.weight, config.outer.knobs["outer_lr"]) == ("heloco-adaptive", "discounted", 1.0)
    assert (config.rounds.assign, config.rounds.steps, config.rounds.grace) == ("flexible", "dylu", 0.025)
    inner = config.inner
    assert (inner.inner_optimizer, inner.optimizer_momentum, inner.keep_state) == ("muon", 0.9, True)
    assert (inner.second_moment, inner.lr_position, inner.lr) == ("rows", "run", 6.4e-3)


def test_what_is_chosen_comes_before_the_recipe_and_what_depends_on_it_follows():
    assert best(assign="fixed").outer.weight == "annealed"
    assert best(method="mla").outer.weight == "base"
    assert best(inner_optimizer="adamw").inner.lr == 1.5e-3
    assert best(inner_optimizer="adamw").inner.second_moment == "rows"
    for chosen in ({"keep_state": False}, {"keep_state": "false"}, {"inner_optimizer": "sgd"}):
        assert best(**chosen).inner.second_moment == ""
    assert best(is_real=True, paces=[1, 1]).inner.second_moment == ""
    external = best(is_real=True, paces=[1, 1], task="external")
    assert (external.rounds.assign, external.outer.weight) == ("fixed", "annealed")  # the data is the machines' own
    with pytest.raises(UserError, match="second_moment is about AdamW's state, and sgd has no such state"):
        best(inner_optimizer="sgd", second_moment="rows")


def test_a_recipes_own_learning_rate_holds_for_any_model():
    assert config_with(**with_recipe("paper", {"preset": "124m"})).inner.lr == 2e-4
    with pytest.raises(UserError, match="There is no recipe 'papr'; did you mean 'paper'"):
        with_recipe("papr", {})


@pytest.mark.parametrize(
    ("chosen", "lr"),
    [
        ({"preset": "1m"}, 6.4e-3),
        ({"width": 32, "heads": 2}, 6.4e-3),
        ({"preset": "60m"}, 3.2e-3),
        ({"preset": "124m"}, 2.61e-3),
        ({"preset": "124m", "inner_optimizer": "adamw"}, 6.12e-4),
        ({"inner_optimizer": "sgd"}, 1e-2),
        ({"task": "images"}, 1.5e-3),
        ({"preset": "124m", "lr": 3e-3}, 3e-3),
    ],
    ids=str,
)
def test_the_learning_rate_follows_the_optimizer_and_the_width(chosen, lr):
    assert best(**chosen).inner.lr == lr


def test_what_was_derived_from_a_setting_is_derived_again_when_that_is_overridden(tmp_path):
    (tmp_path / "config.toml").write_text(to_toml(best()))
    for chosen, lr, weight in (({"preset": "60m"}, 3.2e-3, "discounted"), ({"assign": "fixed"}, 6.4e-3, "annealed")):
        config = config_with(**read_toml(tmp_path / "config.toml", overridden=chosen) | chosen)
        assert (config.inner.lr, config.outer.weight) == (lr, weight)


def test_the_papers_recipe_is_the_papers_setting():
    config = config_with(**RECIPES["paper"])
    inner, run = config.inner, config.run
    assert (config.model.preset, config.input.tokenizer, config.model.context) == ("paper", "gpt2", 128)
    assert (inner.batch_size, inner.lr, inner.lr_min, inner.schedule_steps, inner.warmup) == (2, 2e-4, 1e-6, 4800, 0)
    assert (inner.beta1, inner.beta2, inner.weight_decay, inner.clip, inner.keep_state) == (0.9, 0.999, 0.01, 0, False)
    assert (inner.lr_position, run.arrivals, config.rounds.inner_steps) == ("shard", 300, 80)


# ---- TOML

PICKS = {
    "paces": st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6),
    "seed": st.integers(0, 2**40),
    "lr": st.floats(0, 1),
    "adam_eps": st.floats(0, 1e-3),
    "method": st.sampled_from([name for name in METHODS if name != "delayed-nesterov"]),
    "outer_lr": st.floats(0, 10),
    "data": st.text(st.characters(blacklist_categories=("Cs",)), min_size=1),
    "languages": st.lists(st.text(st.characters(blacklist_categories=("Cs",)), min_size=1), max_size=3),
    "keep_state": st.booleans(),
    "split": st.sampled_from(["source", "iid", "dirichlet"]),
    "grace": st.floats(0, 1e3),
    "norm_limit": st.one_of(st.just("off"), st.floats(1.001, 1e6)),
    "norm_policy": st.sampled_from(["clip", "refuse"]),
}


@settings(max_examples=60)
@example({"data": "".join(map(chr, range(256))), "languages": ["\u2028", "🐎", '"', "\\", "'''"]})
@example({"lr": 5e-324, "outer_lr": 1e300, "adam_eps": 1e-16, "paces": [1 / 3]})
@given(st.fixed_dictionaries({}, optional=PICKS))
def test_a_config_comes_back_from_toml_as_it_was(values):
    config = config_with(**values)
    document = tomllib.loads(to_toml(config))
    assert document.pop("effective") is True
    field_values = {name: value for section in document.values() for name, value in section.items()}
    assert with_fields(RunConfig(), field_values) == config
    assert resolve(with_fields(RunConfig(), field_values)) == config, "resolving twice is resolving once"
    assert with_fields(RunConfig(), field_values).digest() == config.digest()


def test_what_was_derived_from_an_overridden_field_is_derived_anew(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config_with(method="heloco", preset="paper", arrivals=300, inner_steps=80)))
    flags = {"method": "mla", "preset": "30m", "arrivals": 100}
    config = resolve(with_fields(RunConfig(), read_toml(path, overridden=flags) | flags))
    assert config == config_with(method="mla", preset="30m", arrivals=100, inner_steps=80)
    assert "c_ok" not in config.outer.knobs and config.model.width == 384 and config.inner.schedule_steps == 100 * 80 // 5


def test_a_users_own_file_keeps_all_it_says(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[model]\nwidth = 64\n[inner]\nschedule_steps = 7\n")
    flags = {"preset": "30m", "arrivals": 100}
    config = resolve(with_fields(RunConfig(), read_toml(path, overridden=flags) | flags))
    assert config.model.width == 64 and config.inner.schedule_steps == 7


@pytest.mark.parametrize("setting", [{"preset": "paper"}, {"data": "text"}, {"tokenizer": "gpt2"}, {"width": 64}])
def test_settings_of_the_language_task_are_refused_for_images(setting):
    with pytest.raises(UserError, match=f"{next(iter(setting))} is a setting of the language task"):
        config_with(task="images", **setting)


def test_a_file_is_read_by_section(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[rounds]\npaces = [1, 2.5]\n[outer]\nmethod = "mla"\nmomentum = 0\n[inner]\ncompile = false\n[input]\nlanguages = []'
    )
    expected = {"paces": [1, 2.5], "method": "mla", "momentum": 0, "compile": False, "languages": []}
    assert read_toml(path) == expected
    config = with_fields(RunConfig(), read_toml(path))
    assert config.rounds.paces == [1.0, 2.5] and isinstance(config.rounds.paces[0], float)
    assert config.outer.knobs["momentum"] == 0.0 and isinstance(config.outer.knobs["momentum"], float)


def test_an_empty_file_is_the_default(tmp_path):
    (tmp_path / "run.toml").write_text("")
    assert with_fields(RunConfig(), read_toml(tmp_path / "run.toml")) == RunConfig()


# ---- the norm guard


def guard_of(config: RunConfig) -> NormGuard:
    return make_guard(config.outer.norm_limit, config.outer.norm_policy)


def test_the_guard_is_on_unless_it_is_switched_off():
    assert guard_of(config_with()) == NormGuard(10.0, "clip")
    assert guard_of(config_with(norm_limit=3, norm_policy="refuse")) == NormGuard(3.0, "refuse")
    assert guard_of(config_with(norm_limit="7.5")) == NormGuard(7.5, "clip")
    assert not guard_of(config_with(norm_limit="off")).is_on
    assert not guard_of(config_with(**RECIPES["paper"])).is_on


@pytest.mark.parametrize("value", [1, 0.5, -3, float("nan"), float("inf"), "of", True])
def test_a_limit_that_is_none_is_refused_in_a_sentence(value):
    with pytest.raises(UserError, match=r"^norm_limit (is|cannot be) .*(give|or off).*\.$"):
        config_with(norm_limit=value)


def test_a_run_without_the_guard_is_known_by_the_digest_it_had_before_there_was_one():
    off = config_with(norm_limit="off")
    assert off.digest() == config_with(norm_limit="off", norm_policy="refuse").digest()
    others = {config_with().digest(), config_with(norm_limit=9).digest(), config_with(norm_policy="refuse").digest()}
    assert len(others | {off.digest()}) == 4


# ---- flags


def test_every_setting_has_a_flag_and_every_flag_its_help():
    listed = heloco("train", "--help").out
    for name in setting_sections():
        assert f"--{name.replace('_', '-')} " in listed
    for knob in knob_settings().values():
        assert knob.about.endswith(".") and " ".join(knob.about.split()[:3]) in " ".join(listed.split())
    documented = {name for kind in SECTIONS.values() for name in field_docs(kind)}
    assert set(FIELDS) <= documented, "settings without a docstring"


def test_names_are_unique_over_the_sections():
    names = [field.name for kind in SECTIONS.values() for field in fields(kind) if field.name != "knobs"]
    assert len(names) == len(set(names)) == len(FIELDS)
    assert not FIELDS.keys() & knob_settings().keys()


@pytest.mark.parametrize("name", setting_sections())
def test_a_flag_gives_what_the_file_gives(name):
    """The value as text on the command line, and as it is in a file."""
    hint = setting_types()[name]
    examples = {bool: True, int: 3, float: 0.25, str: "some text", list[float]: [1.0, 2.5], list[str]: ["a", "b"]}
    examples[float | Literal["off"]] = "off"
    [kind] = [option for option in get_args(hint) if option is not type(None)] if type(None) in get_args(hint) else [hint]
    expected = get_args(kind)[0] if get_origin(kind) is Literal else examples[kind]
    expected = "muon" if name == "inner_optimizer" else expected
    text = ",".join(map(str, expected)) if isinstance(expected, list) else str(expected)
    parsed = parser().parse_all(["train", f"--{name.replace('_', '-')}", text])
    from_flag = with_fields(RunConfig(), given_fields(parsed))
    assert by_section(from_flag)[setting_sections()[name]][name] == expected
    assert from_flag == with_fields(RunConfig(), {name: expected})


@pytest.mark.parametrize(("words", "value"), [([], True), (["true"], True), (["no"], False), (["False"], False), (["YES"], True)])
def test_a_switch_needs_no_value(words, value):
    parsed = parser().parse_all(["train", "--keep-state", *words])
    assert with_fields(RunConfig(), given_fields(parsed)).inner.keep_state is value


def test_no_flag_is_no_change():
    assert given_fields(parser().parse_all(["train"])) == {}


# ---- what cannot be


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"paces": []}, "There are no paces"),
        ({"paces": [1, -2]}, "A pace is -2.0"),
        ({"paces": [0]}, "A pace is 0.0"),
        ({"paces": [math.nan]}, "A pace is nan"),
        ({"paces": [math.inf]}, "A pace is inf"),
        ({"paces": [1e-12]}, "outside the clock's"),
        ({"paces": [1e300]}, "outside the clock's"),
        ({"workers": -1}, "workers is -1"),
        ({"inner_steps": 0}, "inner_steps is 0"),
        ({"grace": -1}, "grace is -1.0"),
        ({"grace": math.nan}, "grace is nan"),
        ({"arrivals": -1}, "arrivals is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"eval_every": -1}, "eval_every is -1"),
        ({"checkpoint_every": -1}, "checkpoint_every is -1"),
        ({"max_refusals": 0}, "max_refusals is 0"),
        ({"limit_mb": math.inf}, "limit_mb is inf"),
        ({"limit_mb": 0}, "limit_mb is 0.0"),
        ({"alpha": math.nan}, "alpha is nan"),
        ({"alpha": 0}, "alpha is 0.0"),
        ({"eval_windows": 0}, "eval_windows is 0"),
        ({"drop_above": -1}, "drop_above is -1"),
        ({"lr": math.nan}, "lr is nan"),
        ({"lr": -1}, "lr is -1.0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"beta2": 1}, "beta2 is 1.0"),
        ({"method": "heloko"}, "did you mean 'heloco'?"),
        ({"assign": "flexibel"}, "There is no shard policy 'flexibel' here; did you mean 'flexible'?"),
        ({"weight": "bass"}, "There is no arrival weight 'bass' here; did you mean 'base'?"),
        ({"task": "imagess"}, "There is no task 'imagess' here; did you mean 'images'?"),
        ({"preset": "papper"}, "did you mean 'paper'?"),
        ({"pases": [1]}, "There is no setting 'pases'; did you mean 'paces'?"),
        ({"delay": 3}, "heloco-ramp has no knob 'delay'"),
        ({"method": "mla", "k_d": 1}, "mla has no knob 'k_d'"),
        ({"weight_value": 1}, "The base weight has no weight_value"),
        ({"weight": "share", "weight_exponent": 1}, "The share weight has no weight_exponent"),
    ],
)
def test_an_impossible_value_is_a_sentence(values, says):
    with pytest.raises(UserError) as raised:
        config_with(**values)
    assert says in str(raised.value)
    assert str(raised.value).endswith((".", "?"))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("arrivals", "many", "give a whole number."),
        ("arrivals", 2.5, "give a whole number."),
        ("arrivals", 1e3, "give a whole number."),
        ("arrivals", True, "give a whole number."),
        ("lr", "fast", "give a number."),
        ("lr", True, "give a number."),
        ("lr", [1], "give a number."),
        ("lr", 10**400, "give a number."),
        ("data", 5, "give text."),
        ("data", ["a"], "give text."),
        ("keep_state", "maybe", "give true or false."),
        ("keep_state", 1, "give true or false."),
        ("lookahead", "perhaps", "give true or false."),
        ("paces", 1, "give a list such as 1,6,6."),
        ("paces", ["fast"], "give a list such as 1,6,6."),
        ("paces", [[1]], "give a list such as 1,6,6."),
        ("paces", {"a": 1}, "give a list such as 1,6,6."),
        ("paces", "1,,6", "give a list such as 1,6,6."),
        ("languages", 3, "give a list such as de,en,fr."),
        ("languages", {"de": 1}, "give a list such as de,en,fr."),
        ("assign", 3, "give text."),
        ("reorient", "rampe", "did you mean 'ramp'?"),
        ("precision", "fp8", "did you mean 'fp32'?"),
    ],
)
def test_a_value_of_another_kind_is_a_sentence(name, value, says):
    with pytest.raises(UserError) as raised:
        with_fields(RunConfig(), {name: value})
    assert str(raised.value) == f"{name} cannot be {value!r}: {says}"


def test_no_section_repeats_its_name_in_a_field():
    assert not [name for name, kind in SECTIONS.items() if name in {field.name for field in fields(kind)}]
