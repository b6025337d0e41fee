"""Outer steps are the same to the bit on a CPU: with and without the compiled kernels, whatever the number of threads."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heloco.cluster.server.open_run import external_run
from heloco.cluster.server.replay import replay
from heloco.errors import UserError
from heloco.methods import METHODS
from heloco.outer import Nesterov, OuterOptimizer
from heloco.outer.kernels import native, portable, switch
from heloco.outer.kernels.order import LANES, PIECE, ROWS
from heloco.run import RunFolder
from heloco.wire.layout import Layout
from support.local_link import LocalLink
from support.small_cluster import config, report

ROUND = ROWS * LANES
compiled = pytest.mark.skipif(not native.available, reason="the compiled kernels are not built, or switched off")
PAIRS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float64),
    (torch.float32, torch.float64),
    (torch.float64, torch.bfloat16),
]
"""Dtypes of a block and of its pseudo-gradient."""
THREADS = (1, 2, 3, 7)
LARGE = [4 * PIECE + 3, 129, 0, 1]
edges = st.sampled_from([0, 1, LANES, ROUND - 1, ROUND, ROUND + 1, 9 * ROUND + 5, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 7])
sizes = st.lists(st.one_of(st.integers(0, 3 * ROUND), edges), min_size=1, max_size=4)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def numbers(size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Of very different lengths, so that another order of additions shows; exact, whatever the processor does."""
    draw = np.random.default_rng(seed)
    values = np.ldexp(draw.random(size) - 0.5, draw.integers(-3, 4, size))
    return torch.empty(size, dtype=dtype).copy_(torch.from_numpy(values))


def blocks(lengths: list[int], pair: tuple[torch.dtype, torch.dtype], seed: int = 0) -> tuple[list[Tensor], ...]:
    """θ, m and Δ."""
    dtypes = (pair[0], pair[0], pair[1])
    return tuple([numbers(n, dtype, seed + 1000 * k + i) for i, n in enumerate(lengths)] for k, dtype in enumerate(dtypes))


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


# ---- the two passes


@compiled
@pytest.mark.parametrize("pair", PAIRS[:4], ids=str)
@settings(max_examples=60)
@given(lengths=sizes, seed=st.integers(0, 2**20))
def test_sums_and_updates_are_those_of_the_portable_kernels(pair, lengths, seed):
    theta, m, delta = blocks(lengths, pair, seed)
    p, n = [x.clone() for x in theta], [x.clone() for x in m]
    ours, theirs = native.BlockKernels(theta, m, delta), portable.BlockKernels(p, n, delta)
    assert ours.statistics().tobytes() == theirs.statistics().tobytes()
    rules = np.random.default_rng(seed).normal(size=(len(lengths), 5))
    ours.update(rules)
    theirs.update(rules)
    assert bits(theta + m) == bits(p + n)


@compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_half_precision_is_read_as_torch_reads_it(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    every = every[every.isfinite()]
    p, m = [torch.zeros(every.numel())], [torch.zeros(every.numel())]
    native.BlockKernels(p, m, [every]).update([(1.0, 0.0, 1.0, 0.0, 1.0)])
    assert bits(m) == bits([every.float() + 0.0])  # 0·m was added: there is no −0
    assert torch.equal(p[0], -every.float())
    for strange in (torch.inf, -torch.inf, torch.nan):
        poisoned = torch.tensor([1.0, strange], dtype=dtype)
        assert not np.isfinite(native.BlockKernels([torch.zeros(2)], [torch.zeros(2)], [poisoned]).statistics()[0, 0])


def test_sums_have_no_negative_zero():
    """Its sign would depend on what was filled up with zeros."""
    for size in (1, ROUND, ROUND + 1):
        m, delta = [torch.full((size,), -0.0)], [torch.full((size,), 1.0)]
        for kernels in (native, portable) if native.available else (portable,):
            assert str(kernels.BlockKernels(m, m, delta).statistics()[0, 2]) == "0.0"


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("kernels", [pytest.param(native, marks=compiled, id="native"), pytest.param(portable, id="portable")])
def test_the_number_of_threads_does_not_show_in_any_bit_of_a_pass(kernels, pair, threads):
    if kernels is native and pair not in native.PAIRS:
        pytest.skip("served by the portable kernels")
    results = []
    for count in THREADS:
        threads(count)
        theta, m, delta = blocks(LARGE, pair)
        passes = kernels.BlockKernels(theta, m, delta)
        sums = passes.statistics().tobytes()
        passes.update([(0.8, 0.3, 0.7, 0.9, 0.1)] * len(LARGE))
        results.append((sums, *bits(theta + m)))
    assert len(set(results)) == 1


# ---- whole steps, of every rule


def steps(method: str, lengths: list[int], pair: tuple[torch.dtype, torch.dtype], arrivals: int = 4) -> list[Any]:
    """Every bit that arrivals leave behind: parameters, state, starts, and what is told of each block."""
    theta, _, _ = blocks(lengths, pair)
    parameters = [torch.nn.Parameter(x) for x in theta]
    optimizer: OuterOptimizer = METHODS[method].build(parameters, workers=2)
    traces: list[Any] = []
    for arrival in range(arrivals):
        _, _, delta = blocks(lengths, pair, seed=7 + arrival % 3)
        optimizer.step(weight=0.4, pseudo_gradients=delta)
        slices = [part.clone() for i in range(len(lengths)) for part in optimizer.lookahead_of(i)]
        state = [x for p in parameters for x in optimizer.state[p].values() if isinstance(x, Tensor)]
        traces += [bits([*parameters, *state, *optimizer.lookahead()]), b"".join(bits(slices))]
        traces += [list(optimizer.outcomes), list(optimizer.movements)]
    return traces


@pytest.mark.parametrize("pair", PAIRS[:3], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_the_number_of_threads_does_not_show_in_any_bit_of_a_step(method, pair, threads):
    results = []
    for count in THREADS:
        threads(count)
        results.append(steps(method, LARGE, pair))
    assert all(result == results[0] for result in results[1:])


@compiled
@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=4)
@given(lengths=sizes)
def test_a_step_is_the_same_with_and_without_the_compiled_kernels(method, pair, lengths):
    with_them = steps(method, lengths, pair)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "available", False)
        patch.setattr(native, "library", None)  # whoever calls into it now fails
        assert steps(method, lengths, pair) == with_them


