"""The outer rules as torch optimizers, against the table of their equations written out in plain float64 torch."""

import copy
import io
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from heloco.outer import MLA, DelayedNesterov, HeLoCo, Nesterov, NotFinite, OuterOptimizer
from support.equations import GROUPS, VARIANTS, Equations, assert_near, assert_same, feed, grouped, momenta, pair, run

F64 = torch.float64
RULES: dict[str, Callable[..., OuterOptimizer]] = {
    "nesterov": Nesterov,
    "delayed": lambda params, **kw: DelayedNesterov(params, **{"delay": 3, "c": 0.1, **kw}),
    "mla": MLA,
    "heloco": HeLoCo,
    "heloco-ramp": lambda params, **kw: HeLoCo(params, **{"reorient": "ramp", "weigh": "before", **kw}),
}
every_rule = pytest.mark.parametrize("rule", RULES)


def parameters(dtype: torch.dtype = F64, seed: int = 0) -> list[Tensor]:
    """Blocks of many shapes and layouts."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(shape, dtype=F64, generator=generator) for shape in ((3, 4), (5,), (), (0, 2), (1,), (4, 3), (2, 3, 4, 4))
    ]
    tensors[5] = tensors[5].t()
    tensors[6] = tensors[6].to(memory_format=torch.channels_last)
    tensors.append(torch.randn(6, 8, dtype=F64, generator=generator)[:, ::2])
    return [torch.nn.Parameter(x.to(dtype)) for x in tensors]


def arrivals(params: list[Tensor], count: int, seed: int = 1) -> list[list[Tensor]]:
    """`count` pseudo-gradients like the parameters, each pointing partly where the one before pointed, or away from it."""
    generator = torch.Generator().manual_seed(seed)
    deltas: list[list[Tensor]] = []
    for t in range(count):
        deltas.append([torch.randn(p.shape, dtype=F64, generator=generator).to(p) for p in params])
        if t % 3:
            for now, last in zip(deltas[t], deltas[t - 1], strict=True):
                now.add_(last, alpha=(-0.8, 0.5)[t % 3 - 1])
    return deltas


def follow(optimizer: OuterOptimizer, params: list[Tensor], reference: list[Equations], weights: list[float]) -> set[str]:
    """Takes both through the same arrivals, comparing after each; the cases that occurred."""
    cases = set()
    for deltas, rho in zip(arrivals(params, len(weights)), weights, strict=True):
        feed(params, deltas)
        optimizer.step(weight=rho)
        for equations, delta in zip(reference, deltas, strict=True):
            equations.arrive(delta, rho)
        assert_near([p.detach() for p in params], [x.theta for x in reference])
        assert_near(momenta(optimizer, params), [x.m for x in reference])
        cases |= {outcome.case for outcome in optimizer.outcomes}
    return cases


WEIGHTS = [1.0, 1.0, 5**-0.5, 5**-0.5, 0.2, 2.0, 0.0, 1.0]


def test_mla_follows_its_equations() -> None:
    params = parameters()
    follow(MLA(params), params, [Equations("mla", p) for p in params], WEIGHTS)


@pytest.mark.parametrize(("delay", "c"), [(1, 0.0), (3, 0.0), (3, 0.1), (4, 0.25)])
def test_delayed_nesterov_follows_its_equations(delay: int, c: float) -> None:
    params = parameters()
    reference = [Equations("delayed", p, delay=delay, c=c) for p in params]
    follow(DelayedNesterov(params, delay=delay, c=c), params, reference, WEIGHTS)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(v.values()))
def test_heloco_follows_algorithms_1_and_2(variant: dict[str, Any]) -> None:
    params = parameters()
    optimizer = HeLoCo(params, **variant)
    reference = [Equations("heloco", p, **variant) for p in params]
    assert follow(optimizer, params, reference, WEIGHTS) == {"kept", "damped", "turned", "skipped"}
    assert_near(optimizer.lookahead(), [x.lookahead() for x in reference])


def test_every_setting_of_heloco_can_differ_between_groups() -> None:
    params = parameters()
    groups = grouped(params, GROUPS)
    in_order = [p for group in groups for p in group["params"]]
    reference = [Equations("heloco", p, **settings) for i, settings in enumerate(GROUPS) for p in params[i :: len(GROUPS)]]
    optimizer = HeLoCo(groups)
    follow(optimizer, in_order, reference, WEIGHTS)
    assert_near(optimizer.lookahead(), [x.lookahead() for x in reference])


def test_settings_of_the_other_rules_can_differ_between_groups() -> None:
    plain = [{"lr": 0.5, "momentum": 0.8}, {"lr": 0.1}]
    for rule, settings in (("nesterov", plain), ("mla", plain), ("delayed", [{"delay": 2, "c": 0.5}, {"delay": 3, "c": 0.0}])):
        params = parameters()
        in_order = params[::2] + params[1::2]
        reference = [Equations(rule, p, **settings[i]) for i in (0, 1) for p in params[i::2]]
        follow(RULES[rule](grouped(params, settings)), in_order, reference, WEIGHTS)


def test_a_group_added_later_gets_the_defaults() -> None:
    params = parameters()
    optimizer = HeLoCo(params[:2], reorient="ramp")
    optimizer.add_param_group({"params": params[2:], "k_d": 2.0})
    reference = [Equations("heloco", p, reorient="ramp", k_d=1.0 if i < 2 else 2.0) for i, p in enumerate(params)]
    follow(optimizer, params, reference, WEIGHTS)


def test_a_learning_rate_schedule_is_followed() -> None:
    params = parameters()
    optimizer = MLA(params, lookahead=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    reference = [Equations("mla", p) for p in params]
    for t, deltas in enumerate(arrivals(params, 4)):
        run(optimizer, params, [deltas])
        scheduler.step()
        for x, delta in zip(reference, deltas, strict=True):
            x.lr = 0.7 * 0.5**t
            x.arrive(delta)
            x.lr = 0.7 * 0.5 ** (t + 1)
        assert_near([p.detach() for p in params], [x.theta for x in reference])
        assert_near(optimizer.lookahead(), [x.lookahead() for x in reference])


# Nesterov is torch's SGD


@pytest.mark.parametrize("fused", [None, True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nesterov_is_torchs_sgd_to_the_bit(fused: bool | None, dtype: torch.dtype) -> None:
    groups = [{"lr": 0.7}, {"lr": 0.07, "momentum": 0.5}]
    blocks = slice(5 if fused else None)  # torch's fused kernel is right for contiguous blocks alone
    ours, theirs = parameters(dtype)[blocks], parameters(dtype)[blocks]
    nesterov = Nesterov(grouped(ours, groups), fused=fused)
    sgd = torch.optim.SGD(grouped(theirs, groups), lr=0.7, momentum=0.9, nesterov=True, fused=fused)
    for deltas in arrivals(ours, 5):
        assert_same(run(nesterov, ours, [deltas]), run(sgd, theirs, [deltas]))
        assert_same(momenta(nesterov, ours), momenta(sgd, theirs))


@pytest.mark.parametrize("fused", [None, True, False])
def test_nesterov_follows_its_equations_however_blocks_lie_in_memory(fused: bool | None) -> None:
    params = parameters()
    follow(Nesterov(params, fused=fused), params, [Equations("nesterov", p) for p in params], WEIGHTS)


def test_weighted_nesterov_is_torchs_sgd_over_weighted_pseudo_gradients() -> None:
    ours, theirs = parameters(), parameters()
    deltas = arrivals(ours, 5)
    sgd = torch.optim.SGD(theirs, lr=0.07, momentum=0.9, nesterov=True)
    our_parameters = run(Nesterov(ours, lr=0.07), ours, deltas, weight=0.3)
    assert_same(our_parameters, run(sgd, theirs, [[0.3 * x for x in delta] for delta in deltas]))


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float64,), (torch.float32, torch.float64)], ids=str)
def test_weighted_nesterov_over_small_blocks_is_torchs_sgd_to_the_bit(
    dtypes: tuple[torch.dtype, ...], fused: bool | None
) -> None:
    """However torch goes through them: contiguous blocks all at once, in one precision or in two, with and without dimensions."""
    ours, theirs = ([p for dtype in dtypes for p in parameters(dtype)[:5]] for _ in range(2))
    nesterov, sgd = Nesterov(ours, fused=fused), torch.optim.SGD(theirs, lr=0.7, momentum=0.9, nesterov=True, foreach=False)
    for deltas in arrivals(ours, 5):
        assert_same(run(nesterov, ours, [deltas], weight=0.3), run(sgd, theirs, [[0.3 * x for x in deltas]]))
        assert_same(momenta(nesterov, ours), momenta(sgd, theirs))
        assert_same([p.grad for p in ours if p.grad is not None], deltas)  # nothing was added to what was handed in


def test_without_momentum_nesterov_and_mla_are_plain_descent() -> None:
    for rule in (Nesterov, MLA):
        ours, theirs = parameters(), parameters()
        deltas = arrivals(ours, 4)
        sgd = torch.optim.SGD(theirs, lr=0.7)
        assert_near(run(rule(ours, momentum=0.0), ours, deltas), run(sgd, theirs, deltas))


# Neutral settings


def assert_rules_agree(
    left: Callable[..., OuterOptimizer], right: Callable[..., OuterOptimizer], check: Any = assert_same
) -> None:
    """Both rules do the same to parameters, momentum and what a worker starts from, over weighted arrivals."""
    ours, theirs = parameters(), parameters()
    first, second = left(ours), right(theirs)
    for deltas, rho in zip(arrivals(ours, len(WEIGHTS)), WEIGHTS, strict=True):
        check(run(first, ours, [deltas], weight=rho), run(second, theirs, [deltas], weight=rho))
        check(momenta(first, ours), momenta(second, theirs))
        check(first.lookahead(), second.lookahead())


def test_heloco_that_keeps_every_block_is_mla_with_lookahead() -> None:
    assert_rules_agree(lambda p: HeLoCo(p, c_ok=-1.0), lambda p: MLA(p, lookahead=True))


@pytest.mark.parametrize("constants", [{"k_s": 0.0, "k_d": 0.0}, {"beta_max": 0.0, "k_d": 0.0}, {"kappa": 1e300}], ids=str)
def test_heloco_without_strength_is_mla_with_lookahead(constants: dict[str, float]) -> None:
    for variant in VARIANTS:
        assert_rules_agree(lambda p, v=variant: HeLoCo(p, **v, **constants), lambda p: MLA(p, lookahead=True), assert_near)


def test_with_beta_max_zero_only_turning_remains() -> None:
    params = parameters()
    optimizer = HeLoCo(params, beta_max=0.0)
    follow(optimizer, params, [Equations("heloco", p, beta_max=0.0) for p in params], WEIGHTS)
    assert {x.strength for x in optimizer.outcomes if x.case == "damped"} == {0.0}


def test_lookahead_changes_the_dispatch_and_not_the_step() -> None:
    for rule in (HeLoCo, MLA):
        ours, theirs = parameters(), parameters()
        deltas = arrivals(ours, 4)
        with_it, without = rule(ours, lookahead=True), rule(theirs, lookahead=False)
        assert_same(run(with_it, ours, deltas), run(without, theirs, deltas))
        assert_same(without.lookahead(), [p.detach() for p in theirs])
        assert not torch.equal(with_it.lookahead()[0], ours[0])


def test_without_momentum_heloco_corrects_against_the_last_update_alone() -> None:
    params = parameters()
    optimizer = HeLoCo(params, momentum=0.0)
    assert "damped" in follow(optimizer, params, [Equations("heloco", p, momentum=0.0) for p in params], WEIGHTS)
    assert_same(optimizer.lookahead(), [p.detach() for p in params])


@every_rule
def test_weight_one_is_no_weight(rule: str) -> None:
    ours, theirs = parameters(), parameters()
    deltas = arrivals(ours, 4)
    assert_same(run(RULES[rule](ours), ours, deltas, weight=1.0), run(RULES[rule](theirs), theirs, deltas))


def test_delayed_nesterov_without_delay_is_nesterov() -> None:
    """N = 1: m = βm + Δ and θ −= ε[(1 − c + c)βm + Δ], Nesterov's rule, whatever c."""
    for c in (0.0, 0.7):
        assert_rules_agree(lambda p, c=c: DelayedNesterov(p, delay=1, c=c), Nesterov, assert_near)


