"""What an outer optimizer keeps and tells: the start of a round, precision and saved state, outcomes and movements."""

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

from heloco.outer import HeLoCo
from support.equations import F64, assert_near, assert_same, momenta, run
from support.outer_rules import RULES, WEIGHTS, arrivals, every_rule, parameters

# What a worker starts from


@every_rule
def test_lookahead_before_the_first_step_is_the_model(rule: str) -> None:
    params = parameters()
    assert_same(RULES[rule](params).lookahead(), [p.detach() for p in params])


def test_lookahead_is_eta_mu_m_ahead_in_each_group() -> None:
    params = parameters()
    optimizer = HeLoCo(
        [{"params": params[:3]}, {"params": params[3:5], "lr": 0.1, "momentum": 0.5}, {"params": params[5:], "lookahead": False}]
    )
    run(optimizer, params, arrivals(params, 2))
    ahead = [0.7 * 0.9] * 3 + [0.1 * 0.5] * 2 + [0.0] * 3
    m = momenta(optimizer, params)
    assert_near(optimizer.lookahead(), [p.detach() - x * y for p, x, y in zip(params, ahead, m, strict=True)])


@pytest.mark.parametrize("lookahead", [True, False])
def test_lookahead_returns_tensors_of_its_own(lookahead: bool) -> None:
    params = parameters()
    optimizer = HeLoCo(params, lookahead=lookahead)
    before = run(optimizer, params, arrivals(params, 2))
    m = [x.clone() for x in momenta(optimizer, params)]
    for start in optimizer.lookahead():
        assert not start.requires_grad
        start.fill_(7)
    assert_same([p.detach() for p in params], before)
    assert_same(momenta(optimizer, params), m)


# Precision and saved state


@every_rule
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_momentum_is_at_least_float32_also_when_loaded(rule: str, dtype: torch.dtype) -> None:
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    params = parameters(dtype)
    optimizer = RULES[rule](params)
    run(optimizer, params, arrivals(params, 2))
    assert {m.dtype for m in momenta(optimizer, params)} == {expected}
    loaded = RULES[rule](params)
    loaded.load_state_dict(optimizer.state_dict())
    assert_same(momenta(loaded, params), momenta(optimizer, params))
    assert {x.dtype for p in params for x in loaded.state[p].values() if isinstance(x, Tensor)} == {expected}
    assert {p.dtype for p in params} == {dtype}
    assert {start.dtype for start in loaded.lookahead()} == {dtype}


@every_rule
def test_momentum_saved_in_another_precision_is_brought_to_that_of_the_model(rule: str) -> None:
    single, double = parameters(torch.float32), parameters(F64)
    optimizer, loaded = RULES[rule](single), RULES[rule](double)
    run(optimizer, single, arrivals(single, 2))
    loaded.load_state_dict(optimizer.state_dict())
    assert {m.dtype for m in momenta(loaded, double)} == {F64}
    half = RULES[rule](parameters(torch.bfloat16))
    half.load_state_dict(
        torch.optim.SGD(single, lr=0.7, momentum=0.9).state_dict()
        | {"state": {0: {"momentum_buffer": single[0].detach().bfloat16()}}}
    )
    assert momenta(half, half.param_groups[0]["params"][:1])[0].dtype == torch.float32


@pytest.mark.parametrize("rule", ["nesterov", "mla", "heloco", "delayed"])
def test_half_precision_follows_float32_up_to_the_rounding_of_the_parameters(rule: str) -> None:
    half, single = parameters(torch.bfloat16), [torch.nn.Parameter(p.detach().float()) for p in parameters(torch.bfloat16)]
    deltas = [[x.bfloat16() for x in delta] for delta in arrivals(single, 4)]
    left, right = RULES[rule](half), RULES[rule](single)
    for t, delta in enumerate(deltas, start=1):
        run(left, half, [delta])
        run(right, single, [[x.float() for x in delta]])
        for m, expected in zip(momenta(left, half), momenta(right, single), strict=True):  # no rounding to bfloat16 in m
            torch.testing.assert_close(m, expected, rtol=1e-5, atol=1e-5)
        for p, expected in zip(half, single, strict=True):  # one rounding of θ a step, |θ| < 16
            torch.testing.assert_close(p.float(), expected, rtol=0, atol=t * 16 * 2**-9)