def test_slices_of_a_start_are_the_start():
    theta, _, delta = blocks([3 * PIECE + 5, (1 << 20) + 7], PAIRS[0])
    optimizer = METHODS["heloco"].build([torch.nn.Parameter(x) for x in theta], workers=2)
    optimizer.step(pseudo_gradients=delta)
    for number, start in enumerate(optimizer.lookahead()):
        assert bits([torch.cat([part.clone() for part in optimizer.lookahead_of(number)])]) == bits([start])


PRINT_STEPS = """
import sys
sys.path.insert(0, {tests!r})
from test_bits import digest_of_steps, native
print(native.available, digest_of_steps())
"""


def digest_of_steps() -> str:
    methods = [name for name, method in METHODS.items() if method.rule is not Nesterov]  # which is torch's own
    return hashlib.sha256(repr([steps(name, LARGE, PAIRS[0]) for name in methods]).encode()).hexdigest()


def test_neither_the_processors_vectors_nor_kernels_nor_threads_show_in_any_bit():
    """`alpha=` in torch is a fused multiplication and addition where the processor has one: a start must not depend on it."""
    others = {"ATEN_CPU_CAPABILITY": "default", "HELOCO_KERNELS": "portable", "OMP_NUM_THREADS": "3"}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **others}
    script = PRINT_STEPS.format(tests=str(Path(__file__).parent))
    process = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert process.stdout.split() == ["False", digest_of_steps()]


# ---- the switch


@pytest.mark.parametrize(("value", "is_wanted"), [(None, True), ("", True), ("auto", True), ("portable", False)])
def test_the_environment_says_which_kernels_may_serve(value, is_wanted, monkeypatch):
    monkeypatch.delenv(switch.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(switch.VARIABLE, value)
    assert switch.compiled_kernels_wanted() is is_wanted


def test_another_value_is_refused_with_the_nearest(monkeypatch):
    monkeypatch.setenv(switch.VARIABLE, "portabel")
    with pytest.raises(UserError, match="HELOCO_KERNELS is 'portabel'; did you mean 'portable'"):
        switch.compiled_kernels_wanted()


# ---- a run of real machines, recorded here and replayed there


def recorded(folder: Path, method: str, dtype: torch.dtype) -> None:
    """Twelve arrivals of two machines over blocks of several pieces; every fourth is far too large."""
    model = {
        "parameter.0": numbers(70_001, dtype, 0) * 0.1,
        "parameter.1": numbers(3, dtype, 1),
        "parameter.2": numbers(5000, dtype, 2),
    }
    service = external_run(config(arrivals=12, paces=[1.0, 1.0], participation=100, method=method), folder)
    link, layout = LocalLink(service), Layout.from_tensors(model)
    tickets = [link.join(f"m{i}", returning=None, layout=layout).ticket for i in range(2)]
    link.send_model(tickets[0], layout, model, ["a", "b", "c"])
    for number in range(12):
        answer = link.next_round(tickets[number % 2], 0.0)
        scale = 50.0 if number % 4 == 3 else 1e-3
        draws = [numbers(p.numel(), dtype, 10 * number + i).float() * scale for i, p in enumerate(model.values())]
        delta = {f"pseudo_gradient.{i}": draw for i, draw in enumerate(draws)}
        link.hand_in(tickets[number % 2], answer.key, service.state.run.contribution_layout, delta, report())
    service.close()


@compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_replayed_by_other_kernels_on_other_threads(method, dtype, tmp_path, threads):
    threads(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "available", False)
        recorded(tmp_path / "portable", method, dtype)
    threads(1)
    recorded(tmp_path / "compiled", method, dtype)
    tapes = [(tmp_path / name / "tape.jsonl").read_text() for name in ("portable", "compiled")]
    lines = [[json.loads(line) for line in text.splitlines()] for text in tapes]
    assert [line["digest"] for line in lines[0]] == [line["digest"] for line in lines[1]]
    assert any("clipped" in line for line in lines[0])
    threads(3)
    assert replay(RunFolder.open(tmp_path / "portable"), None).difference is None
