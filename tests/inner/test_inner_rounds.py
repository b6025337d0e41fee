"""Rounds of the inner loop do not influence each other: buffers, random numbers, data."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from heloco.inner import InnerOptions, SequentialInner
from heloco.synchronizer import Contribution
from support.inner_rounds import OPTIONS, Plain, mlp, round_for, task_of, with_dropout, with_norm
from support.synchronizers import same

pytestmark = pytest.mark.usefixtures("one_thread")


def identical(a: Contribution, b: Contribution) -> bool:
    tensors = same(a.pseudo_gradient, b.pseudo_gradient) and same(a.buffers, b.buffers)
    numbers = (a.loss, a.last_loss, a.samples, a.units) == (b.loss, b.last_loss, b.samples, b.units)
    memories = (a.memory or {}).keys() == (b.memory or {}).keys()
    return (
        tensors and numbers and memories and all(torch.equal(t, (b.memory or {})[name]) for name, t in (a.memory or {}).items())
    )


# ---- buffers


def test_batch_norms_buffers_go_both_ways():
    task = task_of(with_norm())
    inner = SequentialInner(task, OPTIONS, seed=0)
    worker_round = round_for(task, OPTIONS, steps=1)
    worker_round.buffers = [torch.full((8,), 5.0), torch.full((8,), 3.0), torch.tensor(41)]
    [ours] = inner.run([worker_round])
    with torch.no_grad():
        features = F.linear(task.batch(0, np.arange(3))[0], *worker_round.parameters[:2])
        mean, variance = features.mean(0), features.var(0)
    torch.testing.assert_close(ours.buffers[0], 0.9 * torch.full((8,), 5.0) + 0.1 * mean)
    torch.testing.assert_close(ours.buffers[1], 0.9 * torch.full((8,), 3.0) + 0.1 * variance)
    assert ours.buffers[2] == 42
    assert worker_round.buffers[0].eq(5).all()
    copies = [b.clone() for b in ours.buffers]
    inner.run([round_for(task, OPTIONS, index=1)])
    assert same(ours.buffers, copies)  # a contribution is the worker's own, whatever runs next


def test_a_model_that_was_left_in_evaluation_mode_trains_all_the_same():
    task = task_of(with_dropout())
    inner, other = SequentialInner(task, OPTIONS, seed=0), SequentialInner(task, OPTIONS, seed=0)
    other.model.eval()
    worker_round = round_for(task, OPTIONS)
    assert identical(inner.run([worker_round])[0], other.run([worker_round])[0])


# ---- randomness


@pytest.mark.parametrize("make", [mlp, with_dropout, with_norm])
def test_a_round_run_twice_gives_the_same_contribution_to_the_bit(make):
    task = task_of(make())
    options = InnerOptions(batch_size=3, lr=0.05, lr_min=0.001, schedule_steps=12, keep_state=True)
    inner = SequentialInner(task, options, seed=0)
    worker_round = round_for(task, options, worker=2, index=4)
    [first] = inner.run([worker_round])
    _, repeat = inner.run([round_for(task, options, worker=1, shard=1), worker_round])  # another round in between
    [elsewhere] = SequentialInner(task, options, seed=0).run([worker_round])
    assert identical(first, repeat)
    assert identical(first, elsewhere)


def test_dropout_depends_on_the_seed_the_worker_and_the_round_and_on_nothing_else():
    task = task_of(with_dropout())

    def deltas(*, seed: int = 0, worker: int = 0, index: int = 0, global_seed: int = 0) -> list[Tensor]:
        worker_round = round_for(task, OPTIONS)
        worker_round.worker, worker_round.index = worker, index
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(global_seed)
            return SequentialInner(task, OPTIONS, seed=seed).run([worker_round])[0].pseudo_gradient

    base = deltas()
    assert same(base, deltas(global_seed=123))
    assert not same(base, deltas(seed=1))
    assert not same(base, deltas(worker=1))
    assert not same(base, deltas(index=1))


def test_the_global_generator_is_left_as_it_was():
    task = task_of(with_dropout())
    before = torch.get_rng_state()
    SequentialInner(task, OPTIONS, seed=0).run([round_for(task, OPTIONS)])
    assert torch.equal(torch.get_rng_state(), before)


# ---- data


def test_spans_in_several_pieces_are_one_stream_of_positions():
    task = task_of(mlp())
    spans = ((40, 4), (0, 1), (61, 10))  # the last goes on into the second epoch
    worker_round = round_for(task, OPTIONS, spans=spans)
    [ours] = SequentialInner(task, OPTIONS, seed=0).run([worker_round])
    positions = [40, 41, 42, 43, 0, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70]
    assert same(ours.pseudo_gradient, Plain(task, OPTIONS).run(worker_round, positions, 0)[0])
    assert ours.samples == 15


def test_rounds_come_back_in_the_order_they_went():
    task = task_of(mlp())
    rounds = [round_for(task, OPTIONS, worker=w, index=i, shard=w) for w, i in ((1, 0), (0, 2), (1, 1))]
    contributions = SequentialInner(task, OPTIONS, seed=0).run(rounds)
    assert [(c.worker, c.index) for c in contributions] == [(1, 0), (0, 2), (1, 1)]
    alone = [SequentialInner(task, OPTIONS, seed=0).run([worker_round])[0] for worker_round in rounds]
    assert all(identical(a, b) for a, b in zip(contributions, alone, strict=True))


class Stop(Exception):
    pass


def test_what_before_step_raises_ends_the_round_and_leaves_no_trace():
    task = task_of(with_dropout())
    options = InnerOptions(batch_size=3, lr=0.05, lr_min=0.001, schedule_steps=12, keep_state=True)
    worker_round = round_for(task, options)
    [undisturbed] = SequentialInner(task, options, seed=0).run([worker_round])
    calls = []

    def before_step() -> None:
        calls.append(len(calls))
        if len(calls) == 3:
            raise Stop

    inner = SequentialInner(task, options, seed=0, before_step=before_step)
    generator = torch.get_rng_state()
    with pytest.raises(Stop):
        inner.run([worker_round])
    assert torch.equal(torch.get_rng_state(), generator)
    assert calls == [0, 1, 2]
    assert identical(inner.run([worker_round])[0], undisturbed)
    assert len(calls) == 3 + worker_round.inner_steps
