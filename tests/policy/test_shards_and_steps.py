"""What a round gets: its shard, and its number of inner steps."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heloco.errors import UserError
from heloco.policy import SHARD_POLICIES, STEPS, inner_steps, make_choice
from heloco.policy.shards import Liu


@dataclass
class View:
    """What a shard choice sees of a shard."""

    windows: int = 100
    visits: int = 0
    windows_taken: int = 0


# ---- shards


def test_fixed_gives_each_worker_its_own_shard():
    choose = make_choice("fixed", workers=3, shards=3, seed=0)
    assert [choose(worker, r, [View(visits=worker)] * 3) for worker in range(3) for r in range(2)] == [0, 0, 1, 1, 2, 2]


def test_fixed_with_more_shards_than_workers_goes_round_those_of_the_worker():
    choose = make_choice("fixed", workers=2, shards=5, seed=0)
    shards = [View() for _ in range(5)]
    history = []
    for r in range(6):
        for worker in (0, 1):
            shard = choose(worker, r, shards)
            shards[shard].visits += 1
            history.append(shard)
    assert history[0::2] == [0, 2, 4, 0, 2, 4]
    assert history[1::2] == [1, 3, 1, 3, 1, 3]


def play(choose, *, workers, shards, rounds):
    """The shards chosen by workers that take turns."""
    views = [View() for _ in range(shards)]
    history = []
    for r in range(rounds):
        for worker in range(workers):
            shard = choose(worker, r, views)
            views[shard].visits += 1
            views[shard].windows_taken += 10
            history.append(shard)
    return history


def test_flexible_takes_the_least_visited_shard():
    choose = make_choice("flexible", workers=2, shards=3, seed=0)
    assert choose(0, 0, [View(visits=3), View(visits=1), View(visits=2)]) == 1
    history = play(choose, workers=4, shards=5, rounds=50)
    for start in range(0, 200, 5):  # whatever the ties: each five rounds visit each shard once
        assert sorted(history[start : start + 5]) == [0, 1, 2, 3, 4]


def test_flexible_breaks_ties_at_random_and_by_the_seed_alone():
    first, repeat, other = (
        play(make_choice("flexible", workers=4, shards=5, seed=s), workers=4, shards=5, rounds=50) for s in (1, 1, 2)
    )
    assert first == repeat
    assert first != other
    opening = Counter(make_choice("flexible", workers=1, shards=5, seed=s)(0, 0, [View()] * 5) for s in range(2000))
    assert all(320 <= opening[shard] <= 480 for shard in range(5))  # 400 each, ± 4.5 standard deviations


def test_flexible_ties_do_not_depend_on_draws_made_before():
    choose = make_choice("flexible", workers=4, shards=5, seed=1)
    asked_late = [choose(2, 7, [View()] * 5) for _ in range(3)]
    assert asked_late == [make_choice("flexible", workers=4, shards=5, seed=1)(2, 7, [View()] * 5)] * 3


def test_liu_prefers_the_shards_that_lag_behind_their_size():
    shards = [View(windows=100, windows_taken=10), View(windows=200, windows_taken=50), View(windows=700, windows_taken=40)]
    # sizes .1 .2 .7, taken .1 .5 .4: lags 0, 0, .3
    assert Liu(0).probabilities(shards) == [0.0, 0.0, 1.0]
    assert make_choice("liu", workers=2, shards=3, seed=0)(1, 5, shards) == 2


def test_liu_draws_in_proportion_to_the_lag():
    shards = [View(windows=400, windows_taken=10), View(windows=400, windows_taken=30), View(windows=200, windows_taken=60)]
    # sizes .4 .4 .2, taken .1 .3 .6: lags .3, .1, 0
    assert Liu(0).probabilities(shards) == pytest.approx([0.75, 0.25, 0], rel=1e-12)
    drawn = Counter(make_choice("liu", workers=1, shards=3, seed=s)(0, 0, shards) for s in range(4000))
    assert drawn[2] == 0
    assert 2877 <= drawn[0] <= 3123  # 3000 ± 4.5 standard deviations


def test_liu_draws_by_size_at_the_start_and_on_par():
    sizes = [0.1, 0.2, 0.7]
    assert Liu(0).probabilities([View(windows=round(1000 * s)) for s in sizes]) == pytest.approx(sizes, rel=1e-12)
    on_par = [View(windows=100, windows_taken=25), View(windows=100, windows_taken=25)]
    assert Liu(0).probabilities(on_par) == [0.5, 0.5]


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10**6)), min_size=1, max_size=8))
def test_lius_probabilities_are_probabilities_and_zero_for_who_is_ahead(pages):
    shards = [View(windows=windows, windows_taken=count) for windows, count in pages]
    probabilities = Liu(0).probabilities(shards)
    assert sum(probabilities) == pytest.approx(1, rel=1e-9)
    size, total = sum(s.windows for s in shards), sum(s.windows_taken for s in shards)
    lags = [s.windows * total - s.windows_taken * size for s in shards]  # exact, in whole numbers
    if total and any(lag > 0 for lag in lags):
        for p, lag in zip(probabilities, lags, strict=True):
            assert p >= 0
            assert p < 1e-9 or lag > 0


def test_liu_is_deterministic_from_the_seed():
    histories = [play(make_choice("liu", workers=4, shards=5, seed=s), workers=4, shards=5, rounds=30) for s in (1, 1, 2)]
    assert histories[0] == histories[1] != histories[2]


@pytest.mark.parametrize(
    ("name", "shards", "sentence"),
    [
        ("flexibel", 5, "There is no shard policy 'flexibel' here; did you mean 'flexible'?"),
        ("fixed", 4, "5 workers but only 4 shards: give as many shards as workers, fewer paces, or --assign flexible."),
    ],
)
def test_a_wrong_assignment_is_answered_with_a_sentence(name, shards, sentence):
    with pytest.raises(UserError) as error:
        make_choice(name, workers=5, shards=shards, seed=0)
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize("name", [name for name in SHARD_POLICIES if name != "fixed"])
def test_the_others_serve_more_workers_than_shards(name):
    assert set(play(make_choice(name, workers=7, shards=2, seed=0), workers=7, shards=2, rounds=4)) == {0, 1}


# ---- inner steps


def test_constant_steps_are_the_same_for_all():
    assert inner_steps("constant", 20, [1, 2, 15]) == [20, 20, 20]


def test_dylu_gives_the_papers_steps():
    assert inner_steps("dylu", 20, [0.737, 2.62, 3.12, 6.58, 7.50]) == [20, 6, 5, 2, 2]


def test_dylu_gives_at_least_one_step():
    assert inner_steps("dylu", 20, [100, 1, 41]) == [1, 20, 1]


@given(
    st.integers(1, 500),
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=10),
)
def test_dylu_never_gives_a_slower_worker_more_steps(steps, paces):
    given_steps = inner_steps("dylu", steps, paces)
    assert max(given_steps) == given_steps[paces.index(min(paces))] == steps
    for pace, count in zip(paces, given_steps, strict=True):
        assert count == max(1, round(steps * min(paces) / pace))
    from_fast_to_slow = [count for _, count in sorted(zip(paces, given_steps, strict=True))]
    assert from_fast_to_slow == sorted(from_fast_to_slow, reverse=True)


@pytest.mark.parametrize(
    ("name", "steps", "sentence"),
    [
        ("dilu", 20, "There is no inner-step policy 'dilu'; did you mean 'dylu'?"),
        ("constant", 0, "inner_steps is 0: a round needs at least one step."),
    ],
)
def test_a_wrong_step_policy_is_answered_with_a_sentence(name, steps, sentence):
    assert name not in STEPS or steps < 1
    with pytest.raises(UserError) as error:
        inner_steps(name, steps, [1.0])
    assert str(error.value) == sentence
