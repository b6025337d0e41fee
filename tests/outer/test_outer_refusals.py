"""What outer optimizers refuse: numbers that are not finite, settings and weights outside their range."""

import copy
import math
from typing import Any

import pytest
import torch

from heloco.outer import DelayedNesterov, HeLoCo, NotFinite
from support.equations import assert_same, feed, run
from support.outer_rules import RULES, arrivals, every_rule, parameters


@every_rule
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_a_pseudo_gradient_that_is_not_finite_changes_nothing(rule: str, poison: float) -> None:
    params = parameters()
    optimizer = RULES[rule](params)
    deltas = arrivals(params, 3)
    run(optimizer, params, deltas[:2])
    before, state = [p.detach().clone() for p in params], copy.deepcopy(optimizer.state_dict())
    deltas[2][5][1, 2] = poison
    feed(params, deltas[2])
    with pytest.raises(NotFinite, match="block 5"):
        optimizer.step()
    assert_same([p.detach() for p in params], before)
    for key, values in optimizer.state_dict()["state"].items():
        torch.testing.assert_close(values, state["state"][key], rtol=0, atol=0)


@every_rule
def test_after_a_refused_first_step_the_optimizer_is_as_new(rule: str) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = RULES[rule](ours)
    deltas = arrivals(ours, 2)
    bad = [x.clone() for x in deltas[0]]
    bad[0][0, 0] = math.nan
    feed(ours, bad)
    with pytest.raises(NotFinite):
        optimizer.step()
    assert_same(run(optimizer, ours, deltas), run(RULES[rule](theirs), theirs, deltas))


@every_rule
def test_numbers_too_large_to_square_are_refused(rule: str) -> None:
    params = parameters(torch.float32)
    feed(params, [torch.full_like(p, 1e30) for p in params])
    with pytest.raises(NotFinite):
        RULES[rule](params).step()


@every_rule
@pytest.mark.parametrize(
    "settings", [{"lr": x} for x in (-0.1, math.nan, math.inf)] + [{"momentum": x} for x in (-0.1, 1.0, math.nan)], ids=str
)
def test_rates_outside_their_range_are_refused_in_a_sentence(rule: str, settings: dict[str, float]) -> None:
    [(name, value)] = settings.items()
    sentence = rf"^{name} is {value!r}: .*\.$"
    with pytest.raises(ValueError, match=sentence):
        RULES[rule](parameters(), **settings)
    with pytest.raises(ValueError, match=sentence):
        RULES[rule]([{"params": parameters()}, {"params": parameters(), **settings}])
    optimizer = RULES[rule](parameters())
    with pytest.raises(ValueError, match=sentence):
        optimizer.add_param_group({"params": parameters(), **settings})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "settings", [{"delay": 0}, {"delay": -2}, {"c": -0.01}, {"delay": 4, "c": 0.26}, {"c": math.nan}], ids=str
)
def test_delays_outside_their_range_are_refused_in_a_sentence(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^(delay|c) is .*\.$"):
        DelayedNesterov(parameters(), **settings)
    with pytest.raises(ValueError, match=r"^(delay|c) is .*\.$"):
        DelayedNesterov([{"params": parameters(), **settings}])


@pytest.mark.parametrize(
    "constants",
    [
        {"reorient": "x"},
        {"weigh": "x"},
        {"c_ok": math.nan},
        {"k_s": -1.0},
        {"k_d": -1.0},
        {"kappa": -1.0},
        {"beta_max": 2.0},
        {"eps": -1.0},
        {"c_bad": 0.5},
    ],
    ids=str,
)
def test_constants_outside_their_range_are_refused_in_a_sentence(constants: dict[str, Any]) -> None:
    [name] = constants
    with pytest.raises(ValueError, match=rf"{name}.*\.$"):
        HeLoCo(parameters(), **constants)
    with pytest.raises(ValueError, match=rf"{name}.*\.$"):
        HeLoCo([{"params": parameters()}, {"params": parameters(), **constants}])
    optimizer = HeLoCo(parameters())
    with pytest.raises(ValueError, match=rf"{name}.*\.$"):
        optimizer.add_param_group({"params": parameters(), **constants})
    assert len(optimizer.param_groups) == 1


@every_rule
@pytest.mark.parametrize("weight", [-0.1, math.nan, math.inf])
def test_weights_outside_their_range_are_refused(rule: str, weight: float) -> None:
    params = parameters()
    optimizer = RULES[rule](params)
    before = [p.detach().clone() for p in params]
    feed(params, arrivals(params, 1)[0])
    with pytest.raises(ValueError, match=r"^weight is .*\.$"):
        optimizer.step(weight=weight)
    assert_same([p.detach() for p in params], before)
