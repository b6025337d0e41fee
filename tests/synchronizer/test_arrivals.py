"""What an arrival does to parameters and momentum: asynchronous rules against a loop written by hand, the barrier, dropping."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heloco.methods import METHODS
from heloco.outer import correct
from heloco.policy import Drop
from heloco.synchronizer import Arrival, Synchronizer
from support.synchronizers import F64, SHAPES, WORKERS, answer, build, close, initial, momenta, random_deltas, same

ASYNC = [name for name, method in METHODS.items() if not method.barrier]


# ---- asynchronous rules against a loop written by hand


class ByHand:
    """The rules of the papers, a line for a line, over lists of blocks."""

    def __init__(self, method: str, workers: int) -> None:
        self.method, self.workers = method, workers
        self.theta = initial()
        self.m = [torch.zeros_like(t) for t in self.theta]
        self.sum = [torch.zeros_like(t) for t in self.theta]
        self.t = 0
        self.lr = {"async-nesterov": 0.07, "heloco-adaptive": 1.0}.get(method, 0.7)
        self.mu = 0.9

    def start(self) -> list[Tensor]:
        looks_ahead = self.method == "mla-lookahead" or self.method.startswith("heloco")
        ahead = self.lr * self.mu if looks_ahead else 0.0
        return [p - ahead * m for p, m in zip(self.theta, self.m, strict=True)]

    def weight(self) -> float:
        return 1.0 if self.method == "delayed-nesterov" else math.sqrt(self.workers) / self.workers

    def arrive(self, deltas: list[Tensor], rho: float) -> None:
        for i, delta in enumerate(deltas):
            getattr(self, self.method.replace("-", "_"))(i, delta, rho)
        self.t += 1

    def async_nesterov(self, i: int, delta: Tensor, rho: float) -> None:
        self.m[i] = self.mu * self.m[i] + rho * delta
        self.theta[i] = self.theta[i] - self.lr * (rho * delta + self.mu * self.m[i])

    def mla(self, i: int, delta: Tensor, rho: float) -> None:
        self.m[i] = self.mu * self.m[i] + (1 - self.mu) * rho * delta
        self.theta[i] = self.theta[i] - self.lr * (rho * delta + self.mu * self.m[i])

    mla_lookahead = mla

    def heloco(self, i: int, delta: Tensor, rho: float) -> None:
        self.mla(i, correct(delta, self.m[i]), rho)

    def heloco_ramp(self, i: int, delta: Tensor, rho: float) -> None:
        self.mla(i, correct(rho * delta, self.m[i], reorient="ramp"), 1.0)

    heloco_adaptive = heloco_ramp

    def delayed_nesterov(self, i: int, delta: Tensor, rho: float) -> None:
        n = self.workers
        self.sum[i] = self.sum[i] + rho * delta
        if (self.t + 1) % n == 0:
            self.m[i] = self.mu * self.m[i] + self.sum[i] / n
            self.theta[i] = self.theta[i] - self.lr * (self.mu * self.m[i] + rho * delta / n)
            self.sum[i] = torch.zeros_like(delta)
        else:
            self.theta[i] = self.theta[i] - self.lr * (rho * delta / n)


@pytest.mark.parametrize("method", ASYNC)
@settings(max_examples=25)
@given(order=st.lists(st.integers(0, WORKERS - 1), min_size=1, max_size=25), seed=st.integers(0, 2**31))
def test_an_asynchronous_run_equals_the_loop_written_by_hand(method, order, seed):
    """Whoever arrives next is drawn: versions, staleness, weights, starts and parameters all as the papers have them."""
    draw = torch.Generator().manual_seed(seed)
    synchronizer, by_hand = build(method), ByHand(method, WORKERS)
    under_way = {worker: synchronizer.dispatch(worker) for worker in range(WORKERS)}
    for number, worker in enumerate(order, start=1):
        worker_round = under_way[worker]
        deltas = random_deltas(draw)
        arrival = synchronizer.receive(answer(worker_round, deltas))
        by_hand.arrive(deltas, by_hand.weight())
        assert (arrival.verdict, arrival.arrival, arrival.outer_step) == ("applied", number, number)
        assert (arrival.worker, arrival.round, arrival.version) == (
            worker,
            order[: number - 1].count(worker),
            worker_round.version,
        )
        assert arrival.staleness == number - 1 - worker_round.version
        assert arrival.weight == pytest.approx(by_hand.weight(), rel=1e-15)
        assert arrival.released == (worker,)
        close(synchronizer.parameters, by_hand.theta)
        close(momenta(synchronizer), by_hand.m)
        under_way[worker] = synchronizer.dispatch(worker)
        assert under_way[worker].version == number
        close(under_way[worker].parameters, by_hand.start())


@pytest.mark.parametrize("method", ASYNC)
def test_all_that_start_at_one_version_share_one_start_that_stays_as_it_was(method):
    draw = torch.Generator().manual_seed(0)
    synchronizer = build(method)
    for _ in range(3):
        synchronizer.receive(answer(synchronizer.dispatch(0), random_deltas(draw)))
    rounds = [synchronizer.dispatch(worker) for worker in range(WORKERS)]
    assert [r.version for r in rounds] == [3, 3, 3]
    assert all(a is b for r in rounds for a, b in zip(r.parameters, rounds[0].parameters, strict=True))
    before = [t.clone() for t in rounds[0].parameters]
    synchronizer.receive(answer(rounds[1], random_deltas(draw)))
    assert same(rounds[0].parameters, before)
    assert not same(synchronizer.parameters, before)
    assert not same(synchronizer.dispatch(1).parameters, before)


def test_arrivals_tell_of_each_block():
    draw = torch.Generator().manual_seed(0)
    synchronizer = build("heloco")
    first = synchronizer.receive(answer(synchronizer.dispatch(0), random_deltas(draw)))
    before = [p.clone() for p in synchronizer.parameters]
    second = synchronizer.receive(answer(synchronizer.dispatch(0), random_deltas(draw)))
    assert [o.case for o in first.outcomes] == ["skipped", "skipped"]  # no momentum yet
    assert all(o.case in ("kept", "damped", "turned") for o in second.outcomes)
    moved = [float((a - b).norm()) for a, b in zip(synchronizer.parameters, before, strict=True)]
    assert second.movements == pytest.approx(moved, rel=1e-12)


# ---- the barrier


def test_the_barrier_steps_with_the_plain_mean_as_torchs_sgd_does():
    draw = torch.Generator().manual_seed(3)
    synchronizer = build("sync-nesterov")
    theirs = [p.requires_grad_() for p in initial()]
    sgd = torch.optim.SGD(theirs, lr=0.7, momentum=0.9, nesterov=True)
    for r in range(4):
        rounds = [synchronizer.dispatch(worker) for worker in range(WORKERS)]
        close([t for worker_round in rounds for t in worker_round.parameters], [p.detach() for p in theirs] * WORKERS)
        deltas = [random_deltas(draw) for _ in rounds]
        arrivals = [synchronizer.receive(answer(rounds[w], deltas[w])) for w in (2, 0, 1)]
        for i, p in enumerate(theirs):
            p.grad = torch.stack([delta[i] for delta in deltas]).mean(0)
        sgd.step()
        close(synchronizer.parameters, [p.detach() for p in theirs])
        assert [a.verdict for a in arrivals] == ["gathered", "gathered", "applied"]
        assert [a.released for a in arrivals] == [(), (), (0, 1, 2)]
        assert [a.outer_step for a in arrivals] == [r, r, r + 1]
        assert [a.arrival for a in arrivals] == [3 * r + 1, 3 * r + 2, 3 * r + 3]
        assert [(a.staleness, a.weight) for a in arrivals] == [(0, 1 / 3)] * 3
        assert [len(a.outcomes) for a in arrivals] == [0, 0, 2]


def test_nothing_moves_while_the_barrier_is_closed():
    synchronizer = build("sync-nesterov")
    rounds = [synchronizer.dispatch(worker) for worker in range(WORKERS)]
    for worker_round in rounds[:2]:
        synchronizer.receive(answer(worker_round, [torch.ones(shape, dtype=F64) for shape in SHAPES]))
    assert same(synchronizer.parameters, initial())


# ---- dropping


def after_one_stale_arrival(drop: Drop | None) -> tuple[Synchronizer, Arrival]:
    """Two arrivals of worker 0, then worker 1 with staleness 2."""
    draw = torch.Generator().manual_seed(0)
    synchronizer = build("mla", drop=drop, buffers=[torch.zeros(2, dtype=F64)])
    stale = synchronizer.dispatch(1)
    for _ in range(2):
        synchronizer.receive(answer(synchronizer.dispatch(0), random_deltas(draw)))
    arrival = synchronizer.receive(answer(stale, random_deltas(draw), [torch.full((2,), 3.0, dtype=F64)]))
    return synchronizer, arrival


def before_it() -> Synchronizer:
    draw = torch.Generator().manual_seed(0)
    synchronizer = build("mla", buffers=[torch.zeros(2, dtype=F64)])
    for _ in range(2):
        synchronizer.receive(answer(synchronizer.dispatch(0), random_deltas(draw)))
    return synchronizer


def test_a_zeroed_contribution_lets_the_momentum_decay_and_move_the_parameters():
    synchronizer, arrival = after_one_stale_arrival(Drop("zero", max_staleness=1))
    before = before_it()
    assert (arrival.verdict, arrival.reason) == ("zeroed", "staleness 2 is above 1")
    assert (arrival.arrival, arrival.outer_step, arrival.released) == (3, 3, (1,))
    close(momenta(synchronizer), [0.9 * m for m in momenta(before)])
    moved = [p - 0.7 * 0.9 * 0.9 * m for p, m in zip(before.parameters, momenta(before), strict=True)]
    close(synchronizer.parameters, moved)
    assert same(synchronizer.buffers, before.buffers)


def test_a_skipped_contribution_changes_neither_parameters_nor_momentum_nor_the_outer_step():
    synchronizer, arrival = after_one_stale_arrival(Drop("skip", max_staleness=1))
    before = before_it()
    assert (arrival.verdict, arrival.reason) == ("skipped", "staleness 2 is above 1")
    assert (arrival.arrival, arrival.outer_step, arrival.released) == (3, 2, (1,))
    assert same(synchronizer.parameters, before.parameters)
    assert same(momenta(synchronizer), momenta(before))
    assert same(synchronizer.buffers, before.buffers)
    assert synchronizer.dispatch(1).spans == ((10, 10),)  # its data was used up


@pytest.mark.parametrize(
    "drop", [None, Drop("zero", max_staleness=2), Drop("skip", max_staleness=2), Drop("never", max_staleness=0)]
)
def test_what_is_not_above_the_limit_is_applied(drop):
    synchronizer, arrival = after_one_stale_arrival(drop)
    assert (arrival.verdict, arrival.reason, arrival.outer_step) == ("applied", "", 3)
    assert same(synchronizer.parameters, after_one_stale_arrival(None)[0].parameters)
    assert not same(synchronizer.buffers, before_it().buffers)
