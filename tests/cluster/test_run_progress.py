"""How far the run is, told to the loops that take part in it."""

import math
import threading

import pytest
import torch

import heloco
from heloco.cluster.client.run_progress import RunProgress
from support.local_link import LocalLink
from support.own_loops import DEADLINE_S, adam, batches, external_runs, in_threads, net, quiet, step


def test_alone_in_a_run_every_number_is_exact(tmp_path):
    seen = []
    with external_runs(tmp_path) as serve:
        model = net()
        optimizer = adam(model)
        with heloco.join(LocalLink(serve(inner_steps=3, arrivals=4)), model, optimizer, tell=quiet) as run:
            for batch in batches():
                seen.append((run.progress, run.steps_left, run.run_arrivals, run.planned_arrivals))
                step(model, optimizer, batch)
    assert [left for _, left, _, _ in seen] == list(range(12, 0, -1))
    assert [progress for progress, *_ in seen] == pytest.approx([i / 12 for i in range(12)])
    assert [arrivals for _, _, arrivals, _ in seen] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert {planned for *_, planned in seen} == {4}
    assert (run.progress, run.steps_left) == (1.0, 0)


def test_a_schedule_over_the_run_ends_with_it_whatever_the_others_do(tmp_path):
    """Each of two machines ends near the bottom of its cosine."""
    rates: dict[str, list[float]] = {}
    both_are_there = threading.Barrier(2)
    with external_runs(tmp_path) as serve:
        service = serve(inner_steps=5, arrivals=12, paces=[1.0, 1.0])

        def loop(name: str) -> None:
            model = net()
            optimizer = adam(model)
            with heloco.join(LocalLink(service), model, optimizer, name=name, tell=quiet) as run:
                schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5 * (1 + math.cos(math.pi * run.progress)))
                rates[name] = []
                both_are_there.wait(DEADLINE_S)
                for batch in batches():
                    step(model, optimizer, batch)
                    schedule.step()
                    rates[name].append(schedule.get_last_lr()[0] / schedule.base_lrs[0])

        in_threads(lambda: loop("a"), lambda: loop("b"))
    for rates_of_one in rates.values():
        assert rates_of_one == sorted(rates_of_one, reverse=True)
        assert rates_of_one[-1] < 0.2


def test_without_an_address_there_is_no_run_to_be_told_of():
    model = net()
    with heloco.join(None, model, adam(model)) as run:
        assert (run.progress, run.steps_left, run.run_arrivals, run.planned_arrivals) == (0.0, 0, 0, 0)


# ---- the estimate


def test_before_anything_is_known_all_workers_count_as_equally_fast():
    progress = RunProgress()
    progress.begin_round(0.5, planned_arrivals=40, seats=4, inner_steps=10)
    assert (progress.share, progress.steps_left) == (0.5, 50)
    for _ in range(10):
        progress.note_step()
    assert progress.share == pytest.approx(0.6) and progress.steps_left == 40


def test_afterwards_it_goes_by_what_the_run_gained_since_the_loop_joined():
    progress = RunProgress()
    progress.begin_round(0.2, planned_arrivals=100, seats=2, inner_steps=10)
    for _ in range(10):
        progress.note_step()
    progress.begin_round(0.25, planned_arrivals=100, seats=2, inner_steps=10)  # .005 a step: the others are slower
    assert progress.steps_left == 150
    progress.note_step()
    assert progress.share == pytest.approx(0.255) and progress.steps_left == 149


def test_it_neither_falls_nor_leaves_the_range():
    progress = RunProgress()
    shares = []
    for done in (0.0, 0.1, 0.1, 0.5, 0.99):
        progress.begin_round(done, planned_arrivals=10, seats=1, inner_steps=3)
        for _ in range(20):
            progress.note_step()
            shares.append(progress.share)
    assert shares == sorted(shares) and shares[-1] == 1.0 and progress.steps_left == 0
