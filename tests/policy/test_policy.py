"""What is decided without a tensor: weights, dropping, shards, inner steps."""

import math
import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heloco.errors import UserError
from heloco.policy import (
    SHARD_POLICIES,
    STEPS,
    WEIGHTS,
    Drop,
    Judgement,
    NormGuard,
    NormHistory,
    Standing,
    inner_steps,
    make_choice,
    make_weight,
)
from heloco.policy.shards import Liu


@dataclass
class View:
    """What a shard choice sees of a shard."""

    windows: int = 100
    visits: int = 0
    taken: int = 0


def standing(*, staleness: int = 0, own: int = 1, arrivals: int = 1, workers: int = 5) -> Standing:
    return Standing(staleness, own, arrivals, workers)


# ---- weights


@pytest.mark.parametrize("workers", [1, 2, 5, 64])
@pytest.mark.parametrize("staleness", [0, 3, 17])
def test_base_is_root_k_over_k_and_average_one_over_k_whatever_the_staleness(workers, staleness):
    where = standing(workers=workers, staleness=staleness)
    assert make_weight("base")(where) == pytest.approx(math.sqrt(workers) / workers, rel=1e-15)
    assert make_weight("average")(where) == 1 / workers


def test_constant_is_its_value_and_one_unless_said():
    assert make_weight("constant")(standing(staleness=9)) == 1.0
    assert make_weight("constant", value=0.3)(standing(staleness=9)) == 0.3


@pytest.mark.parametrize(("staleness", "divisor"), [(0, 1), (3, 2), (8, 3), (24, 5)])
def test_polynomial_divides_base_by_the_root_of_one_plus_staleness(staleness, divisor):
    assert make_weight("polynomial")(standing(staleness=staleness, workers=4)) == pytest.approx(0.5 / divisor, rel=1e-15)


def test_polynomial_takes_another_exponent():
    assert make_weight("polynomial", exponent=1)(standing(staleness=4, workers=4)) == pytest.approx(0.1, rel=1e-15)
    assert make_weight("polynomial", exponent=0)(standing(staleness=4, workers=4)) == 0.5


@pytest.mark.parametrize(
    ("own", "arrivals", "compensation"),
    [
        (20, 100, 1.0),  # exactly its fifth
        (25, 100, 0.8),
        (16, 100, 1.25),
        (80, 100, 0.25),  # the floor is met ...
        (100, 100, 0.25),  # ... and holds
        (1, 100, 1.5),  # the ceiling
        (1, 1, 0.25),  # its first arrival is all arrivals: 1/5, clipped
    ],
)
def test_share_compensates_for_rare_arrivals_within_its_clips(own, arrivals, compensation):
    expected = compensation / math.sqrt(5)
    assert make_weight("share")(standing(own=own, arrivals=arrivals)) == pytest.approx(expected, rel=1e-15)


def test_share_takes_other_clips():
    wide = make_weight("share", floor=0.0, ceiling=100.0)
    assert wide(standing(own=1, arrivals=100)) == pytest.approx(20 / math.sqrt(5), rel=1e-15)
    assert wide(standing(own=100, arrivals=100)) == pytest.approx(0.2 / math.sqrt(5), rel=1e-15)


@pytest.mark.parametrize("name", ["annealed", "discounted"])
@pytest.mark.parametrize("workers", [1, 2, 5, 64, 512])
def test_the_weight_of_equal_workers_grows_from_one_over_k_to_one_over_root_k(name, workers):
    length = 100 * workers
    weight = make_weight(name, length=length)
    weights = [weight(standing(own=n, arrivals=n * workers, workers=workers)) for n in range(1, 101)]
    assert weights == sorted(weights)
    assert weights[0] == pytest.approx(1 / workers, rel=0.01)
    assert weights[-1] == pytest.approx(1 / math.sqrt(workers), rel=1e-12)
    assert weights[49] == pytest.approx(1 / math.sqrt(workers * (1 + (workers - 1) / 2)), rel=1e-12)
    assert weight(standing(own=200, arrivals=200 * workers, workers=workers)) == weights[-1]  # a run that goes on for longer


