"""The virtual clock: whole histories, whoever computes the rounds, in whatever order, saved in between or not."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heloco.engine.simulation import Simulation
from heloco.ledger import Ledger
from heloco.methods import METHODS
from heloco.policy import make_choice, make_weight
from heloco.seeds import derive
from heloco.synchronizer import Arrival, Contribution, Round, Synchronizer
from support.states import through_json

PACES = (1.0, 2.0, 5.0)
STEPS = (2, 2, 1)


def books_only(paces=PACES, steps=STEPS, *, shards=4, arrivals=9, **options) -> Simulation:
    """A simulation of the books alone: rounds of 2, 4 and 5 s; worker 0 has two shards."""
    synchronizer = Synchronizer(
        None,
        inner_steps=steps,
        windows_per_step=3,
        ledger=Ledger([100] * shards),
        choose_shard=make_choice("fixed", workers=len(paces), shards=shards, seed=0),
        weight=make_weight("average"),
        planned_arrivals=arrivals,
    )
    return Simulation(synchronizer, paces_s=paces, arrivals=arrivals, **options)


def empty(worker_round: Round) -> Contribution:
    return Contribution(worker_round.worker, worker_round.index, worker_round.version)


# ---- the golden history


def test_golden_history():
    """Worked out by hand. (time, started, worker, round, version, staleness, shard, spans)"""
    simulation, history = books_only(), []
    while not simulation.finished:
        if (arrived := simulation.advance()) is None:
            simulation.give(empty(simulation.next_needed()))
            continue
        a, _ = arrived
        started_s = simulation.started_ns[a.worker] / 1e9
        history.append((simulation.now_s, started_s, a.worker, a.round, a.version, a.staleness, a.shard, a.spans))
    assert history == [
        (2.0, 0.0, 0, 0, 0, 0, 0, ((0, 6),)),
        (4.0, 2.0, 0, 1, 1, 0, 3, ((0, 6),)),
        (4.0, 0.0, 1, 0, 0, 2, 1, ((0, 6),)),
        (5.0, 0.0, 2, 0, 0, 3, 2, ((0, 3),)),
        (6.0, 4.0, 0, 2, 3, 1, 0, ((6, 6),)),
        (8.0, 6.0, 0, 3, 5, 0, 3, ((6, 6),)),
        (8.0, 4.0, 1, 1, 3, 3, 1, ((6, 6),)),
        (10.0, 8.0, 0, 4, 7, 0, 0, ((12, 6),)),
        (10.0, 5.0, 2, 1, 4, 4, 2, ((3, 3),)),
    ]
    assert simulation.advance() is None
    assert simulation.synchronizer.steps_accepted == 7 * 2 + 2 * 1


def test_rounds_know_how_far_their_shard_and_the_run_are():
    simulation, rounds = books_only(), []
    while not simulation.finished:
        if simulation.advance() is None and not simulation.finished:
            worker_round = simulation.next_needed()
            rounds.append((worker_round.worker, worker_round.index, worker_round.shard_steps, worker_round.progress))
            simulation.give(empty(worker_round))
    assert rounds == [
        (0, 0, 0, 0.0),
        (0, 1, 0, 1 / 9),  # another shard, so from the start; the first of nine arrivals is in
        (1, 0, 0, 0.0),
        (2, 0, 0, 0.0),
        (0, 2, 2, 3 / 9),
        (0, 3, 2, 5 / 9),
        (1, 1, 2, 3 / 9),
        (0, 4, 4, 7 / 9),
        (2, 1, 1, 4 / 9),
    ]


# ---- asking and giving


def test_needed_lists_the_rounds_under_way_the_next_to_arrive_first():
    simulation = books_only()
    assert simulation.needed() == []  # nobody has started
    assert simulation.advance() is None
    assert [(r.worker, r.index) for r in simulation.needed()] == [(0, 0), (1, 0), (2, 0)]
    assert simulation.next_needed() is simulation.needed()[0]
    simulation.give(empty(simulation.needed()[1]))
    assert [(r.worker, r.index) for r in simulation.needed()] == [(0, 0), (2, 0)]
    simulation.give(empty(simulation.needed()[0]))
    assert simulation.advance() is not None  # worker 0 at 2 s
    assert [(r.worker, r.index) for r in simulation.needed()] == [(2, 0)]
    assert simulation.advance() is None  # worker 0 started again and arrives at 4 s, before worker 1's given result
    assert [(r.worker, r.index) for r in simulation.needed()] == [(0, 1), (2, 0)]


def test_equal_arrivals_are_needed_in_the_order_of_the_workers():
    simulation = books_only(paces=(1, 1, 1), steps=(2, 2, 2))
    assert simulation.advance() is None
    assert [r.worker for r in simulation.needed()] == [0, 1, 2]


@pytest.mark.parametrize(
    ("worker", "index", "version"),
    [(0, 1, 0), (0, 0, 1), (3, 0, 0), (-1, 0, 0)],
    ids=["a later round", "another version", "nobody", "nobody at all"],
)
def test_give_refuses_what_nobody_asked_for(worker, index, version):
    simulation = books_only()
    simulation.advance()
    with pytest.raises(ValueError, match="nobody asked for round"):
        simulation.give(Contribution(worker, index, version))
    assert [r.worker for r in simulation.needed()] == [0, 1, 2]


def test_give_refuses_a_result_before_the_start_again_and_after_its_arrival():
    simulation = books_only()
    with pytest.raises(ValueError, match="nobody asked"):
        simulation.give(Contribution(0, 0, 0))
    simulation.advance()
    first = empty(simulation.next_needed())
    simulation.give(first)
    with pytest.raises(ValueError, match="nobody asked"):
        simulation.give(first)
    assert simulation.advance() is not None
    with pytest.raises(ValueError, match="nobody asked"):
        simulation.give(first)


def test_no_round_is_computed_whose_arrival_is_not_due():
    simulation, computed, arrived = books_only(arrivals=9), 0, 0
    while not simulation.finished:
        if simulation.advance() is not None:
            arrived += 1
        elif not simulation.finished:
            simulation.give(empty(simulation.next_needed()))
            computed += 1
        assert arrived <= computed <= arrived + 1
    assert (computed, arrived) == (9, 9)


# ---- with tensors: any order, saved or not

SHAPES = ((3,), (2, 2))


def training(method: str) -> Simulation:
    """A simulation with real parameters and buffers."""
    draw = torch.Generator().manual_seed(1)
    parameters = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in SHAPES]
    chosen = METHODS[method]
    synchronizer = Synchronizer(
        chosen.build(parameters, workers=3),
        inner_steps=STEPS,
        windows_per_step=3,
        ledger=Ledger([100] * 4),
        choose_shard=make_choice("flexible", workers=3, shards=4, seed=2),
        weight=make_weight(chosen.weight),
        barrier=chosen.barrier,
        buffers=[torch.zeros(2, dtype=torch.float64), torch.tensor(0)],
    )
    return Simulation(synchronizer, paces_s=PACES, arrivals=14, grace_s=0.5)


def compute(worker_round: Round) -> Contribution:
    """A stand-in for the inner loop: like it a function of what was handed, its start, its data and its memory included.
    Worker 1's third round comes to nothing."""
    draw = torch.Generator().manual_seed(derive(5, worker_round.worker, worker_round.index))
    start_sum = (worker_round.memory or {"start_sum": torch.zeros((), dtype=torch.float64)})["start_sum"] + sum(
        s for s, _ in worker_round.spans
    )
    deltas = [0.1 * p + 0.01 * start_sum + torch.randn(p.shape, generator=draw, dtype=p.dtype) for p in worker_round.parameters]
    if (worker_round.worker, worker_round.index) == (1, 2):
        deltas[0][0] = torch.nan
    buffers = [
        worker_round.buffers[0] + torch.randn(2, generator=draw, dtype=torch.float64),
        worker_round.buffers[1] + worker_round.inner_steps,
    ]
    return Contribution(
        worker_round.worker, worker_round.index, worker_round.version, deltas, buffers, memory={"start_sum": start_sum}
    )


