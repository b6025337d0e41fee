"""Who arrives when: the paper's times and counts, exact ties, the grace period, constant memory."""

import tracemalloc
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from heloco.engine.schedule import WorkerShare, schedule, summarize
from heloco.policy import inner_steps

TABLE_1 = {
    (1, 6, 6, 6, 6): 14400,
    (1, 2, 2, 2, 2): 8000,
    (1, 1, 6, 6, 6): 9600,
    (1, 1, 1, 6, 6): 7200,
    (1, 1, 2, 2, 2): 6880,
    (1, 1, 1, 1, 1): 4800,
    (1, 15, 15, 15, 15): 19200,
    (1, 1, 1, 2, 2): 6080,
    (1, 1, 1, 1, 6): 5760,
    (1, 1, 1, 1, 15): 5920,
    (1, 1, 1, 1, 2): 5360,
    (1, 1, 1, 15, 15): 7680,
    (1, 1, 15, 15, 15): 10960,
}
"""The paper's Table 1: paces and T, the virtual time of 300 arrivals of 80 steps."""

SECTION_4_1 = (0.737, 2.62, 3.12, 6.58, 7.50)


def run(paces, steps=1, arrivals=100, **options):
    """[(time, worker, version, staleness)] of a schedule; `steps` for all or one number each."""
    steps = [steps] * len(paces) if isinstance(steps, int) else steps
    events = schedule(paces_s=paces, inner_steps=steps, arrivals=arrivals, **options)
    return [(time_s, a.worker, a.version, a.staleness) for time_s, a in events]


def shares(paces, steps, arrivals, **options) -> tuple[float, list[WorkerShare]]:
    return summarize(schedule(paces_s=paces, inner_steps=steps, arrivals=arrivals, **options), steps)


# ---- the paper's numbers


@pytest.mark.parametrize(("paces", "time_s"), TABLE_1.items())
def test_table_1s_time_comes_out_exactly(paces, time_s):
    last_s, workers = shares(paces, [80] * 5, 300)
    assert last_s == time_s
    assert sum(worker.arrivals for worker in workers) == 300


def test_section_4_1s_arrivals_and_staleness():
    _, workers = shares(SECTION_4_1, [20] * 5, 500)
    assert [w.arrivals for w in workers] == [291, 81, 68, 32, 28]
    assert [round(w.mean_staleness, 2) for w in workers] == [0.72, 5.12, 6.28, 14.38, 16.50]
    assert [w.share for w in workers] == [0.582, 0.162, 0.136, 0.064, 0.056]


def test_dylu_evens_out_section_4_1():
    steps = inner_steps("dylu", 20, SECTION_4_1)
    _, workers = shares(SECTION_4_1, steps, 500)
    assert [w.inner_steps for w in workers] == steps == [20, 6, 5, 2, 2]
    assert [w.arrivals for w in workers] == [100, 94, 95, 112, 99]  # 19 to 22 %
    assert sum(w.arrivals * w.mean_staleness for w in workers) / 500 == pytest.approx(3.974, rel=1e-12)
    assert max(w.max_staleness for w in workers) == 6


# ---- ties


def test_five_equal_workers_have_staleness_0_to_4_over_and_over():
    history = run([1] * 5, steps=80, arrivals=50)
    assert [staleness for *_, staleness in history] == [0, 1, 2, 3, 4] * 10
    assert [worker for _, worker, *_ in history] == [0, 1, 2, 3, 4] * 10
    assert [time_s for time_s, *_ in history] == [80.0 * (i // 5 + 1) for i in range(50)]


def test_ties_are_exact_where_floats_would_break_them():
    """0.1 + 0.1 + 0.1 > 0.3 in floats: worker 0's third round would then miss worker 1's first."""
    history = run([0.1, 0.3], arrivals=4000)
    assert [worker for _, worker, *_ in history] == [0, 0, 0, 1] * 1000
    assert [staleness for *_, staleness in history] == [0, 0, 0, 3] * 1000
    assert [version for _, _, version, _ in history] == [v for i in range(1000) for v in (4 * i, 4 * i + 1, 4 * i + 2, 4 * i)]
    assert [time_s for time_s, *_ in history] == [
        t / 10 for i in range(1000) for t in (3 * i + 1, 3 * i + 2, 3 * i + 3, 3 * i + 3)
    ]


@settings(max_examples=100)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(1, 120),
    st.sampled_from([10, 1000, 10**6]),
)
@example([1001, 3003], 1, 40, 1000)  # 1.001 · 10⁹ and 3.003 · 10⁹ are no whole numbers in floats
def test_fractional_paces_make_the_history_of_whole_ones(paces, steps, arrivals, parts):
    fine = run([pace / parts for pace in paces], steps, arrivals)
    whole = run(paces, steps, arrivals)
    assert [event[1:] for event in fine] == [event[1:] for event in whole]
    assert [event[0] for event in fine] == [time_s / parts for time_s, *_ in whole]


@settings(max_examples=50)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 120), st.integers(0, 40))
def test_a_history_is_a_history(paces, arrivals, grace):
    """In order of (time, worker), staleness = arrivals since the dispatch, no round shorter than it takes."""
    history = run(paces, 2, arrivals, grace_s=float(grace))
    assert len(history) == arrivals
    assert [(t, w) for t, w, *_ in history] == sorted((t, w) for t, w, *_ in history)
    last = dict.fromkeys(range(len(paces)), 0.0)
    for arrivals_before, (time_s, worker, version, staleness) in enumerate(history):
        assert staleness == arrivals_before - version >= 0
        assert 2 * paces[worker] <= time_s - last[worker] <= 2 * paces[worker] + grace
        last[worker] = time_s