@pytest.mark.parametrize("workers", [1, 2, 5, 7, 64])
def test_without_correlation_or_length_the_annealed_weight_is_the_base_weight_to_the_bit(workers):
    where = standing(own=3, arrivals=17, workers=workers)
    assert make_weight("annealed", length=100, correlation=0.0)(where) == make_weight("base")(where)
    assert make_weight("annealed")(where) == make_weight("base")(where)


@pytest.mark.parametrize(
    ("own", "weight"),
    [
        (239, math.sqrt(240 / 305)),  # paces 1,15,15,15,15: the fast worker has n = 305/240, and 1/√n
        (60, 1 / math.sqrt(5)),  # its fifth: n = K
        (14, 5 * 15 / 305 / math.sqrt(5)),  # one of the slow: n = 305/15, K/n times the weight at n = K
    ],
)
def test_at_the_end_the_discounted_weight_is_one_over_root_n_and_less_for_who_is_slower_than_average(own, weight):
    computed_weight = make_weight("discounted", length=300)(standing(own=own, arrivals=300))
    assert computed_weight == pytest.approx(weight, rel=1e-12)


@pytest.mark.parametrize(("step_share", "weight"), [(1 / 3, 1 / math.sqrt(3)), (1 / 6, 1 / math.sqrt(5))])
def test_under_dylu_nothing_is_discounted_and_who_does_more_steps_counts_more(step_share, weight):
    """Paces 1,2,2,2,2: all arrive equally often, and the fast worker does a third of the steps."""
    computed_weight = make_weight("discounted", length=300)(Standing(4, 60, 300, 5, step_share))
    assert computed_weight == pytest.approx(weight, rel=1e-12)


@given(own=st.integers(1, 299))
def test_the_discounted_weight_has_no_cliff(own):
    weight = make_weight("discounted", length=600)
    smaller_weight, larger_weight = (weight(standing(own=n, arrivals=300)) for n in (own, own + 1))
    assert smaller_weight < larger_weight < smaller_weight * (own + 2) / (own + 1) * 1.0001


@pytest.mark.parametrize("name", ["annealed", "discounted"])
@pytest.mark.parametrize("workers", [1, 5, 20, 64, 512])
def test_a_direction_that_one_round_learns_is_stable_for_any_number_of_workers(name, workers):
    """One parameter; a round from θ brings Δ = aθ, a falling from 1 to 0 with the learning rate, and all start together."""
    rounds = 20
    weight = make_weight(name, length=rounds * workers)
    thetas = quadratic(weight, workers, rounds)
    assert max(map(abs, thetas)) < 1 and abs(thetas[-1]) < 0.05
    base = quadratic(make_weight("base"), workers, rounds)
    assert workers <= 5 or max(map(abs, base)) > 10  # what the weight is for


def quadratic(weight, workers, rounds, mu=0.9):
    """θ after each cycle of MLA with η = 1."""
    theta, m, thetas = 1.0, 0.0, []
    for n in range(rounds):
        delta = 0.5 * (1 + math.cos(math.pi * n / rounds)) * theta
        for worker in range(workers):
            g = weight(standing(own=n + 1, arrivals=n * workers + worker + 1, workers=workers)) * delta
            m = mu * m + (1 - mu) * g
            theta -= g + mu * m
        thetas.append(theta)
    return thetas


