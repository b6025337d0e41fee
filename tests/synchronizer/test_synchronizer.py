"""The synchronizer with real tensors: against hand-written loops, refusing by name, continuing to the bit, bounded."""

import gc
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heloco.errors import UserError
from heloco.ledger import Ledger
from heloco.methods import METHODS, get_method
from heloco.outer import MLA, DelayedNesterov, HeLoCo, Nesterov, correct
from heloco.policy import Drop, NormGuard, Standing, make_choice
from heloco.synchronizer import Arrival, Contribution, Round, Synchronizer
from support.states import through_json
from support.synchronizers import F64, SHAPES, WORKERS, build, close, initial, momenta, random_deltas, same, snapshot

ASYNC = [name for name, method in METHODS.items() if not method.barrier]


def answer(handed: Round, deltas: list[Tensor], buffers: list[Tensor] | None = None) -> Contribution:
    return Contribution(handed.worker, handed.index, handed.version, deltas, handed.buffers if buffers is None else buffers)


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
        handed = under_way[worker]
        deltas = random_deltas(draw)
        arrival = synchronizer.receive(answer(handed, deltas))
        by_hand.arrive(deltas, by_hand.weight())
        assert (arrival.verdict, arrival.arrival, arrival.outer_step) == ("applied", number, number)
        assert (arrival.worker, arrival.round, arrival.version) == (worker, order[: number - 1].count(worker), handed.version)
        assert arrival.staleness == number - 1 - handed.version
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
        close([t for handed in rounds for t in handed.parameters], [p.detach() for p in theirs] * WORKERS)
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
    for handed in rounds[:2]:
        synchronizer.receive(answer(handed, [torch.ones(shape, dtype=F64) for shape in SHAPES]))
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
    synchronizer, arrival = after_one_stale_arrival(Drop("zero", above=1))
    before = before_it()
    assert (arrival.verdict, arrival.reason) == ("zeroed", "staleness 2 is above 1")
    assert (arrival.arrival, arrival.outer_step, arrival.released) == (3, 3, (1,))
    close(momenta(synchronizer), [0.9 * m for m in momenta(before)])
    moved = [p - 0.7 * 0.9 * 0.9 * m for p, m in zip(before.parameters, momenta(before), strict=True)]
    close(synchronizer.parameters, moved)
    assert same(synchronizer.buffers, before.buffers)


def test_a_skipped_contribution_changes_neither_parameters_nor_momentum_nor_the_outer_step():
    synchronizer, arrival = after_one_stale_arrival(Drop("skip", above=1))
    before = before_it()
    assert (arrival.verdict, arrival.reason) == ("skipped", "staleness 2 is above 1")
    assert (arrival.arrival, arrival.outer_step, arrival.released) == (3, 2, (1,))
    assert same(synchronizer.parameters, before.parameters)
    assert same(momenta(synchronizer), momenta(before))
    assert same(synchronizer.buffers, before.buffers)
    assert synchronizer.dispatch(1).spans == ((10, 10),)  # its data was used up


@pytest.mark.parametrize("drop", [None, Drop("zero", above=2), Drop("skip", above=2), Drop("never", above=0)])
def test_what_is_not_above_the_limit_is_applied(drop):
    synchronizer, arrival = after_one_stale_arrival(drop)
    assert (arrival.verdict, arrival.reason, arrival.outer_step) == ("applied", "", 3)
    assert same(synchronizer.parameters, after_one_stale_arrival(None)[0].parameters)
    assert not same(synchronizer.buffers, before_it().buffers)


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
            if worker not in synchronizer.held:
                synchronizer.dispatch(worker)
        for worker in range(WORKERS):
            current_round = synchronizer.held[worker]
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
    untouched = ("outer_step", "arrivals", "steps_accepted", "arrivals_of", "gathered_workers", "outer")
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
    for handed in rounds:
        last = synchronizer.receive(answer(handed, [torch.tensor([0.4 * largest, 0.0, 0.0, 0.0])]))
    assert last.verdict == "applied" and all(p.isfinite().all() for p in synchronizer.parameters)


def test_a_refusal_under_the_barrier_leaves_the_mean_as_if_it_had_not_been():
    deltas = [[torch.full(shape, float(w), dtype=F64) for shape in SHAPES] for w in range(WORKERS)]
    results = []
    for refusals in (0, 2):
        synchronizer = build("sync-nesterov")
        rounds = [synchronizer.dispatch(worker) for worker in range(WORKERS)]
        synchronizer.receive(answer(rounds[0], deltas[0]))
        handed = rounds[1]
        for _ in range(refusals):
            refused = synchronizer.receive(answer(handed, [torch.full(shape, torch.nan, dtype=F64) for shape in SHAPES]))
            assert refused.released == (1,)
            handed = synchronizer.dispatch(1)
        synchronizer.receive(answer(handed, deltas[1]))
        assert synchronizer.receive(answer(rounds[2], deltas[2])).released == (0, 1, 2)
        results.append(synchronizer.parameters)
    assert same(*results)


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