def test_delayed_nesterov_between_the_delays_is_plain_descent_by_a_share() -> None:
    params, plain = parameters(), parameters()
    deltas = arrivals(params, 4)
    optimizer = DelayedNesterov(params, lr=0.7, delay=5)
    assert_near(run(optimizer, params, deltas), run(torch.optim.SGD(plain, lr=0.7 / 5), plain, deltas))
    assert not any(m.any() for m in momenta(optimizer, params))


@pytest.mark.parametrize("rule", ["nesterov", "mla", "heloco", "heloco-ramp"])
def test_a_dropped_update_lets_the_momentum_decay_and_still_move_the_model(rule: str) -> None:
    params = parameters()
    optimizer = RULES[rule](params)
    first, dropped = arrivals(params, 2)
    before = run(optimizer, params, [first])
    m = [x.clone() for x in momenta(optimizer, params)]
    after = run(optimizer, params, [dropped], weight=0.0)
    assert_near(momenta(optimizer, params), [0.9 * x for x in m])
    assert_near(after, [p - 0.7 * 0.9 * 0.9 * x for p, x in zip(before, m, strict=True)])


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


# Refusals, and what is left alone


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


@every_rule
def test_parameters_without_a_pseudo_gradient_are_left_alone(rule: str) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = RULES[rule](ours)
    deltas = arrivals(ours, 3)
    for delta in deltas:
        feed(ours, delta)
        ours[0].grad = ours[6].grad = None
        optimizer.step()
    expected = run(RULES[rule](theirs[1:6]), theirs[1:6], [d[1:6] for d in deltas])
    assert_same([p.detach() for p in ours[1:6]], expected)
    assert_same([ours[0].detach(), ours[6].detach()], [theirs[0].detach(), theirs[6].detach()])
    assert not optimizer.state.get(ours[0])
    assert len(optimizer.outcomes) == len(optimizer.movements) == 6
    assert_same(optimizer.lookahead()[:1], [theirs[0].detach()])


