"""The compiled and the portable kernels against exact sums, which blocks they serve, and no large temporaries."""

import math
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from heloco.outer import MLA, HeLoCo, Nesterov, NotFinite
from heloco.outer.heloco import heloco_step
from heloco.outer.kernels import are_homogeneous, native, portable
from heloco.outer.kernels.order import LANES, PIECE, ROWS

ROUND = ROWS * LANES  # a piece is filled up with zeros to a multiple of it
SIZES = [0, 1, 2, 7, LANES + 1, ROUND - 1, ROUND, ROUND + 1, 9 * ROUND + 5, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5]
RULE = (0.8, 0.3, 0.7, 0.9, 0.1)
compiled = pytest.mark.skipif(not native.available, reason="the compiled kernels were not built: no C compiler at installation")
each_kernel = pytest.mark.parametrize(
    "kernels", [pytest.param(native, marks=compiled, id="native"), pytest.param(portable, id="portable")]
)
both_precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def blocks(sizes: list[int], dtype: torch.dtype, count: int = 3) -> list[list[Tensor]]:
    """`count` lists (θ, m, Δ) of blocks of these sizes."""
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(size, dtype=torch.float64, generator=generator).to(dtype) for size in sizes] for _ in range(count)]


def exact_sums(u: Tensor, m: Tensor) -> tuple[float, float, float]:
    pairs = [(u, u), (m, m), (u, m)]
    return tuple(math.fsum((x.double() * y.double()).tolist()) for x, y in pairs)  # type: ignore[return-value]