def facts(simulation: Simulation, arrival: Arrival) -> tuple[Any, ...]:
    a = arrival
    return simulation.now_ns, a.verdict, a.worker, a.round, a.version, a.staleness, a.shard, a.spans, a.arrival, a.outer_step


def tensors_of(simulation: Simulation) -> list[Tensor]:
    state = simulation.synchronizer.tensors() | simulation.tensors()
    return [state[name].clone() for name in sorted(state)]


def finish(simulation: Simulation) -> list[tuple[Any, ...]]:
    history = []
    while not simulation.finished:
        if (arrived := simulation.advance()) is not None:
            history.append(facts(simulation, arrived[0]))
        elif not simulation.finished:
            simulation.give(compute(simulation.next_needed()))
    return history


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("method", ["heloco", "sync-nesterov"])
def test_the_case_holds_a_refusal_and_every_worker(method):
    history = finish(training(method))
    assert [event[1] for event in history].count("refused") == 1
    assert {event[2] for event in history} == {0, 1, 2}


@settings(max_examples=60)
@given(data=st.data(), method=st.sampled_from(["heloco", "delayed-nesterov", "sync-nesterov"]))
def test_results_given_early_and_in_any_order_make_the_same_history(data, method):
    expected = training(method)
    history = finish(expected)
    simulation, own_history = training(method), []
    while not simulation.finished:
        if (arrived := simulation.advance()) is not None:
            own_history.append(facts(simulation, arrived[0]))
        elif not simulation.finished:
            needed = simulation.needed()
            for worker_round in data.draw(st.permutations(needed))[: data.draw(st.integers(1, len(needed)))]:
                simulation.give(compute(worker_round))
    assert own_history == history
    assert same(tensors_of(simulation), tensors_of(expected))


