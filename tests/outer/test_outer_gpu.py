"""The outer step's GPU kernels: on a GPU where there is one, else on the CPU through Triton's interpreter."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from heloco.outer import MLA, DelayedNesterov, HeLoCo, Nesterov, NotFinite, kernels
from heloco.outer.correction import combine
from heloco.outer.heloco import heloco_step
from heloco.outer.kernels import portable
from heloco.outer.kernels.coefficients import coefficients
from support.equations import GROUPS, VARIANTS, Equations, assert_same, feed, grouped, momenta, pair, run
from support.gpu_blocks import DEVICE, EPS, blocks, gpu, near, parameters, random, with_state

pytestmark = [
    pytest.mark.usefixtures("triton_runs", "through_the_gpu_kernels"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),  # numpy's, about cases that are not chosen
]
only_on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU")
HALF = [torch.bfloat16, torch.float16]
SIZES = [1, 3, 0, 1000, gpu.TAIL + 1, gpu.CHUNK - 1, gpu.CHUNK, gpu.CHUNK + 1, 2 * gpu.CHUNK, 3 * gpu.CHUNK + 5]
RULE = (0.8, 0.3, 0.7, 0.9, 0.1)


def at_cosines(cosines: list[float | None], size: int = 40, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Lists θ, m and Δ of blocks with these cosines between m and Δ; None for a momentum of zeros."""
    lists: list[list[Tensor]] = [[], [], []]
    for i, cosine in enumerate(cosines):
        u, m = pair(cosine or 0.0, 0.5 + i % 3, 2.0, (size,), seed=i)
        for tensors, x in zip(lists, (random(size, i), m * (cosine is not None), u), strict=True):
            tensors.append(x.to(DEVICE, dtype))
    return [lists[0], [m.float() for m in lists[1]], lists[2]]


def copies(*lists: list[Tensor]) -> list[list[Tensor]]:
    return [[x.clone() for x in tensors] for tensors in lists]


def shifted(x: Tensor) -> Tensor:
    """The same numbers one element behind the beginning of the memory, so that they are not aligned."""
    return torch.cat([x.new_zeros(1), x])[1:]


# ---- the two passes


@pytest.mark.parametrize("u_dtype", [torch.float32, *HALF])
def test_sums_of_all_sizes_at_once(u_dtype: torch.dtype) -> None:
    p, m, u = blocks(SIZES, u=u_dtype)
    for x, y, sums in zip(u, m, gpu.BlockKernels(p, m, u).statistics(), strict=True):
        pairs = [(x, x), (y, y), (x, y)]
        exact = [math.fsum((a.double() * b.double()).tolist()) for a, b in pairs]
        assert sums == pytest.approx(exact, rel=8 * EPS, abs=8 * EPS * math.sqrt(exact[0] * exact[1]))


@pytest.mark.parametrize("u_dtype", [torch.float32, *HALF])
def test_updates_are_those_of_the_portable_kernels(u_dtype: torch.dtype) -> None:
    p, m, u = blocks(SIZES, u=u_dtype)
    q, n = copies(p, m)
    rules = [(0.8 + 0.1 * i, 0.3 * (i % 2), 0.7, 0.9, 0.1 + 0.05 * i) for i in range(len(SIZES))]
    gpu.BlockKernels(p, m, u).update(rules)
    portable.BlockKernels(q, n, u).update(rules)
    near(m, n, 4)
    near(p, q, 8)


@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_blocks_may_begin_anywhere_in_memory(which: tuple[int, ...]) -> None:
    lists = blocks(SIZES)
    expected = copies(*lists)
    portable.BlockKernels(*expected).update([RULE] * len(SIZES))
    for i in which:
        lists[i] = [shifted(x) for x in lists[i]]
    passes = gpu.BlockKernels(*lists)
    for (uu, mm, um), x, y in zip(passes.statistics(), lists[2], lists[1], strict=True):
        exact = [float((a.double() * b.double()).sum()) for a, b in ((x, x), (y, y), (x, y))]
        assert (uu, mm, um) == pytest.approx(exact, rel=8 * EPS, abs=8 * EPS * math.sqrt(exact[0] * exact[1]))
    passes.update([RULE] * len(SIZES))
    near(lists[0] + lists[1], expected[0] + expected[1], 8)