# ---- buffers


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
    for handed, mean, counter in zip(rounds, ([3.0, 0.0], [6.0, 0.5], [9.0, 1.0]), (7, 11, 6), strict=True):
        assert synchronizer.buffers[0].tolist() == [1.0, 2.0]
        synchronizer.receive(answer(handed, deltas, [torch.tensor(mean, dtype=F64), torch.tensor(counter)]))
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
        for handed in rounds:
            assert synchronizer.receive(answer(handed, random_deltas(draw))).verdict != "refused"
    assert same(synchronizer.buffers, constants)


def test_a_buffer_that_begins_infinite_takes_the_first_finite_value():
    synchronizer = build("mla", buffers=[torch.tensor([torch.inf, 1.0])])  # a running minimum
    arrived = [torch.tensor([3.0, 4.0])]
    synchronizer.receive(answer(synchronizer.dispatch(0), [torch.ones(shape, dtype=F64) for shape in SHAPES], arrived))
    assert synchronizer.buffers[0].tolist() == pytest.approx([3.0, 2.0], rel=1e-6)


def test_a_pseudo_gradient_in_half_precision_is_added_in_the_models():
    synchronizer = build("sync-nesterov", parameters=[torch.zeros(1)], workers=3)
    rounds = [synchronizer.dispatch(worker) for worker in range(3)]
    for handed, delta in zip(rounds, (1.0, 2**-9, 2**-9), strict=True):  # beside 1 bfloat16 does not see 2⁻⁹
        synchronizer.receive(answer(handed, [torch.tensor([delta], dtype=torch.bfloat16)]))
    expected = torch.tensor([-0.7 * 1.9 * (1 + 2**-8) / 3])
    torch.testing.assert_close(synchronizer.parameters[0], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_contribution_and_the_parameters_gradients_stay_as_they_are(method):
    synchronizer = build(method, workers=2)
    own = torch.full_like(synchronizer.parameters[0], 3.0)
    synchronizer.parameters[0].grad = own.clone()
    draw = torch.Generator().manual_seed(3)
    for _ in range(3):
        for handed in [synchronizer.dispatch(worker) for worker in range(2)]:
            deltas = random_deltas(draw)
            copies = [delta.clone() for delta in deltas]
            synchronizer.receive(answer(handed, deltas))
            assert same(deltas, copies)
    grads = [p.grad for p in synchronizer.parameters]
    assert torch.equal(grads[0], own) and grads[1:] == [None] * (len(grads) - 1)


# ---- state


def drive(synchronizer: Synchronizer, draw: torch.Generator, arrivals: int) -> list[tuple[Any, ...]]:
    """The workers take turns with a limp; every eleventh contribution is bad. Returns what was made of each."""
    history = []
    while len(history) < arrivals:
        n = synchronizer.arrivals + sum(synchronizer.rounds_of)
        for worker in range(WORKERS):
            if worker not in synchronizer.held and worker not in synchronizer.waiting:
                synchronizer.dispatch(worker)
        ready = sorted(synchronizer.held)
        worker = ready[(n * n) % len(ready)]
        current_round = synchronizer.held[worker]
        deltas = random_deltas(draw)
        if n % 11 == 10:
            deltas[0][0] = torch.nan
        buffers = [torch.randn(2, generator=draw, dtype=F64), torch.tensor(n)]
        arrival = synchronizer.receive(Contribution(worker, current_round.index, current_round.version, deltas, buffers))
        history.append(
            (arrival.verdict, worker, arrival.round, arrival.version, arrival.staleness, arrival.weight, arrival.spans)
        )
    return history


@pytest.mark.parametrize("cut", [0, 1, 4, 5, 6, 13])
@pytest.mark.parametrize("method", METHODS)
def test_loaded_into_a_fresh_one_the_state_continues_to_the_bit(method, cut):
    def fresh() -> Synchronizer:
        buffers = [torch.zeros(2, dtype=F64), torch.tensor(0)]
        drop = None if METHODS[method].barrier else Drop("zero", above=4)
        return build(method, buffers=buffers, drop=drop, guard=NormGuard(1.5))

    draw = torch.Generator().manual_seed(9)
    first = fresh()
    history = drive(first, draw, cut)
    at_cut = draw.get_state()
    saved = snapshot(first)
    history += drive(first, draw, 14)

    second = fresh()
    for p in second.parameters:
        p.data.fill_(torch.nan)  # what the state does not bring would show
    second.load(through_json(saved.books), saved.tensors)
    draw.set_state(at_cut)
    assert drive(second, draw, 14) == history[cut:]
    ours, theirs = snapshot(first), snapshot(second)
    assert ours.books == theirs.books
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(tensor, theirs.tensors[name]) for name, tensor in ours.tensors.items())