@every_rule
def test_a_step_without_any_pseudo_gradient_does_nothing(rule: str) -> None:
    params = parameters()
    optimizer = RULES[rule](params)
    optimizer.step()
    assert_same([p.detach() for p in params], [p.detach() for p in parameters()])
    assert optimizer.outcomes == optimizer.movements == []


@every_rule
def test_the_closure_is_called_with_gradients_on_and_its_loss_returned(rule: str) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = RULES[rule](ours)

    def closure() -> float:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in ours)
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == float(sum((p.detach() ** 2).sum() for p in theirs))
    assert_same([p.detach() for p in ours], run(RULES[rule](theirs), theirs, [[2 * p.detach() for p in theirs]]))


def test_step_returns_nothing_without_a_closure_and_leaves_the_pseudo_gradient() -> None:
    params = parameters()
    [deltas] = arrivals(params, 1)
    feed(params, deltas)
    assert HeLoCo(params).step(weight=0.3) is None
    assert_same([p.grad for p in params if p.grad is not None], deltas)


@every_rule
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_pseudo_gradients_can_be_handed_over_instead(rule: str, dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    handed, fed = RULES[rule](grouped(ours, [{}, {"lr": 0.1}])), RULES[rule](grouped(theirs, [{}, {"lr": 0.1}]))
    order, calls = [p for group in handed.param_groups for p in group["params"]], []
    handed.register_step_post_hook(lambda *_: calls.append(len(calls)))
    own = torch.ones_like(ours[0])
    ours[0].grad = own.clone()
    for deltas in arrivals(ours, 4):
        before = dict(zip(ours, deltas, strict=True))
        copies = [delta.clone() for delta in deltas]
        handed.step(weight=0.6, pseudo_gradients=[before[p] for p in order])
        assert_same(deltas, copies)
        assert_same([p.detach() for p in ours], run(fed, theirs, [deltas], weight=0.6))
        assert_same(momenta(handed, ours), momenta(fed, theirs))
        assert (handed.outcomes, handed.movements) == (fed.outcomes, fed.movements)
    assert calls == [0, 1, 2, 3]  # what torch hangs on to a step goes on
    assert ours[0].grad is not None and all(p.grad is None for p in ours[1:])
    assert_same([ours[0].grad], [own])


@every_rule
def test_pseudo_gradients_are_brought_to_the_precision_of_the_parameters(rule: str) -> None:
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    handed, fed = RULES[rule](ours), RULES[rule](theirs)
    for deltas in arrivals(parameters(), 3):
        mixed = [delta.bfloat16() if i % 2 else delta for i, delta in enumerate(deltas)]
        handed.step(pseudo_gradients=mixed)
        assert_same([p.detach() for p in ours], run(fed, theirs, [[delta.float() for delta in mixed]]))


@every_rule
def test_pseudo_gradients_of_other_shapes_are_refused_and_change_nothing(rule: str) -> None:
    params = parameters()
    optimizer = RULES[rule](params)
    [deltas] = arrivals(params, 1)
    for wrong in (deltas[:-1], [*deltas, deltas[0]], [deltas[0].t(), *deltas[1:]], [deltas[0].reshape(-1), *deltas[1:]]):
        with pytest.raises(ValueError, match="of the parameters' shapes"):
            optimizer.step(pseudo_gradients=wrong)
    assert_same([p.detach() for p in params], [p.detach() for p in parameters()])
    assert not optimizer.state


@every_rule
def test_a_parameter_that_lies_otherwise_from_one_step_to_the_next_is_followed(rule: str) -> None:
    """The same tensor over other memory, and over the same memory in another order."""
    square = torch.arange(9, dtype=torch.float32).reshape(3, 3)
    ours, theirs = ([torch.nn.Parameter(square.clone()), torch.nn.Parameter(torch.ones(4))] for _ in range(2))
    left, right = RULES[rule](ours), RULES[rule](theirs, **{"fused": False} if rule == "nesterov" else {})
    for t, deltas in enumerate(arrivals(ours, 4)):
        run(left, ours, [deltas], weight=0.5)
        run(right, theirs, [deltas], weight=0.5)
        torch.testing.assert_close(ours[0].detach(), theirs[0].detach(), rtol=1e-5, atol=1e-5)
        if t == 0:
            ours[0].data = ours[0].data.clone()
        else:
            for p in (ours[0], theirs[0]):
                p.data = p.data.t() if p is ours[0] else p.data.t().contiguous()


def test_a_block_against_a_known_momentum_takes_the_printed_numbers() -> None:
    """One step by hand: Δ = (−1, 1), m = (1, 0), c = −√½, conf = √2/(√2 + 3), β = ½·√½·conf."""
    p = torch.nn.Parameter(torch.zeros(2, dtype=F64))
    optimizer = HeLoCo([p], eps=0.0)
    optimizer.state[p]["momentum_buffer"] = torch.tensor([1.0, 0.0], dtype=F64)
    run(optimizer, [p], [[torch.tensor([-1.0, 1.0], dtype=F64)]])
    beta = 0.5 * 0.5**0.5 * 2**0.5 / (2**0.5 + 3)
    g = (-1 + beta, 1.0)
    m = (0.9 + 0.1 * g[0], 0.1 * g[1])
    assert momenta(optimizer, [p])[0].tolist() == pytest.approx(m, rel=1e-15)
    assert p.tolist() == pytest.approx([-0.7 * (x + 0.9 * y) for x, y in zip(g, m, strict=True)], rel=1e-15)


def test_blocks_do_not_influence_each_other() -> None:
    """A block is corrected by its own cosine: a damped block beside a kept one leaves the kept one as in a model of its own."""
    (u, m), (v, n) = pair(-0.9, 1.0, 1.0, (6,)), pair(0.9, 1.0, 1.0, (4,))
    together = [torch.nn.Parameter(torch.zeros(6, dtype=F64)), torch.nn.Parameter(torch.zeros(4, dtype=F64))]
    alone = torch.nn.Parameter(torch.zeros(4, dtype=F64))
    both, one = HeLoCo(together), HeLoCo([alone])
    for optimizer, p, momentum in ((both, together[0], m), (both, together[1], n), (one, alone, n)):
        optimizer.state[p]["momentum_buffer"] = momentum.clone()
    moved = run(both, together, [[u, v]])
    assert [x.case for x in both.outcomes] == ["damped", "kept"]
    assert_same(moved[1:], run(one, [alone], [[v]]))


def test_an_outer_optimizer_does_not_bring_torchs_compiler_in():
    """It would take 150 MB and a second in every synchronizer."""
    script = """
import sys
import torch
from heloco.methods import METHODS
parameters = [torch.nn.Parameter(torch.ones(3))]
for method in METHODS.values():
    outer = method.build(parameters, workers=2)
    outer.step(weight=0.5, pseudo_gradients=[torch.ones(3)])
print("torch._dynamo" in sys.modules)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "False"