@pytest.mark.parametrize("margin", [1, 4], ids=["unaligned", "aligned"])
def test_every_element_is_updated_once_and_nothing_beyond(margin: int) -> None:
    a, b, lr, mu, gain = RULE
    g = a * 3 + b * 2
    after = mu * 2 + gain * g
    values, expected = (1.0, 2.0, 3.0), (1 - lr * (g + mu * after), after, 3.0)
    whole = [[torch.full((size + 2 * margin,), x, device=DEVICE) for size in SIZES] for x in values]
    gpu.BlockKernels(*([x[margin:-margin] for x in tensors] for tensors in whole)).update([RULE] * len(SIZES))
    for tensors, edge, inside in zip(whole, values, expected, strict=True):
        for x in tensors:
            assert bool((x[:margin] == edge).all()) and bool((x[-margin:] == edge).all())
            torch.testing.assert_close(x[margin:-margin], torch.full_like(x[margin:-margin], inside))


# ---- what the GPU decides


GROUPS_OF_CONSTANTS: list[dict[str, Any]] = [
    {},
    {"reorient": "ramp", "weigh": "before"},
    {"weigh": "before", "eps": 0.0, "kappa": 0.0, "k_d": 5.0},
    {"reorient": "ramp", "c_ok": 0.9, "c_bad": -0.9, "k_s": 4.0, "k_d": 3.0},
    {"eps": 1.7, "beta_max": 0.1},
    {"c_ok": -0.5, "c_bad": -0.6},
    {"c_ok": 2.0, "kappa": 1e300},
]
COSINES = [None, -1.0, -0.7, -1e-9, 0.0, 1e-9, 0.1, 0.1999999, 0.2000001, 0.6, 0.89, 1.0]


