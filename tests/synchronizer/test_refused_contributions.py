"""Contributions that the synchronizer refuses by name, and those that it cannot receive: neither changes anything."""

import math

import pytest
import torch
from torch import Tensor

from heloco.methods import METHODS
from heloco.synchronizer import Contribution
from support.synchronizers import F64, SHAPES, WORKERS, answer, build, initial, random_deltas, same, snapshot

# ---- refusing

BUFFERS = (torch.tensor([1.0, 2.0], dtype=F64), torch.tensor(4))


def spoil(what: str, deltas: list[Tensor], buffers: list[Tensor]) -> tuple[list[Tensor], list[Tensor], str]:
    not_finite, shapes = (
        "the pseudo-gradient has no finite norm",
        "the pseudo-gradient does not have the model's shapes",
    )
    if what in ("nan", "inf", "-inf"):
        deltas[1][1, 2] = float(what)
        return deltas, buffers, not_finite
    if what == "a wrong shape":
        return [deltas[0], deltas[1].T], buffers, shapes
    if what == "a block too few":
        return deltas[:1], buffers, shapes
    if what == "nothing":
        return [], buffers, shapes
    if what == "no buffers":
        return deltas, [], "the buffers do not have the model's shapes"
    return deltas, [torch.tensor([1.0, torch.nan], dtype=F64), buffers[1]], "the buffers hold NaN or Inf"


FAULTS = ["nan", "inf", "-inf", "a wrong shape", "a block too few", "nothing", "no buffers", "a buffer that is NaN"]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("method", METHODS)
def test_a_bad_contribution_is_refused_by_name_and_changes_nothing(method, fault):
    draw = torch.Generator().manual_seed(0)
    synchronizer = build(method, buffers=[b.clone() for b in BUFFERS])
    while synchronizer.outer_step < 2:  # some momentum first
        for worker in range(WORKERS):
            if worker not in synchronizer.rounds_under_way:
                synchronizer.dispatch(worker)
        for worker in range(WORKERS):
            current_round = synchronizer.rounds_under_way[worker]
            buffers = [b + 1 for b in BUFFERS]
            synchronizer.receive(Contribution(worker, current_round.index, current_round.version, random_deltas(draw), buffers))
    rounds = {worker: synchronizer.dispatch(worker) for worker in range(WORKERS)}
    if METHODS[method].barrier:
        synchronizer.receive(answer(rounds[0], random_deltas(draw)))
    before = snapshot(synchronizer)
    bad = rounds[1]
    deltas, buffers, reason = spoil(fault, random_deltas(draw), [b.clone() for b in BUFFERS])
    arrival = synchronizer.receive(answer(bad, deltas, buffers))

    assert (arrival.verdict, arrival.reason, arrival.released) == ("refused", reason, (1,))
    assert (arrival.worker, arrival.round, arrival.spans, arrival.weight) == (1, bad.index, bad.spans, 0.0)
    after = snapshot(synchronizer)
    assert all(torch.equal(after.tensors[name], tensor) for name, tensor in before.tensors.items())
    assert after.tensors.keys() == before.tensors.keys()
    untouched = ("outer_step", "arrivals", "steps_of", "arrivals_of", "gathered_workers", "outer")
    assert {name: getattr(after.books, name) for name in untouched} == {name: getattr(before.books, name) for name in untouched}
    assert after.books.refused_in_a_row == 1

    retry = synchronizer.dispatch(1)  # the worker is free, and gets the same data again
    assert (retry.index, retry.version, retry.spans) == (bad.index + 1, bad.version, bad.spans)
    assert retry.shard_steps == bad.shard_steps
    assert same(retry.parameters, bad.parameters)
    good = synchronizer.receive(answer(retry, random_deltas(draw)))
    assert good.verdict == ("gathered" if METHODS[method].barrier else "applied")
    assert synchronizer.refused_in_a_row == 0


@pytest.mark.parametrize("workers", [2, 8])
def test_contributions_behind_the_barrier_that_are_finite_but_whose_sum_is_not_are_refused_one_by_one(workers):
    """Else the step with the sum would fail, when no machine is left to be told."""
    largest = math.sqrt(torch.finfo(torch.float32).max)  # a block with this norm has a square that just does not overflow
    parameters = [torch.zeros(4)]
    synchronizer = build("sync-nesterov", workers=workers, parameters=parameters)
    rounds = [synchronizer.dispatch(worker) for worker in range(workers)]
    refused = synchronizer.receive(answer(rounds[0], [torch.tensor([0.9 * largest, 0.0, 0.0, 0.0])]))
    assert (refused.verdict, refused.code) == ("refused", "not-finite")
    rounds[0] = synchronizer.dispatch(0)
    for worker_round in rounds:
        last = synchronizer.receive(answer(worker_round, [torch.tensor([0.4 * largest, 0.0, 0.0, 0.0])]))
    assert last.verdict == "applied" and all(p.isfinite().all() for p in synchronizer.parameters)