@pytest.fixture(autouse=True)
def threads() -> Iterator[Callable[[int], None]]:
    """One thread, so that a busy machine does not slow down what is small; a test may set another number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


# The same numbers


@both_precisions
@each_kernel
def test_sums_of_all_sizes_at_once(kernels: Any, dtype: torch.dtype) -> None:
    u, m = blocks(SIZES, dtype, count=2)
    few = 4 * torch.finfo(torch.float64).eps  # whatever the precision of the blocks
    for x, y, sums in zip(u, m, kernels.BlockKernels(m, m, u).statistics(), strict=True):
        exact = exact_sums(x, y)
        assert sums == pytest.approx(exact, rel=few, abs=few * math.sqrt(exact[0] * exact[1]))


@each_kernel
def test_float32_sums_over_millions_are_those_of_double(kernels: Any) -> None:
    [u], [m] = blocks([2_000_003], torch.float32, count=2)
    few = 16 * torch.finfo(torch.float64).eps
    exact = exact_sums(u, m)
    assert kernels.BlockKernels([m], [m], [u]).statistics()[0] == pytest.approx(exact, rel=few, abs=few * exact[0])


@compiled
@both_precisions
def test_every_element_is_updated_once_and_nothing_beyond(dtype: torch.dtype) -> None:
    for size in SIZES:
        p, m, u = ([torch.full((size + 2,), x, dtype=dtype)] for x in (1.0, 2.0, 3.0))
        native.BlockKernels(*([x[1:-1] for x in tensors] for tensors in (p, m, u))).update([RULE])
        a, b, lr, mu, gain = RULE
        g = a * 3 + b * 2
        after = mu * 2 + gain * g
        for [tensor], edge, inside in ((p, 1.0, 1 - lr * (g + mu * after)), (m, 2.0, after), (u, 3.0, 3.0)):
            assert tensor[0] == tensor[-1] == edge
            torch.testing.assert_close(tensor[1:-1], torch.full((size,), inside, dtype=dtype))


@both_precisions
@each_kernel
def test_not_finite_numbers_show_in_the_sums_wherever_they_stand(kernels: Any, dtype: torch.dtype) -> None:
    [u], [m] = blocks([2 * PIECE + 9], dtype, count=2)
    for place in (0, ROUND - 1, PIECE, -1):
        for poison in (math.nan, math.inf, -math.inf):
            poisoned = u.clone()
            poisoned[place] = poison
            assert not math.isfinite(kernels.BlockKernels([m], [m], [poisoned]).statistics()[0][0])


# Which kernels serve which blocks


class Wrapped(Tensor):
    """A tensor subclass, as DTensor is one: its data pointer may mean nothing."""


@compiled
def test_compiled_kernels_serve_plain_contiguous_blocks() -> None:
    x = torch.ones(4, 4)
    assert native.serves(torch.nn.Parameter(x), x, x)
    assert native.serves(x.double(), x.double(), x.double())
    assert native.serves(x, x, x.bfloat16()) and native.serves(x, x, x.half())
    assert native.serves(*[torch.ones(())] * 3)
    for other in (x.double(), x[:, ::2], x.t()[:3], x.to("meta"), x.as_subclass(Wrapped)):
        for place in range(3):
            assert not native.serves(*(other if i == place else x for i in range(3)))
    assert not native.serves(*[torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)] * 3)
    assert not native.serves(x.bfloat16(), x, x) and not native.serves(x.bfloat16(), x.bfloat16(), x.bfloat16())
    assert not native.serves(x.double(), x.double(), x.half())


def test_the_first_tensor_speaks_for_plain_contiguous_ones_of_one_precision_and_device() -> None:
    x = torch.ones(3, 3)
    assert are_homogeneous([x]) and are_homogeneous([x, torch.nn.Parameter(x), torch.ones(()), torch.ones(0, 2), x[1:]])
    assert are_homogeneous([x.bfloat16(), x.bfloat16()]) and are_homogeneous([x.to("meta"), x.to("meta")])
    for other in (x.double(), x.half(), x.t()[:2], x[:, ::2], x.to("meta"), x.as_subclass(Wrapped)):
        assert not are_homogeneous([x, other]) and not are_homogeneous([other, x])
    assert not are_homogeneous([])


UNSERVED = {
    "transposed": lambda x: x.transpose(0, 1),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "subclass": lambda x: x.as_subclass(Wrapped),
}


@pytest.mark.parametrize("kind", UNSERVED)
def test_other_blocks_go_through_the_portable_kernels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", None)  # whoever calls into it now fails
    generator = torch.Generator().manual_seed(0)
    theta, m, *deltas = (UNSERVED[kind](torch.randn(3, 4, 5, 6, generator=generator)) for _ in range(5))
    p = torch.nn.Parameter(theta.clone())
    optimizer = HeLoCo([p])
    optimizer.state[p]["momentum_buffer"] = momentum = m.float().clone(memory_format=torch.preserve_format)
    expected, v = theta.double(), momentum.double()
    for delta in deltas:
        p.grad = delta
        optimizer.step()
        expected, v = heloco_step(expected, v, delta.double(), 1.0, lr=0.7, momentum=0.9)
    torch.testing.assert_close(momentum.double(), v, rtol=1e-5, atol=1e-5, check_stride=False)
    torch.testing.assert_close(p.detach().double(), expected, rtol=0, atol=1e-5, check_stride=False)


@compiled
def test_a_model_of_mixed_blocks_is_stepped_in_one_go() -> None:
    generator = torch.Generator().manual_seed(0)
    kinds = [lambda x: x, lambda x: x.bfloat16(), lambda x: x.double(), lambda x: x.t(), lambda x: x, lambda x: x.double()]
    params = [torch.nn.Parameter(kind(torch.zeros(3, 3))) for kind in kinds]
    gradients = [kind(torch.randn(3, 3, generator=generator)) for kind in kinds]
    for p, gradient in zip(params, gradients, strict=True):
        p.grad = gradient
    optimizer = MLA(params)
    optimizer.step()
    for p, gradient, outcome in zip(params, gradients, optimizer.outcomes, strict=True):
        torch.testing.assert_close(
            p.detach().float(), -0.7 * 1.09 * gradient.float(), rtol=2**-7 if p.dtype == torch.bfloat16 else 1e-6, atol=0
        )
        assert outcome.pseudo_gradient_norm == pytest.approx(float(gradient.double().norm()), rel=1e-6)


@compiled
def test_the_block_that_is_not_finite_is_named_among_mixed_blocks() -> None:
    params = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    for p in params:
        p.grad = torch.ones_like(p)
    params[1].grad = torch.full_like(params[1], math.nan)
    with pytest.raises(NotFinite, match="block 1"):
        HeLoCo(params).step()
    assert all(bool((p == 1).all()) for p in params)


# Memory

BLOCK = 2_000_000  # elements


def largest_temporary(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the largest tensor that a step allocates, or of all that Python and numpy do if that is more."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        optimizer.step()
    events = profile.profiler.kineto_results.events()
    largest = max((event.nbytes() for event in events if event.name() == "[memory]"), default=0)
    tracemalloc.start()
    optimizer.step()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return int(max(largest, peak))


def optimizer_over_one_large_block(rule: Any, dtype: torch.dtype, **settings: Any) -> torch.optim.Optimizer:
    p = torch.nn.Parameter(torch.full((BLOCK,), 1.0, dtype=dtype))
    p.grad = torch.full((BLOCK,), -1.0, dtype=dtype)
    optimizer = rule([p], **settings)
    optimizer.state[p]["momentum_buffer"] = torch.full((BLOCK,), 1.0)
    return optimizer


@pytest.mark.parametrize("kind", ["compiled", "portable", "bfloat16"])
@pytest.mark.parametrize("rule", [HeLoCo, MLA])
def test_no_temporary_grows_with_the_block(rule: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "portable":
        monkeypatch.setattr(native, "available", False)
    optimizer = optimizer_over_one_large_block(rule, torch.bfloat16 if kind == "bfloat16" else torch.float32)
    optimizer.step()  # whatever comes into being once
    assert largest_temporary(optimizer) <= 4 * 8 * PIECE < BLOCK


def test_the_measurement_would_see_a_temporary() -> None:
    optimizer = optimizer_over_one_large_block(Nesterov, torch.float32, fused=False)
    assert largest_temporary(optimizer) == 4 * BLOCK  # torch's unfused SGD makes one
