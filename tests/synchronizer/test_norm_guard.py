"""The norm guard in the synchronizer: what is far too large is scaled down or refused, and nothing else is touched."""

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from heloco.engine.local import Collector, LocalRun
from heloco.errors import RunStopped
from heloco.inner.sequential import SequentialInner
from heloco.methods import METHODS
from heloco.policy import Drop, NormGuard
from heloco.rounds import Arrival, Contribution
from heloco.run import RunConfig, resolve, with_fields
from heloco.synchronizer import Synchronizer
from heloco.task.images import ImagesTask
from support.synchronizers import SHAPES, WORKERS, arrive, build, close, momenta, random_deltas, same, snapshot

CLIP, REFUSE = NormGuard(10.0, "clip"), NormGuard(10.0, "refuse")


def drawn(seed: int, times: float = 1.0) -> list[Tensor]:
    return [0.1 * times * delta for delta in random_deltas(torch.Generator().manual_seed(seed))]


def after(method: str, guard: NormGuard | None, last: list[list[Tensor]], **knobs: Any) -> tuple[Synchronizer, list[Arrival]]:
    """A run of twelve healthy contributions, then these, all in turn."""
    synchronizer = build(method, guard=guard, **knobs)
    deltas = [drawn(seed) for seed in range(12)] + last
    return synchronizer, [arrive(synchronizer, number % WORKERS, each) for number, each in enumerate(deltas)]


@pytest.mark.parametrize("method", METHODS)
def test_a_healthy_run_is_the_same_to_the_bit_with_the_guard(method):
    with_it, arrivals = after(method, CLIP, [])
    without, _ = after(method, None, [])
    assert same(with_it.parameters, without.parameters) and same(momenta(with_it), momenta(without))
    assert all((arrival.code, arrival.reason, arrival.clipped) == ("", "", 1.0) for arrival in arrivals)


@pytest.mark.parametrize("method", METHODS)
def test_an_outlier_counts_as_much_as_the_limit_allows(method):
    huge = [drawn(50, times=1e9), drawn(51), drawn(52)]
    clipped, arrivals = after(method, CLIP, huge)
    outlier = arrivals[12]
    assert outlier.verdict in ("applied", "gathered") and outlier.code == "norm" and outlier.reason.endswith(": clipped")
    assert 1e-10 < outlier.clipped < 1e-6
    assert [arrival.code for arrival in arrivals[13:]] == ["", ""]
    # The same run with a contribution that is no larger than that from the start.
    scales = clipped_scales(clipped, huge[0], method)
    smaller = [delta * scale for delta, scale in zip(huge[0], scales, strict=True)]
    expected, _ = after(method, None, [smaller, *huge[1:]])
    close(clipped.parameters, expected.parameters)
    close(momenta(clipped), momenta(expected))


def clipped_scales(synchronizer: Synchronizer, deltas: list[Tensor], method: str) -> list[float]:
    """What the guard says to an outlier behind the same history."""
    twin, _ = after(method, CLIP, [])
    current_round = twin.dispatch(0) if 0 not in twin.rounds_under_way else twin.rounds_under_way[0]
    squares = [float((delta * delta).sum()) for delta in deltas]
    judgement = twin.guard.judge(
        twin.norms, 0, squares, inner_steps=current_round.inner_steps, participants=WORKERS, model_norm=lambda: math.nan
    )
    assert synchronizer.guard == twin.guard
    return list(judgement.scales)


@pytest.mark.parametrize("method", METHODS)
def test_the_buffers_of_an_outlier_are_not_taken(method):
    synchronizer = build(method, guard=CLIP, buffers=[torch.zeros(2, dtype=torch.float64)])

    def hand_in(worker: int, times: float, buffer: float) -> Arrival:
        synchronizer.dispatch(worker)
        current_round = synchronizer.rounds_under_way[worker]
        buffers = [torch.full((2,), buffer, dtype=torch.float64)]
        return synchronizer.receive(
            Contribution(worker, current_round.index, current_round.version, drawn(worker, times), buffers)
        )

    for number in range(12):
        hand_in(number % WORKERS, 1.0, 3.0)
    before = synchronizer.buffers[0].clone()
    assert hand_in(0, 1e9, 1e15).code == "norm"
    for worker in (1, 2):
        hand_in(worker, 1.0, 3.0)
    assert bool((before <= synchronizer.buffers[0]).all()) and bool((synchronizer.buffers[0] <= 3.0).all())


@pytest.mark.parametrize("method", METHODS)
def test_a_refused_outlier_changes_nothing_but_what_is_usual(method):
    synchronizer, _ = after(method, REFUSE, [])
    for worker in range(WORKERS):
        if worker not in synchronizer.rounds_under_way and worker not in synchronizer.waiting:
            synchronizer.dispatch(worker)
    before = snapshot(synchronizer)
    arrival = arrive(synchronizer, 0, drawn(50, times=1e9))
    assert (arrival.verdict, arrival.code, arrival.released) == ("refused", "norm", (0,))
    assert "× the usual one" in arrival.reason and arrival.clipped == 1.0
    now = snapshot(synchronizer)
    changed = {name for name, tensor in before.tensors.items() if not torch.equal(now.tensors[name], tensor)}
    assert changed == {"norms"} and synchronizer.refused_in_a_row == 0


@pytest.mark.parametrize("method", METHODS)
def test_a_poisoned_block_is_clipped_and_the_others_are_not(method):
    deltas = drawn(50)
    poisoned = [deltas[0], deltas[1] * 1e15]
    synchronizer, arrivals = after(method, CLIP, [poisoned, drawn(51), drawn(52)])
    twin, _ = after(method, None, [deltas, drawn(51), drawn(52)])
    assert arrivals[12].code == "norm" and "the norm of its block 1" in arrivals[12].reason
    close(synchronizer.parameters[:1], twin.parameters[:1])
    far = [float((a - b).norm()) for a, b in zip(synchronizer.parameters, twin.parameters, strict=True)]
    assert far[1] < 30