def test_a_refusal_under_the_barrier_leaves_the_mean_as_if_it_had_not_been():
    deltas = [[torch.full(shape, float(w), dtype=F64) for shape in SHAPES] for w in range(WORKERS)]
    results = []
    for refusals in (0, 2):
        synchronizer = build("sync-nesterov")
        rounds = [synchronizer.dispatch(worker) for worker in range(WORKERS)]
        synchronizer.receive(answer(rounds[0], deltas[0]))
        worker_round = rounds[1]
        for _ in range(refusals):
            refused = synchronizer.receive(answer(worker_round, [torch.full(shape, torch.nan, dtype=F64) for shape in SHAPES]))
            assert refused.released == (1,)
            worker_round = synchronizer.dispatch(1)
        synchronizer.receive(answer(worker_round, deltas[1]))
        assert synchronizer.receive(answer(rounds[2], deltas[2])).released == (0, 1, 2)
        results.append(synchronizer.parameters)
    assert same(*results)


@pytest.mark.parametrize("weight", ["base", "constant"])
def test_behind_the_barrier_a_weight_above_the_mean_leaves_less_room(weight):
    """With ρ = 1/√K or 1 the sum ΣρΔ is larger than the largest Δ, and so is what one contribution may add to it."""
    largest = math.sqrt(torch.finfo(torch.float32).max)
    synchronizer = build("sync-nesterov", workers=4, parameters=[torch.zeros(4)], weight=weight)
    arrival = synchronizer.receive(answer(synchronizer.dispatch(0), [torch.tensor([0.4 * largest, 0.0, 0.0, 0.0])]))
    assert (arrival.verdict, arrival.code) == ("refused", "not-finite")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("size", "verdict"), [(1e25, "refused"), (1e15, "applied")])
def test_numbers_too_large_to_square_are_refused_as_infinite_ones_are(method, size, verdict):
    synchronizer = build(method, parameters=[torch.zeros(4)], workers=1)
    assert synchronizer.receive(answer(synchronizer.dispatch(0), [torch.full((4,), size)])).verdict == verdict
    assert synchronizer.parameters[0].isfinite().all()
    assert synchronizer.dispatch(0).index == 1


def test_refusals_in_a_row_are_counted():
    synchronizer = build()
    nan = [torch.full(shape, torch.nan, dtype=F64) for shape in SHAPES]
    for count in (1, 2, 3):
        synchronizer.receive(answer(synchronizer.dispatch(count % WORKERS), nan))
        assert synchronizer.refused_in_a_row == count


def test_an_abandoned_rounds_data_goes_to_the_workers_next_round():
    synchronizer = build()
    lost = synchronizer.dispatch(1)
    synchronizer.abandon(1)
    retry = synchronizer.dispatch(1)
    assert (retry.index, retry.spans, retry.shard_steps) == (1, lost.spans, 0)
    assert synchronizer.dispatch(0).spans == ((0, 10),)  # another shard: not touched


# ---- what cannot be received


def test_a_worker_that_holds_a_round_gets_no_other():
    synchronizer = build()
    synchronizer.dispatch(2)
    with pytest.raises(ValueError, match="worker 2 already holds round 0"):
        synchronizer.dispatch(2)


@pytest.mark.parametrize("method", ["heloco", "sync-nesterov"])
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"index": 1}, "worker 0 handed in round 1 of version 0, but holds round 0 of version 0."),
        ({"version": 1}, "worker 0 handed in round 0 of version 1, but holds round 0 of version 0."),
        ({"worker": 1}, "worker 1 handed in round 0 of version 0, but holds none."),
        ({"worker": 99}, "worker 99 handed in round 0 of version 0, but holds none."),
    ],
)
def test_a_wrong_round_version_or_worker_raises_and_changes_nothing(method, change, sentence):
    synchronizer = build(method)
    contribution = answer(synchronizer.dispatch(0), [torch.ones(shape, dtype=F64) for shape in SHAPES])
    for name, value in change.items():
        setattr(contribution, name, value)
    before = snapshot(synchronizer)
    with pytest.raises(ValueError) as error:
        synchronizer.receive(contribution)
    assert str(error.value) == sentence
    assert snapshot(synchronizer).books == before.books
    assert same(synchronizer.parameters, initial())


@pytest.mark.parametrize("method", ["heloco", "sync-nesterov"])
def test_a_contribution_counts_once(method):
    synchronizer = build(method)
    contribution = answer(synchronizer.dispatch(0), [torch.ones(shape, dtype=F64) for shape in SHAPES])
    synchronizer.receive(contribution)
    after = [p.clone() for p in synchronizer.parameters]
    with pytest.raises(ValueError, match=r"handed in round 0 of version 0, but holds none\."):
        synchronizer.receive(contribution)
    if method == "heloco":  # nor when the worker holds its next round
        synchronizer.dispatch(0)
        with pytest.raises(ValueError, match=r"but holds round 1 of version 1\."):
            synchronizer.receive(contribution)
    assert same(synchronizer.parameters, after)
    assert synchronizer.arrivals == 1