# ---- grace period


def test_a_grace_period_widens_the_window_of_a_tie():
    """Worked out by hand: rounds of 2, 3 and 7 s; after a first arrival nobody starts again for 1 s."""
    assert run([2, 3, 7], arrivals=13, grace_s=1.0) == [
        (2.0, 0, 0, 0),  # the window is open until 3 s ...
        (3.0, 1, 0, 1),  # ... and worker 1 just makes it: both start at 3 s from version 2
        (5.0, 0, 2, 0),
        (6.0, 1, 2, 1),  # both start at 6 s
        (7.0, 2, 0, 4),  # a window of its own, until 8 s ...
        (8.0, 0, 4, 1),  # ... which worker 0 joins: both start at 8 s from version 6
        (9.0, 1, 4, 2),  # open until 10 s
        (10.0, 0, 6, 1),
        (12.0, 0, 8, 0),  # workers 0 and 1 had started at 10 s
        (13.0, 1, 8, 1),
        (15.0, 0, 10, 0),
        (15.0, 2, 6, 5),  # 8 s + 7 s
        (16.0, 1, 10, 2),  # worker 1 had started at 13 s: the window is open until 16 s
    ]


def test_without_grace_the_same_workers_never_wait():
    assert run([2, 3, 7], arrivals=8) == [
        (2.0, 0, 0, 0),
        (3.0, 1, 0, 1),
        (4.0, 0, 1, 1),
        (6.0, 0, 3, 0),
        (6.0, 1, 2, 2),
        (7.0, 2, 0, 5),
        (8.0, 0, 5, 1),
        (9.0, 1, 5, 2),
    ]


def test_a_grace_period_that_covers_the_slowest_round_is_nearly_a_barrier():
    history = run([1, 2, 3], arrivals=9, grace_s=2.0)
    assert history == [(t, w, 3 * i, w) for i in range(3) for w, t in enumerate((3.0 * i + 1, 3.0 * i + 2, 3.0 * i + 3))]


# ---- barrier


def test_the_barrier_has_no_staleness_and_the_slowest_sets_the_time():
    events = list(schedule(paces_s=[1, 6, 2], inner_steps=[10] * 3, arrivals=12, barrier=True))
    assert [(t, a.worker, a.version, a.staleness, a.verdict, a.released) for t, a in events] == [
        entry
        for r in range(4)
        for entry in (
            (60.0 * r + 10, 0, r, 0, "gathered", ()),
            (60.0 * r + 20, 2, r, 0, "gathered", ()),
            (60.0 * r + 60, 1, r, 0, "applied", (0, 1, 2)),
        )
    ]


@pytest.mark.parametrize("paces", [(1, 6, 6, 6, 6), (1, 1, 1, 1, 1), (1, 1, 1, 1, 15)])
def test_sixty_rounds_of_the_barrier_take_sixty_times_the_slowest(paces):
    last_s, workers = shares(paces, [80] * 5, 300, barrier=True)
    assert last_s == 60 * 80 * max(paces)
    assert [(w.arrivals, w.mean_staleness, w.max_staleness) for w in workers] == [(60, 0.0, 0)] * 5


# ---- summary and memory


def test_an_empty_schedule_is_summed_up_as_nothing():
    assert summarize(iter(()), [3]) == (0.0, [WorkerShare(3)])


def test_the_schedule_is_made_as_it_is_asked_for():
    endless = schedule(paces_s=[1, 2], inner_steps=[1, 1], arrivals=10**15)
    assert [a.worker for _, a in islice(endless, 6)] == [0, 0, 1, 0, 0, 1]


def peak_bytes(arrivals: int) -> int:
    tracemalloc.start()
    try:
        deque(schedule(paces_s=SECTION_4_1, inner_steps=[20] * 5, arrivals=arrivals), maxlen=0)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_twenty_thousand_arrivals_take_the_memory_of_a_thousand():
    # In a process of its own: threads that earlier tests left would be counted as well. The first is for what is cached once.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        _, few, many = alone.map(peak_bytes, (100, 1000, 20_000))
    assert many - few < 4096  # 19,000 arrivals more, a fifth of a byte each: nothing is kept of them