@every_rule
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_saved_and_loaded_optimizer_goes_on_to_the_bit(rule: str, dtype: torch.dtype) -> None:
    params = parameters(dtype)
    optimizer = RULES[rule](params)
    deltas = arrivals(params, 7)
    run(optimizer, params, deltas[:4])
    file = io.BytesIO()
    torch.save({"model": [p.detach() for p in params], "outer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    others = [torch.nn.Parameter(p) for p in saved["model"]]
    other = RULES[rule](others, lr=0.1, momentum=0.1)
    other.load_state_dict(saved["outer"])
    assert_same(run(optimizer, params, deltas[4:], weight=0.4), run(other, others, deltas[4:], weight=0.4))
    assert_same(momenta(optimizer, params), momenta(other, others))
    assert other.outcomes == optimizer.outcomes
    assert other.param_groups[0]["lr"] == 0.7


@every_rule
def test_loaded_state_is_a_copy(rule: str) -> None:
    ours, theirs = parameters(), parameters()
    optimizer, loaded = RULES[rule](ours), RULES[rule](theirs)
    deltas = arrivals(ours, 4)
    run(optimizer, ours, deltas[:2])
    state = copy.deepcopy(optimizer.state_dict())
    loaded.load_state_dict(optimizer.state_dict())
    run(loaded, theirs, deltas[2:])
    for key, values in state["state"].items():
        torch.testing.assert_close(optimizer.state_dict()["state"][key], values, rtol=0, atol=0)


# What is said of a step


@every_rule
def test_movements_are_how_far_each_block_moved(rule: str) -> None:
    params = parameters()
    optimizer = RULES[rule](params)
    for deltas, rho in zip(arrivals(params, len(WEIGHTS)), WEIGHTS, strict=True):
        before = [p.detach().clone() for p in params]
        run(optimizer, params, [deltas], weight=rho)
        moved = [float((p.detach() - x).norm()) for p, x in zip(params, before, strict=True)]
        assert optimizer.movements == pytest.approx(moved, rel=1e-12, abs=1e-13)


@every_rule
def test_outcomes_hold_what_was_measured_before_the_step(rule: str) -> None:
    params = parameters()
    optimizer = RULES[rule](params)
    m = [torch.zeros_like(p) for p in params]
    for deltas in arrivals(params, 6):
        run(optimizer, params, [deltas])
        assert len(optimizer.outcomes) == len(params)
        for outcome, delta, v in zip(optimizer.outcomes, deltas, m, strict=True):
            u_norm, v_norm = float(delta.norm()), float(v.norm())
            assert (outcome.pseudo_gradient_norm, outcome.momentum_norm) == pytest.approx((u_norm, v_norm), rel=1e-14)
            if min(u_norm, v_norm) < 1e-8:
                assert outcome[:4] == ("skipped", None, None, 0.0)
                continue
            assert outcome.cosine == pytest.approx(float((delta * v).sum()) / (u_norm * v_norm), rel=1e-13, abs=1e-14)
            if rule.startswith("heloco"):
                assert outcome.confidence == pytest.approx(u_norm / (u_norm + 3 * v_norm + 1e-8), rel=1e-14)
                assert_case(outcome, "ramp" if rule == "heloco-ramp" else "printed")
            else:
                assert (outcome.case, outcome.confidence, outcome.strength) == ("kept", None, 0.0)
        m = [x.clone() for x in momenta(optimizer, params)]


def assert_case(outcome: Any, reorient: str) -> None:
    c, conf = outcome.cosine, outcome.confidence
    if c >= 0.2:
        assert (outcome.case, outcome.strength) == ("kept", 0)
    elif c < 0:
        assert (outcome.case, outcome.strength) == ("damped", pytest.approx(min(0.5 * -c * conf, 0.5), rel=1e-14))
    else:
        slope = 1 - c if reorient == "printed" else (0.2 - c) / 0.4
        assert (outcome.case, outcome.strength) == ("turned", pytest.approx(min(slope * conf, 1), rel=1e-14))