def through_disk(simulation: Simulation, method: str) -> Simulation:
    """A new simulation from the state of one: plain values through JSON, tensors copied."""
    books = through_json(simulation.synchronizer.books())
    clock = through_json(simulation.clock())
    tensors = {name: tensor.clone() for name, tensor in (simulation.synchronizer.tensors() | simulation.tensors()).items()}
    loaded = training(method)
    loaded.synchronizer.load(books, tensors)
    loaded.load(clock, tensors)
    return loaded


@pytest.mark.parametrize("early", [0, 1, 3], ids=["none given", "one given", "all given"])
@pytest.mark.parametrize("stop", [0, 1, 5, 6, 7, 9, 14])
@pytest.mark.parametrize("method", ["heloco", "delayed-nesterov", "sync-nesterov"])
def test_saved_in_the_middle_it_goes_on_to_the_same_history(method, stop, early):
    expected = training(method)
    history = finish(expected)
    simulation = training(method)
    first_part = []
    while len(first_part) < stop:
        if (arrived := simulation.advance()) is not None:
            first_part.append(facts(simulation, arrived[0]))
        else:
            simulation.give(compute(simulation.next_needed()))
    if early:
        assert simulation.advance() is None  # whoever may start has started
    under_way = simulation.needed()
    for worker_round in under_way[:early]:  # given, but their time has not come
        simulation.give(compute(worker_round))
    resumed = through_disk(simulation, method)
    assert [(r.worker, r.index) for r in resumed.needed()] == [(r.worker, r.index) for r in under_way]  # the given ones again
    assert first_part + finish(resumed) == history
    assert same(tensors_of(resumed), tensors_of(expected))
    assert finish(simulation) == history[stop:]  # and saving did not disturb the one that was saved


def test_loaded_rounds_are_the_ones_that_were_under_way():
    simulation = training("heloco")
    for _ in range(6):
        while simulation.advance() is None:
            simulation.give(compute(simulation.next_needed()))
    simulation.advance()
    ours, theirs = simulation.needed(), through_disk(simulation, "heloco").needed()
    assert len(ours) == len(theirs)
    assert len({r.version for r in ours}) == 2
    for a, b in zip(ours, theirs, strict=True):
        assert (a.worker, a.index, a.version, a.shard, a.spans) == (b.worker, b.index, b.version, b.shard, b.spans)
        assert (a.inner_steps, a.shard_steps, a.progress) == (b.inner_steps, b.shard_steps, b.progress)
        assert same(a.parameters, b.parameters)
        assert same(a.buffers, b.buffers)
        assert (a.memory is None) == (b.memory is None)
        assert a.memory is None or torch.equal(a.memory["start_sum"], b.memory["start_sum"])


def test_rounds_of_one_version_are_saved_once():
    simulation = training("heloco")
    simulation.advance()
    assert len(simulation.needed()) == 3
    names = {name for name in simulation.tensors() if name.startswith("start")}
    assert names == {"start.0.0", "start.0.1", "start_buffer.0.0", "start_buffer.0.1"}


def test_a_worker_keeps_its_memory_over_a_refused_round():
    simulation, memories = training("heloco"), []
    while not simulation.finished:
        if simulation.advance() is None and not simulation.finished:
            worker_round = simulation.next_needed()
            memories.append(
                (
                    worker_round.worker,
                    worker_round.index,
                    None if worker_round.memory is None else float(worker_round.memory["start_sum"]),
                )
            )
            simulation.give(compute(worker_round))
    start_sums = [start_sum for worker, _, start_sum in memories if worker == 1]
    assert start_sums[0] is None
    assert start_sums[1] is not None
    assert start_sums[3] == start_sums[2]  # round 2 was refused: round 3 starts from what round 1 left
