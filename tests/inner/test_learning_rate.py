"""The inner learning rate: the cosine, its warm-up, and where on it a round stands."""

import math
from collections.abc import Sequence

import pytest

from heloco.engine.simulation import Simulation
from heloco.inner import InnerOptions, SequentialInner, learning_rate
from heloco.ledger import Ledger
from heloco.policy import make_choice, make_weight
from heloco.synchronizer import Contribution, Synchronizer
from support.inner_rounds import Plain, mlp, round_for, task_of
from support.synchronizers import same

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (0, 1.0),
        (25, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2),
        (50, 0.55),
        (75, 0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2),
        (100, 0.1),
        (101, 0.1),
        (10**9, 0.1),
        (12.5, 0.1 + 0.9 * (1 + math.cos(math.pi / 8)) / 2),
    ],
)
def test_the_cosine_falls_from_lr_to_lr_min_and_stays(position, expected):
    assert learning_rate(InnerOptions(lr=1.0, lr_min=0.1, schedule_steps=100), position) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("position", "expected"), [(0, 0.1), (4, 0.5), (9, 1.0), (10, 1.0), (55, 0.55), (100, 0.1), (500, 0.1)])
def test_a_warm_up_rises_linearly_before_the_cosine(position, expected):
    options = InnerOptions(lr=1.0, lr_min=0.1, schedule_steps=100, warmup=10)
    assert learning_rate(options, position) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("position", "base"), [("shard", 7), ("run", 3.0)])
def test_a_round_stands_on_the_cosine_by_its_shard_or_by_the_run(position, base):
    options = InnerOptions(batch_size=3, lr=0.05, lr_min=0.001, schedule_steps=12, lr_position=position)
    task = task_of(mlp())
    worker_round = round_for(task, options, shard_steps=7, progress=0.25)
    [ours] = SequentialInner(task, options, seed=0).run([worker_round])
    assert same(ours.pseudo_gradient, Plain(task, options).run(worker_round, range(21, 36), base)[0])


def positions_of_rounds(paces: Sequence[float], *, barrier: bool = False) -> list[tuple[int, float]]:
    """(steps done on the shard, position by the run's progress) of every round of a simulation."""
    workers = len(paces)
    options = InnerOptions(schedule_steps=7 * 30 // workers, lr_position="run")
    synchronizer = Synchronizer(
        None,
        inner_steps=[7] * workers,
        windows_per_step=2,
        ledger=Ledger([1000] * workers),
        choose_shard=make_choice("fixed", workers=workers, shards=workers, seed=0),
        weight=make_weight("average"),
        planned_arrivals=30,
        barrier=barrier,
    )
    simulation, positions = Simulation(synchronizer, paces_s=paces, arrivals=30), []
    while not simulation.finished:
        if simulation.advance() is None and not simulation.finished:
            worker_round = simulation.next_needed()
            positions.append((worker_round.shard_steps, options.first_position(worker_round.shard_steps, worker_round.progress)))
            simulation.give(Contribution(worker_round.worker, worker_round.index, worker_round.version))
    return positions


def test_for_equal_workers_and_behind_a_barrier_the_two_positions_coincide():
    for positions in (positions_of_rounds([1] * 5), positions_of_rounds([1, 1, 2, 6, 6], barrier=True)):
        assert [by_shard for by_shard, _ in positions] == [by_run for _, by_run in positions] == [7 * (i // 5) for i in range(30)]


def test_for_unequal_workers_the_fast_ones_shard_runs_ahead_of_the_run():
    positions = positions_of_rounds([1, 6, 6, 6, 6])
    assert max(by_shard for by_shard, _ in positions) == 119
    assert max(by_run for _, by_run in positions) < 7 * 30 / 5 == 42