@given(
    name=st.sampled_from(sorted(WEIGHTS)),
    staleness=st.integers(0, 10_000),
    own=st.integers(1, 1000),
    others=st.integers(0, 10_000),
    workers=st.integers(1, 1000),
)
def test_every_weight_is_positive_and_at_most_one_and_a_half(name, staleness, own, others, workers):
    assert 0 < make_weight(name)(Standing(staleness, own, own + others, workers)) <= 1.5


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("polynomal", {}, "There is no arrival weight 'polynomal' here; did you mean 'polynomial'?"),
        (
            "xyz",
            {},
            "There is no arrival weight 'xyz' here; known: base, average, constant, polynomial, share, annealed, discounted.",
        ),
        ("constant", {"value": -1.0}, "weight_value is -1.0: give a finite number ≥ 0."),
        ("constant", {"value": math.nan}, "weight_value is nan: give a finite number ≥ 0."),
        ("polynomial", {"exponent": math.inf}, "weight_exponent is inf: give a finite number ≥ 0."),
        ("share", {"floor": 2.0, "ceiling": 1.0}, "weight_floor 2 is above weight_ceiling 1: swap them."),
        ("annealed", {"correlation": 1.5}, "weight_correlation is 1.5: give a number from 0 to 1."),
    ],
)
def test_a_wrong_weight_is_answered_with_a_sentence(name, options, sentence):
    with pytest.raises(UserError) as error:
        make_weight(name, **options)
    assert str(error.value).startswith(sentence)


# ---- dropping


@pytest.mark.parametrize(
    ("how", "decisions"),
    [
        ("never", ["apply", "apply", "apply", "apply"]),
        ("zero", ["apply", "apply", "zero", "zero"]),
        ("skip", ["apply", "apply", "skip", "skip"]),
    ],
)
def test_what_is_staler_than_above_is_dropped_as_asked(how, decisions):
    assert [Drop(how, above=2)(staleness) for staleness in (0, 2, 3, 100)] == decisions


def test_a_drop_is_never_unless_said():
    assert Drop()(10**9) == "apply"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("skipp", 0), "There is no way of dropping called 'skipp'; did you mean 'skip'?"),
        (("zero", -1), "drop_above is -1: staleness is never negative, so give a number ≥ 0."),
    ],
)
def test_a_wrong_drop_is_answered_with_a_sentence(arguments, sentence):
    with pytest.raises(UserError) as error:
        Drop(*arguments)
    assert str(error.value) == sentence


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
            views[shard].taken += 10
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
    shards = [View(windows=100, taken=10), View(windows=200, taken=50), View(windows=700, taken=40)]
    # sizes .1 .2 .7, taken .1 .5 .4: lags 0, 0, .3
    assert Liu(0).probabilities(shards) == [0.0, 0.0, 1.0]
    assert make_choice("liu", workers=2, shards=3, seed=0)(1, 5, shards) == 2


def test_liu_draws_in_proportion_to_the_lag():
    shards = [View(windows=400, taken=10), View(windows=400, taken=30), View(windows=200, taken=60)]
    # sizes .4 .4 .2, taken .1 .3 .6: lags .3, .1, 0
    assert Liu(0).probabilities(shards) == pytest.approx([0.75, 0.25, 0], rel=1e-12)
    drawn = Counter(make_choice("liu", workers=1, shards=3, seed=s)(0, 0, shards) for s in range(4000))
    assert drawn[2] == 0
    assert 2877 <= drawn[0] <= 3123  # 3000 ± 4.5 standard deviations


def test_liu_draws_by_size_at_the_start_and_on_par():
    sizes = [0.1, 0.2, 0.7]
    assert Liu(0).probabilities([View(windows=round(1000 * s)) for s in sizes]) == pytest.approx(sizes, rel=1e-12)
    on_par = [View(windows=100, taken=25), View(windows=100, taken=25)]
    assert Liu(0).probabilities(on_par) == [0.5, 0.5]


@given(st.lists(st.tuples(st.integers(1, 10**6), st.integers(0, 10**6)), min_size=1, max_size=8))
def test_lius_probabilities_are_probabilities_and_zero_for_who_is_ahead(pages):
    shards = [View(windows=windows, taken=count) for windows, count in pages]
    probabilities = Liu(0).probabilities(shards)
    assert sum(probabilities) == pytest.approx(1, rel=1e-9)
    size, total = sum(s.windows for s in shards), sum(s.taken for s in shards)
    lags = [s.windows * total - s.taken * size for s in shards]  # exact, in whole numbers
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