@pytest.mark.parametrize("weight", [1.0, 0.0, 5**-0.5, 2.5])
def test_the_gpu_comes_to_the_decisions_of_the_host(weight: float) -> None:
    """From its own sums, and to a few roundings in double precision: whatever the case, the constants and the weight."""
    p, m, u = at_cosines(COSINES * len(GROUPS_OF_CONSTANTS))
    u[3].zero_()
    rule = HeLoCo([torch.zeros(1)])
    group_coefficients = [
        rule.coefficients_of({**rule.param_groups[0], **constants}, weight) for constants in GROUPS_OF_CONSTANTS
    ]
    group_of = [i // len(COSINES) for i in range(len(p))]
    block_kernels = gpu.BlockKernels(p, m, u)
    sums, rules = block_kernels.decide(block_kernels.table(group_coefficients, group_of))
    finite, *numbers = rules.tolist()
    cases = set()
    assert finite == 1
    for i, block_sums in enumerate(sums.tolist()):
        a, b, outcome = combine(*block_sums, weight, **GROUPS_OF_CONSTANTS[group_of[i]])
        assert numbers[5 * i : 5 * i + 5] == pytest.approx([a, b, 0.7, 0.9, 1 - 0.9], rel=1e-15, abs=0)
        cases.add(outcome.case)
    assert cases == {"skipped", "kept", "damped", "turned"}


@pytest.mark.parametrize("weight", [1.0, 0.0, 5**-0.5, 2.5])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(v.values()))
def test_a_step_is_algorithms_1_and_2(variant: dict[str, Any], weight: float) -> None:
    p, m, u = at_cosines([None, -0.9, -0.1, 0.05, 0.15, 0.5, 1.0], size=gpu.TAIL + 3)
    expected_p, expected_m = [], []
    for x, y, z in zip(p, m, u, strict=True):
        block = (t.double().cpu() for t in (x, y, z))
        new_p, new_m = heloco_step(*block, weight, lr=0.7, momentum=0.9, **variant)
        expected_p.append(new_p)
        expected_m.append(new_m)
    params = parameters(p)
    optimizer = with_state(HeLoCo(params, **variant), params, m, u)
    optimizer.step(weight=weight)
    weighed_away = weight == 0 and variant["weigh"] == "before"
    assert {x.case for x in optimizer.outcomes} == ({"skipped"} if weighed_away else {"skipped", "kept", "damped", "turned"})
    near([x.cpu() for x in params], expected_p)
    near([x.cpu() for x in m], expected_m)
    moved = [float((x.detach().double() - y.double()).norm()) for x, y in zip(params, p, strict=True)]
    assert optimizer.movements == pytest.approx(moved, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("rule", [MLA, HeLoCo])
@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
def test_whole_runs_are_those_of_the_portable_kernels(rule: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    start, _, *deltas = (blocks(SIZES, dtype, dtype)[k] for k in (0, 1, 2, 2, 0))
    results: list[tuple[list[Tensor], list[Tensor], list[Any]]] = []
    for kernels_of in (gpu, portable):
        monkeypatch.setattr(kernels, "kernels_for", lambda *_, module=kernels_of: (module, None))
        params = parameters(start)
        optimizer = rule(params)
        for t, arrival in enumerate(deltas):
            feed(params, [x * (-1) ** t for x in arrival])
            optimizer.step(weight=0.7)
        results.append((params, momenta(optimizer, params), optimizer.outcomes))
    (p, m, outcomes), (q, n, expected) = results
    assert [x.case for x in outcomes] == [x.case for x in expected]
    near(m, n, 32)
    near(p, q, 4 if dtype in HALF else 32, torch.finfo(dtype).eps)


def test_every_setting_can_differ_between_groups() -> None:
    params = parameters(blocks([40, 1, 3, 1000, 5, 77])[0])
    groups = grouped(params, GROUPS)
    in_order = [p for group in groups for p in group["params"]]
    optimizer = HeLoCo(groups)
    reference = [
        Equations("heloco", p.detach().double().cpu(), **settings)
        for settings, group in zip(GROUPS, groups, strict=True)
        for p in group["params"]
    ]
    for t, rho in enumerate([1.0, 0.4, 2.0, 0.0]):
        deltas = [random(p.numel(), 10 * i + t % 2, p.dtype) * (-1) ** t for i, p in enumerate(in_order)]
        run(optimizer, in_order, [deltas], weight=rho)
        for equations, delta in zip(reference, deltas, strict=True):
            equations.arrive(delta.double().cpu(), rho)
        near([p.cpu() for p in in_order], [x.theta for x in reference], 64)
        near([m.cpu() for m in momenta(optimizer, in_order)], [x.m for x in reference], 64)
    near([x.cpu() for x in optimizer.lookahead()], [x.lookahead() for x in reference], 64)


def test_the_same_step_is_the_same_to_the_bit() -> None:
    results = []
    for _ in range(2):
        p, m, u = blocks(SIZES)
        params = parameters(p)
        optimizer = with_state(HeLoCo(params), params, m, u)
        optimizer.step()
        results.append(([x.detach() for x in params] + m, optimizer.outcomes, optimizer.movements))
    assert_same(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


# ---- what is refused


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("rule", [MLA, HeLoCo, Nesterov, DelayedNesterov])
def test_a_pseudo_gradient_that_is_not_finite_changes_nothing(rule: Any, poison: float) -> None:
    p, m, u = blocks([5, gpu.CHUNK + 7, 3, 40])
    for place in (0, gpu.CHUNK - 1, gpu.CHUNK, -1):
        params = parameters(p)
        poisoned = [u[0], u[1].clone(), *u[2:]]
        poisoned[1][place] = poison
        before = copies(m)[0]
        with pytest.raises(NotFinite, match="block 1"):
            with_state(rule(params), params, m, poisoned).step()
        assert_same([x.detach() for x in params], p)
        assert_same(m, before)


def test_after_a_refused_step_the_next_one_is_made() -> None:
    p, m, u = blocks([5, 40])
    ours, theirs = parameters(p), parameters(p)
    optimizer = with_state(HeLoCo(ours), ours, copies(m)[0], [u[0], u[1] * math.nan])
    with pytest.raises(NotFinite):
        optimizer.step()
    assert_same(run(optimizer, ours, [u]), run(with_state(HeLoCo(theirs), theirs, copies(m)[0], u), theirs, [u]))


# ---- the other rules, and the look-ahead


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_nesterov_is_torchs_sgd(weight: float) -> None:
    p, _, u = blocks(SIZES)
    ours, theirs = parameters(p), parameters(p)
    sgd = torch.optim.SGD(theirs, lr=0.7, momentum=0.9, nesterov=True)
    near(run(Nesterov(ours), ours, [u, u], weight=weight), run(sgd, theirs, [[weight * x for x in u]] * 2), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
def test_nesterov_follows_its_equations_in_every_precision(dtype: torch.dtype) -> None:
    p, _, u = blocks([40, 3, 1000], dtype, dtype)
    params = parameters(p)
    optimizer = Nesterov(params)
    reference = [Equations("nesterov", x.double().cpu()) for x in p]
    for t in range(2):
        run(optimizer, params, [u], weight=0.3)
        for equations, delta in zip(reference, u, strict=True):
            equations.arrive(delta.double().cpu(), 0.3)
        near([x.cpu() for x in params], [x.theta for x in reference], 4 * (t + 1), max(EPS, torch.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
def test_the_lookahead_of_all_blocks_at_once_is_that_of_each(dtype: torch.dtype) -> None:
    p, m, u = blocks([40, 0, 3, 1000], dtype, dtype)
    params = parameters([*p, p[3].view(20, 50).t()])
    m, u = [*m, m[3].view(20, 50).t()], [*u, u[3].view(20, 50).t()]
    optimizer = HeLoCo([{"params": params[:2]}, {"params": params[2:], "lr": 0.1}])
    assert_same(optimizer.lookahead(), [x.detach() for x in params])
    with_state(optimizer, params, m, u)
    del optimizer.state[params[0]]["momentum_buffer"]
    starts = optimizer.lookahead()
    expected = [params[0].detach().clone()]
    for x, y, ahead in zip(params[1:], m[1:], (0.7 * 0.9, 0.1 * 0.9, 0.1 * 0.9, 0.1 * 0.9), strict=True):
        expected.append((x.detach().to(torch.promote_types(x.dtype, torch.float32)) - y * ahead).to(x.dtype))
    for x, y in zip(starts, expected, strict=True):
        assert (x.dtype, x.shape, x.stride(), x.requires_grad) == (y.dtype, y.shape, y.stride(), False)
    near(starts, expected, 2, torch.finfo(dtype).eps)
    if DEVICE == "cpu":
        assert_same(starts, expected)


# ---- on a GPU alone


def on_the_device(work: Callable[[], object]) -> list[str]:
    """The kernels and copies that it launches, the second time."""
    work()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sorted(name for name in names if "#" not in name)  # what torch writes down about the optimizer itself has one


@only_on_a_gpu
def test_a_step_is_three_launches_and_waits_once() -> None:
    for count in (1, 50):
        p, m, u = blocks([1000] * count)
        params = parameters(p)
        optimizer = with_state(HeLoCo(params), params, m, u)
        table_copy, sums_copy, *launched = on_the_device(optimizer.step)
        assert table_copy.startswith("Memcpy") and sums_copy.startswith("Memcpy")  # the table, and the sums
        assert launched == ["_decide", "_update", "statistics_kernel"]


@only_on_a_gpu
def test_the_launches_wait_for_nothing() -> None:
    passes = gpu.BlockKernels(*blocks(SIZES))
    plain = coefficients()
    passes.launch(passes.table([plain], [0] * len(SIZES)))  # whatever comes into being once
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        passes.launch(passes.table([plain], [0] * len(SIZES)))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@only_on_a_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lookahead_is_a_few_launches(dtype: torch.dtype) -> None:
    p, m, u = blocks([1000] * 100, dtype, dtype)
    params = parameters(p)
    optimizer = with_state(HeLoCo(params), params, m, u)
    assert 1 <= len(on_the_device(optimizer.lookahead)) <= 12  # torch takes some dozens of blocks at once