def test_the_cuts_above_lie_within_a_barrier_and_within_a_delay():
    draw = torch.Generator().manual_seed(9)
    synchronizer = build("sync-nesterov", buffers=[torch.zeros(2, dtype=F64), torch.tensor(0)])
    drive(synchronizer, draw, 5)
    assert len(synchronizer.books().gathered_workers) == 2
    assert "gathered.0" in synchronizer.tensors()
    draw.manual_seed(9)
    synchronizer = build("delayed-nesterov", buffers=[torch.zeros(2, dtype=F64), torch.tensor(0)])
    drive(synchronizer, draw, 5)
    assert synchronizer.books().outer[0] == {"arrivals": 5}  # of 3: two in the sum
    assert synchronizer.tensors()["outer.0.pseudo_gradient_sum"].any()


# ---- memory


def held_bytes(thing: object) -> int:
    """The tensor memory that can be reached from an object, each storage once."""
    ids: set[int] = set()
    storages: dict[int, int] = {}
    queue = [thing]
    while queue:
        item = queue.pop()
        if id(item) in ids or isinstance(item, type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType):
            continue
        ids.add(id(item))
        if isinstance(item, Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        queue.extend(gc.get_referents(item))
    return sum(storages.values())


@pytest.mark.parametrize(("method", "copies"), [("heloco", 3), ("mla", 3), ("async-nesterov", 3), ("sync-nesterov", 4)])
@pytest.mark.parametrize("workers", [2, 50])
def test_memory_is_a_multiple_of_the_model_whatever_the_number_of_workers(method, copies, workers):
    """Parameters, momentum and one start for all; behind a barrier the sum as well. Staleness makes no difference."""
    size = 1000
    synchronizer = build(method, workers=workers, parameters=[torch.zeros(size)])

    def round_of(worker: int) -> tuple[int, int]:
        handed = synchronizer.dispatch(worker)  # the worker has the tensors; here they are let go
        return handed.index, handed.version

    under_way = {worker: round_of(worker) for worker in range(workers)}
    for worker in [*range(workers), *range(workers // 2)]:
        index, version = under_way[worker]
        arrival = synchronizer.receive(Contribution(worker, index, version, [torch.ones(size)]))
        for released in arrival.released:
            under_way[released] = round_of(released)
    assert len(synchronizer.held) == (workers if method != "sync-nesterov" else workers - workers // 2)
    assert held_bytes(synchronizer) == copies * size * 4


# ---- methods

PRESETS: dict[str, tuple[type, str, bool, dict[str, Any]]] = {
    "sync-nesterov": (Nesterov, "average", True, {"lr": 0.7, "momentum": 0.9}),
    "async-nesterov": (Nesterov, "base", False, {"lr": 0.07, "momentum": 0.9}),
    "delayed-nesterov": (DelayedNesterov, "constant", False, {"lr": 0.7, "momentum": 0.9, "delay": WORKERS, "c": 0.0}),
    "mla": (MLA, "base", False, {"lr": 0.7, "momentum": 0.9, "lookahead": False}),
    "mla-lookahead": (MLA, "base", False, {"lr": 0.7, "momentum": 0.9, "lookahead": True}),
    "heloco": (
        HeLoCo, "base", False,
        {"lr": 0.7, "momentum": 0.9, "lookahead": True, "reorient": "printed", "weigh": "after", "c_ok": 0.2, "k_s": 0.5,
         "k_d": 1.0, "kappa": 3.0, "beta_max": 0.5, "eps": 1e-8},
    ),
    "heloco-ramp": (
        HeLoCo, "base", False,
        {"lr": 0.7, "momentum": 0.9, "lookahead": True, "reorient": "ramp", "weigh": "before", "c_ok": 0.2, "k_s": 0.5,
         "k_d": 1.0, "kappa": 3.0, "beta_max": 0.5, "eps": 1e-8, "c_bad": -0.2},
    ),
    "heloco-adaptive": (
        HeLoCo, "annealed", False,
        {"lr": 1.0, "momentum": 0.9, "lookahead": True, "reorient": "ramp", "weigh": "before", "c_ok": 0.2, "k_s": 0.5,
         "k_d": 1.0, "kappa": 3.0, "beta_max": 0.5, "eps": 1e-8, "c_bad": -0.2},
    ),
}  # fmt: skip


def test_every_method_is_listed_here():
    assert PRESETS.keys() == METHODS.keys()
    assert all(METHODS[name].name == name and METHODS[name].about and METHODS[name].equation for name in METHODS)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_the_rule_the_weight_and_the_settings_of_its_paper(name):
    rule, weight, barrier, settings_ = PRESETS[name]
    method = get_method(name)
    assert (method.rule, method.weight, method.barrier) == (rule, weight, barrier)
    built = method.build(initial(), workers=WORKERS)
    assert type(built) is rule
    [group] = built.param_groups
    assert {key: group[key] for key in settings_} == settings_


@pytest.mark.parametrize("name", METHODS)
def test_a_methods_knobs_are_what_it_can_be_built_with(name):
    method = get_method(name)
    knobs = method.knobs()
    [group] = method.build(initial(), workers=5, **knobs).param_groups
    assert {key: group[key] for key in knobs} == knobs
    [group] = method.build(initial(), workers=5, lr=0.123, momentum=0.5).param_groups
    assert (group["lr"], group["momentum"]) == (0.123, 0.5)


@pytest.mark.parametrize(
    ("attempt", "sentence"),
    [
        (lambda: get_method("helco"), "There is no method 'helco' here; did you mean 'heloco'?"),
        (lambda: build("mla", k_s=1.0), "mla has no knob 'k_s'; known: lr, momentum, lookahead."),
        (lambda: build("heloco", c_okk=1.0), "heloco has no knob 'c_okk'; did you mean 'c_ok'?"),
        (lambda: build("heloco", lr=-1.0), "heloco: lr is -1.0: it must lie in [0, ∞). η, the outer learning rate."),
        (lambda: build("heloco", reorient="flat"), "heloco: reorient is 'flat': choose one of printed, ramp."),
    ],
)
def test_an_unknown_method_or_knob_is_answered_with_a_sentence(attempt: Callable[[], object], sentence):
    with pytest.raises(UserError) as error:
        attempt()
    assert str(error.value).startswith(sentence)


def trajectory(method: str, **knobs: Any) -> list[Tensor]:
    """All starts and parameters over ten arrivals of unequal workers."""
    draw = torch.Generator().manual_seed(4)
    synchronizer, tensors = build(method, **knobs), []
    for worker in range(WORKERS):
        synchronizer.dispatch(worker)
    for worker in (0, 0, 1, 0, 2, 1, 0, 0, 1, 2):
        current_round = synchronizer.held[worker]
        synchronizer.receive(Contribution(worker, current_round.index, current_round.version, random_deltas(draw)))
        tensors += [p.clone() for p in (*synchronizer.dispatch(worker).parameters, *synchronizer.parameters)]
    return tensors


def test_heloco_is_mla_with_look_ahead_and_correction():
    keep_all = {"c_ok": -1.0}
    assert same(trajectory("heloco", **keep_all), trajectory("mla-lookahead"))
    assert same(trajectory("heloco", **keep_all, lookahead=False), trajectory("mla"))
    assert same(trajectory("mla-lookahead", lookahead=False), trajectory("mla"))
    assert same(trajectory("heloco", reorient="ramp", weigh="before"), trajectory("heloco-ramp"))
    four = [trajectory("mla"), trajectory("mla-lookahead"), trajectory("heloco", lookahead=False), trajectory("heloco")]
    assert not any(same(a, b) for i, a in enumerate(four) for b in four[:i])


def test_a_weight_is_told_the_workers_share_of_the_inner_steps():
    """Two workers with rounds of 6 and 2 steps that take turns: after the arrival of each, three quarters and one quarter."""
    standings = []

    def weight(standing: Standing) -> float:
        standings.append(standing)
        return 1.0

    synchronizer = Synchronizer(
        None,
        inner_steps=[6, 2],
        windows_per_step=1,
        ledger=Ledger([1000, 1000]),
        choose_shard=make_choice("fixed", workers=2, shards=2, seed=0),
        weight=weight,
    )
    for _ in range(2):
        rounds = [synchronizer.dispatch(worker) for worker in range(2)]
        for each in rounds:
            synchronizer.receive(Contribution(each.worker, each.index, each.version))
    # one more round of each is counted: 12 of 14, 4 of 16, then 18 of 22, 6 of 24
    assert [s.step_share for s in standings] == pytest.approx([12 / 14, 4 / 16, 18 / 22, 6 / 24])