# ---- norms far outside the usual ones

SIZES = [100, 25, 4]
"""Elements of each block; if all of them move alike, the blocks' norms are as 10 : 5 : 2."""
ALIKE = [10.0, 5.0, 2.0]


class Judged:
    """A guard with its history, and rounds of one length."""

    def __init__(self, limit=10.0, policy="clip", workers=3, model_norm=1000.0):
        self.guard, self.history = NormGuard(limit, policy), NormHistory(workers, SIZES)
        self.workers, self.model_norm = workers, model_norm

    def __call__(self, worker, norms=ALIKE, *, times=1.0, steps=10, participants=None):
        return self.guard.judge(
            self.history,
            worker,
            [(times * norm) ** 2 for norm in norms],
            inner_steps=steps,
            participants=participants or self.workers,
            model_norm=lambda: self.model_norm,
        )

    def warm_up(self, rounds=3):
        for number in range(rounds * self.workers):
            assert self(number % self.workers) == Judgement()
        return self


def test_healthy_contributions_are_left_alone():
    judged = Judged().warm_up()
    draw = random.Random(0)
    for number in range(200):
        norms = [norm * math.exp(draw.gauss(0, 0.5)) for norm in ALIKE]
        assert judged(number % 3, norms) == Judgement()


def test_an_outlier_is_scaled_down_to_the_usual_norm():
    judged = Judged().warm_up()
    judgement = judged(1, times=1e15)
    assert judgement.scales == pytest.approx([1e-15] * 3) and judgement.smallest_scale == pytest.approx(1e-15)
    assert judgement.sentence == "its norm, 1.136e+16, is 1e+15 × the usual one"


def test_at_the_limit_a_contribution_is_left_alone():
    judged = Judged().warm_up()
    assert judged(0, times=9.999) == Judgement()
    assert judged(1, times=10.01).sentence


def test_a_single_block_is_clipped_alone():
    judged = Judged().warm_up()
    judgement = judged(0, [10.0, 5.0, 2e9])
    assert judgement.scales[:2] == [1.0, 1.0] and judgement.scales[2] == pytest.approx(1e-9)
    assert judgement.sentence == "the norm of its block 2, 2e+09, is 1e+09 × the usual one"
    assert judged(1) == judged(0) == Judgement()


def test_a_block_that_hardly_moves_may_move_as_the_others_do():
    """A bias without a gradient moves by noise: ten times more noise is no reason to refuse a contribution."""
    judged = Judged()
    for number in range(12):
        judged(number % 3, [10.0, 5.0, 1e-9])
    assert judged(0, [10.0, 5.0, 1.0]) == Judgement()
    assert judged(1, [10.0, 5.0, 30.0]).scales == pytest.approx([1.0, 1.0, math.sqrt(4 / 129 * 125) / 30])


def test_rounds_of_different_lengths_are_compared_by_the_root_of_their_steps():
    judged = Judged()
    for number in range(12):
        judged(number % 3, times=(1, 1, 4)[number % 3], steps=(5, 5, 80)[number % 3])  # as noise grows
    assert judged(2, times=16, steps=80) == Judgement()  # as a drift grows, sixteen times the steps
    assert judged(0, times=16, steps=5).sentence


def test_at_first_a_contribution_may_be_limit_times_the_model():
    judged = Judged(model_norm=1.0)
    assert judged(0, [6.0, 6.0, 5.0]) == Judgement()
    judgement = judged(1, [6e5, 8e5, 1.0])
    assert (
        judgement.scales == pytest.approx([1e-6] * 3) and judgement.sentence == "its norm, 1e+06, is 1e+06 × the model's own norm"
    )
    assert Judged(model_norm=0.0)(0, [100.0, 0.0, 0.0]) == Judgement()  # √129 stands for it
    assert Judged(model_norm=0.0)(0, [1000.0, 0.0, 0.0]).smallest_scale == pytest.approx(math.sqrt(129) / 1000)


