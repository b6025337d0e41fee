"""The model's buffers under arrivals; contributions and gradients that stay as they are."""

import pytest
import torch

from heloco.methods import METHODS
from support.synchronizers import F64, SHAPES, WORKERS, answer, build, close, random_deltas, same


def test_buffers_move_by_one_over_k_and_counters_take_the_larger_value():
    synchronizer = build("mla", buffers=[torch.tensor([1.0, 2.0], dtype=F64), torch.tensor(5), torch.tensor([True, False])])
    deltas = [torch.ones(shape, dtype=F64) for shape in SHAPES]
    first, second = synchronizer.dispatch(0), synchronizer.dispatch(1)
    arrived = [torch.tensor([4.0, 2.0], dtype=F64), torch.tensor(9), torch.tensor([False, True])]
    synchronizer.receive(answer(first, deltas, arrived))
    close(synchronizer.buffers[:1], [torch.tensor([2.0, 2.0], dtype=F64)])
    assert synchronizer.buffers[1] == 9
    assert synchronizer.buffers[2].tolist() == [True, True]
    arrived = [torch.tensor([2.0, 5.0], dtype=F64), torch.tensor(7), torch.tensor([False, False])]
    synchronizer.receive(answer(second, deltas, arrived))
    close(synchronizer.buffers[:1], [torch.tensor([2.0, 3.0], dtype=F64)])
    assert synchronizer.buffers[1] == 9
    assert first.buffers[0].tolist() == [1.0, 2.0]  # a round keeps what it was handed
    close(synchronizer.dispatch(0).buffers[:1], [torch.tensor([2.0, 3.0], dtype=F64)])


def test_behind_the_barrier_buffers_are_the_workers_mean():
    synchronizer = build("sync-nesterov", buffers=[torch.tensor([1.0, 2.0], dtype=F64), torch.tensor(5)])
    deltas = [torch.ones(shape, dtype=F64) for shape in SHAPES]
    rounds = [synchronizer.dispatch(worker) for worker in range(WORKERS)]
    for worker_round, mean, counter in zip(rounds, ([3.0, 0.0], [6.0, 0.5], [9.0, 1.0]), (7, 11, 6), strict=True):
        assert synchronizer.buffers[0].tolist() == [1.0, 2.0]
        synchronizer.receive(answer(worker_round, deltas, [torch.tensor(mean, dtype=F64), torch.tensor(counter)]))
    close(synchronizer.buffers[:1], [torch.tensor([6.0, 0.5], dtype=F64)])
    assert synchronizer.buffers[1] == 11


@pytest.mark.parametrize("method", ["heloco", "sync-nesterov"])
def test_buffers_that_nobody_changes_stay_to_the_bit(method):
    """A mask of −∞, a table of sines, complex rotations: constants of the model that are buffers all the same."""
    draw = torch.Generator().manual_seed(0)
    mask = torch.full((3, 3), -torch.inf).triu(1)
    table = torch.randn(50, generator=draw)
    constants = [mask, table, torch.polar(torch.ones(50), table), torch.arange(3)]
    synchronizer = build(method, buffers=constants)
    for _ in range(5):
        rounds = [synchronizer.dispatch(worker) for worker in range(WORKERS)]
        for worker_round in rounds:
            assert synchronizer.receive(answer(worker_round, random_deltas(draw))).verdict != "refused"
    assert same(synchronizer.buffers, constants)


def test_a_buffer_that_begins_infinite_takes_the_first_finite_value():
    synchronizer = build("mla", buffers=[torch.tensor([torch.inf, 1.0])])  # a running minimum
    arrived = [torch.tensor([3.0, 4.0])]
    synchronizer.receive(answer(synchronizer.dispatch(0), [torch.ones(shape, dtype=F64) for shape in SHAPES], arrived))
    assert synchronizer.buffers[0].tolist() == pytest.approx([3.0, 2.0], rel=1e-6)


def test_a_pseudo_gradient_in_half_precision_is_added_in_the_models():
    synchronizer = build("sync-nesterov", parameters=[torch.zeros(1)], workers=3)
    rounds = [synchronizer.dispatch(worker) for worker in range(3)]
    for worker_round, delta in zip(rounds, (1.0, 2**-9, 2**-9), strict=True):  # beside 1 bfloat16 does not see 2⁻⁹
        synchronizer.receive(answer(worker_round, [torch.tensor([delta], dtype=torch.bfloat16)]))
    expected = torch.tensor([-0.7 * 1.9 * (1 + 2**-8) / 3])
    torch.testing.assert_close(synchronizer.parameters[0], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_contribution_and_the_parameters_gradients_stay_as_they_are(method):
    synchronizer = build(method, workers=2)
    gradient = torch.full_like(synchronizer.parameters[0], 3.0)
    synchronizer.parameters[0].grad = gradient.clone()
    draw = torch.Generator().manual_seed(3)
    for _ in range(3):
        for worker_round in [synchronizer.dispatch(worker) for worker in range(2)]:
            deltas = random_deltas(draw)
            copies = [delta.clone() for delta in deltas]
            synchronizer.receive(answer(worker_round, deltas))
            assert same(deltas, copies)
    grads = [p.grad for p in synchronizer.parameters]
    assert torch.equal(grads[0], gradient) and grads[1:] == [None] * (len(grads) - 1)
