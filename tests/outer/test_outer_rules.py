"""The outer rules as torch optimizers, against the table of their equations written out in plain float64 torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from heloco.outer import MLA, DelayedNesterov, HeLoCo, Nesterov, OuterOptimizer
from support.equations import F64, GROUPS, VARIANTS, Equations, assert_near, assert_same, feed, grouped, momenta, pair, run
from support.outer_rules import RULES, WEIGHTS, arrivals, every_rule, parameters


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


# Blocks against numbers worked out by hand


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