@pytest.mark.parametrize("guard", [CLIP, REFUSE])
@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_finite_is_refused_and_not_remembered(method, guard):
    synchronizer, _ = after(method, guard, [])
    bad = drawn(3)
    bad[1][0, 0] = math.nan
    before = snapshot(synchronizer).tensors["norms"]
    arrival = arrive(synchronizer, 0, bad)
    assert (arrival.verdict, arrival.code) == ("refused", "not-finite") and synchronizer.refused_in_a_row == 1
    assert torch.equal(snapshot(synchronizer).tensors["norms"], before)


@pytest.mark.parametrize("guard", [CLIP, REFUSE])
def test_contributions_fifty_times_as_large_are_taken_as_they_are_after_three_of_each_worker(guard):
    synchronizer, _ = after("heloco", guard, [])
    arrivals = [arrive(synchronizer, number % WORKERS, drawn(number, times=50)) for number in range(8 * WORKERS)]
    assert arrivals[0].code == "norm"
    assert {arrival.code for arrival in arrivals[3 * WORKERS :]} == {""}


def test_eight_zeros_at_the_start_say_nothing():
    synchronizer = build("heloco", guard=REFUSE)
    zeros = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    assert {arrive(synchronizer, number % WORKERS, zeros).verdict for number in range(9)} == {"applied"}
    assert {arrive(synchronizer, number % WORKERS, drawn(number)).verdict for number in range(12)} == {"applied"}


@pytest.mark.parametrize("method", METHODS)
def test_the_first_contribution_may_not_be_much_larger_than_the_model(method):
    synchronizer = build(method, guard=CLIP)
    length = math.sqrt(sum(float((p * p).sum()) for p in synchronizer.parameters))
    arrival = arrive(synchronizer, 0, drawn(0, times=1e6))
    assert arrival.code == "norm" and "the model's own norm" in arrival.reason
    for worker in (1, 2):
        arrive(synchronizer, worker, [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES])
    moved = [float((a - b).norm()) for a, b in zip(synchronizer.parameters, build(method).parameters, strict=True)]
    assert math.hypot(*moved) < 20 * length


def test_an_outlier_that_is_too_stale_is_dropped_all_the_same():
    for action, verdict in (("zero", "zeroed"), ("skip", "skipped")):
        synchronizer = build("heloco", guard=CLIP, drop=Drop(action, max_staleness=5))
        for number in range(12):
            arrive(synchronizer, number % 2, drawn(number))
        arrival = arrive(synchronizer, 2, drawn(50, times=1e9))
        assert (arrival.verdict, arrival.code, arrival.clipped) == (verdict, "stale", 1.0)


def test_without_a_guard_no_norms_are_kept():
    synchronizer, _ = after("heloco", None, [])
    assert "norms" not in synchronizer.tensors()


# ---- from end to end


@pytest.fixture(scope="module")
def images() -> ImagesTask:
    return ImagesTask(seed=0, images=300, val_images=60)


def trained(images: ImagesTask, poison: Callable[[int, list[Tensor]], list[Tensor]], **settings: Any) -> tuple[float, Collector]:
    """The final loss of a run whose contributions, counted from 0, go through `poison`; and its tape."""
    values = {"paces": [1, 1, 2, 2, 2], "inner_steps": 4, "arrivals": 30, "batch_size": 16, "lr": 1e-3, "eval_every": 0}
    config = resolve(with_fields(RunConfig(), {**values, "device": "cpu", **settings}))
    collected = Collector()
    run = LocalRun(images, config, observers=[collected])
    inner = SequentialInner(images, config.inner, seed=config.run.seed, device=torch.device("cpu"))
    run.begin()
    number = 0
    while not run.advance():
        [contribution] = inner.run([run.simulation.next_needed()])
        run.simulation.give(replace(contribution, pseudo_gradient=poison(number, contribution.pseudo_gradient)))
        number += 1
    return float(collected.evals[-1].mean["loss"]), collected


def at(changes: dict[int, Callable[[list[Tensor]], list[Tensor]]]) -> Callable[[int, list[Tensor]], list[Tensor]]:
    return lambda number, deltas: changes[number](deltas) if number in changes else deltas


def healthy_alone(_: int, deltas: list[Tensor]) -> list[Tensor]:
    return deltas


def all_blocks(deltas: list[Tensor]) -> list[Tensor]:
    return [1e15 * delta for delta in deltas]


def one_block(deltas: list[Tensor]) -> list[Tensor]:
    return [1e15 * delta if i == 2 else delta for i, delta in enumerate(deltas)]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("method", "policy"), [("heloco-ramp", "clip"), ("heloco-ramp", "refuse"), ("sync-nesterov", "clip")])
def test_a_run_survives_what_would_ruin_it(method, policy, images):
    healthy, collected = trained(images, healthy_alone, method=method, norm_policy=policy)
    assert not any(line.clipped or line.code for line in collected.tape)
    loss, collected = trained(images, at({14: all_blocks, 21: one_block}), method=method, norm_policy=policy)
    assert sum(line.code == "norm" for line in collected.tape) == 2
    assert abs(loss - healthy) < 0.1


@pytest.mark.usefixtures("one_thread")
def test_without_the_guard_one_contribution_ruins_the_run(images):
    with contextlib.suppress(RunStopped):
        loss, _ = trained(images, at({14: all_blocks}), norm_limit="off")
        assert not loss < 10