@pytest.mark.parametrize("policy", ["clip", "refuse"])
@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize(("factor", "contributions"), [(50, 2), (1000, 6)])
def test_a_lasting_change_of_scale_is_followed(policy, workers, factor, contributions):
    """After so many contributions of each worker, whatever becomes of them."""
    judged = Judged(policy=policy, workers=workers).warm_up(4)
    outliers = [judged(number % workers, times=factor).sentence for number in range(contributions * workers)]
    assert outliers[0]
    for number in range(20):
        assert judged(number % workers, times=factor) == Judgement()
    assert judged(0, times=100 * factor).sentence
    for number in range(40):
        assert judged(number % workers, times=1.0) == Judgement()  # and back
    assert judged(0, times=50).sentence


@pytest.mark.parametrize("before", [0, 12])
def test_zeros_say_nothing(before):
    judged = Judged(model_norm=100.0)
    for number in range(before):
        judged(number % 3)
    for number in range(24):
        assert judged(number % 3, times=0.0) == Judgement()
    for number in range(12):
        assert judged(number % 3) == Judgement()
    assert judged(0, times=1e6).sentence


def test_a_block_that_was_always_zero_may_begin_to_move():
    judged = Judged()
    for number in range(12):
        judged(number % 3, [10.0, 5.0, 0.0])
    assert judged(0, [10.0, 5.0, 2.0]) == Judgement()


@pytest.mark.parametrize("lie", [1e-12, 1e-3])
def test_a_liar_with_tiny_contributions_does_not_make_honest_ones_outliers(lie):
    """However often it arrives, also before anybody else."""
    judged = Judged()
    for _ in range(100):
        judged(0, times=lie, participants=1)
    for number in range(60):
        assert judged(1 + number % 2) == Judgement()
        for _ in range(5):
            judged(0, times=lie)


def test_a_liar_with_huge_contributions_stays_within_the_limit():
    judged = Judged().warm_up()
    for _ in range(100):
        judgement = judged(0, times=1e15)
        assert judgement.smallest_scale * 1e15 <= 10.001
        assert judged(1) == judged(2) == Judgement()


def test_a_worker_whose_contributions_are_larger_for_good_is_not_cut_down():
    """Its learning rate decays later than the others', say."""
    judged = Judged().warm_up()
    for number in range(200):
        shrunk = 0.98 ** min(number, 200)
        assert judged(0, times=shrunk) == judged(1, times=shrunk) == judged(2) == Judgement()


def test_a_history_comes_back_from_its_rows():
    judged = Judged().warm_up()
    judged(1, times=1e9)
    twin = Judged()
    twin.history.load([[list(row) for row in rows] for rows in judged.history.rows()])
    assert twin.history.rows() == judged.history.rows()
    for number in range(20):
        assert twin(number % 3, times=1 + number) == judged(number % 3, times=1 + number)


def test_norms_beyond_what_can_be_added_are_outliers():
    judged = Judged().warm_up()
    squares = [1.7e308, 1.7e308, 1.0]
    judgement = judged.guard.judge(judged.history, 0, squares, inner_steps=10, participants=3, model_norm=lambda: 1.0)
    assert judgement.sentence and all(0 <= scale <= 1 for scale in judgement.scales)


def test_without_a_limit_the_guard_is_off():
    assert not NormGuard().is_on and NormGuard(10.0).is_on


@pytest.mark.parametrize("limit", [1.0, 0.5, -3.0, math.nan])
def test_a_limit_that_makes_no_sense_is_refused(limit):
    with pytest.raises(UserError, match="norm_limit is"):
        NormGuard(limit)


def test_an_unknown_norm_policy_is_refused_with_the_nearest():
    with pytest.raises(UserError, match="did you mean 'clip'"):
        NormGuard(3.0, "clipp")
