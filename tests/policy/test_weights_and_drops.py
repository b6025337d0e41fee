"""How much an arrival counts: its weight, and whether it is dropped."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heloco.errors import UserError
from heloco.policy import WEIGHTS, ArrivalCounts, Drop, make_weight


def counts(
    *, staleness: int = 0, worker_arrivals: int = 1, arrivals: int = 1, workers: int = 5, length: int | None = None
) -> ArrivalCounts:
    """`length`: arrivals of the whole run."""
    progress = {} if length is None else {"progress": min(1.0, arrivals / length)}
    return ArrivalCounts(staleness, worker_arrivals, arrivals, workers, **progress)


# ---- weights


@pytest.mark.parametrize("workers", [1, 2, 5, 64])
@pytest.mark.parametrize("staleness", [0, 3, 17])
def test_base_is_root_k_over_k_and_average_one_over_k_whatever_the_staleness(workers, staleness):
    where = counts(workers=workers, staleness=staleness)
    assert make_weight("base")(where) == pytest.approx(math.sqrt(workers) / workers, rel=1e-15)
    assert make_weight("average")(where) == 1 / workers


def test_constant_is_its_value_and_one_unless_said():
    assert make_weight("constant")(counts(staleness=9)) == 1.0
    assert make_weight("constant", value=0.3)(counts(staleness=9)) == 0.3


@pytest.mark.parametrize(("staleness", "divisor"), [(0, 1), (3, 2), (8, 3), (24, 5)])
def test_polynomial_divides_base_by_the_root_of_one_plus_staleness(staleness, divisor):
    assert make_weight("polynomial")(counts(staleness=staleness, workers=4)) == pytest.approx(0.5 / divisor, rel=1e-15)


def test_polynomial_takes_another_exponent():
    assert make_weight("polynomial", exponent=1)(counts(staleness=4, workers=4)) == pytest.approx(0.1, rel=1e-15)
    assert make_weight("polynomial", exponent=0)(counts(staleness=4, workers=4)) == 0.5


@pytest.mark.parametrize(
    ("worker_arrivals", "arrivals", "compensation"),
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
def test_share_compensates_for_rare_arrivals_within_its_clips(worker_arrivals, arrivals, compensation):
    expected = compensation / math.sqrt(5)
    assert make_weight("share")(counts(worker_arrivals=worker_arrivals, arrivals=arrivals)) == pytest.approx(expected, rel=1e-15)


def test_share_takes_other_clips():
    wide = make_weight("share", floor=0.0, ceiling=100.0)
    assert wide(counts(worker_arrivals=1, arrivals=100)) == pytest.approx(20 / math.sqrt(5), rel=1e-15)
    assert wide(counts(worker_arrivals=100, arrivals=100)) == pytest.approx(0.2 / math.sqrt(5), rel=1e-15)


@pytest.mark.parametrize("name", ["annealed", "discounted"])
@pytest.mark.parametrize("workers", [1, 2, 5, 64, 512])
def test_the_weight_of_equal_workers_grows_from_one_over_k_to_one_over_root_k(name, workers):
    length = 100 * workers
    weight = make_weight(name)
    weights = [weight(counts(worker_arrivals=n, arrivals=n * workers, workers=workers, length=length)) for n in range(1, 101)]
    assert weights == sorted(weights)
    assert weights[0] == pytest.approx(1 / workers, rel=0.01)
    assert weights[-1] == pytest.approx(1 / math.sqrt(workers), rel=1e-12)
    assert weights[49] == pytest.approx(1 / math.sqrt(workers * (1 + (workers - 1) / 2)), rel=1e-12)
    longer = counts(worker_arrivals=200, arrivals=200 * workers, workers=workers, length=length)
    assert weight(longer) == weights[-1]


@pytest.mark.parametrize("workers", [1, 2, 5, 7, 64])
def test_without_correlation_or_length_the_annealed_weight_is_the_base_weight_to_the_bit(workers):
    where = counts(worker_arrivals=3, arrivals=17, workers=workers, length=100)
    assert make_weight("annealed", correlation=0.0)(where) == make_weight("base")(where)
    where = counts(worker_arrivals=3, arrivals=17, workers=workers)
    assert make_weight("annealed")(where) == make_weight("base")(where)


@pytest.mark.parametrize("name", ["annealed", "discounted"])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_fewer_workers_than_shards_weigh_as_if_there_were_one_for_each(name, workers):
    """One after the other they do the rounds that five workers would do together."""
    weight = make_weight(name)
    for arrivals in (20, 40, 60, 80, 100):
        few = ArrivalCounts(0, arrivals // workers, arrivals, workers, 1 / workers, shards=5, progress=arrivals / 100)
        many = ArrivalCounts(0, arrivals // 5, arrivals, 5, 1 / 5, shards=5, progress=arrivals / 100)
        assert weight(few) == pytest.approx(weight(many), rel=1e-12)
    neutral = make_weight(name, correlation=0.0)
    few = ArrivalCounts(0, 10, 10 * workers, workers, 1 / workers, shards=5, progress=workers / 10)
    assert neutral(few) == pytest.approx(1 / math.sqrt(workers), rel=1e-15)


@pytest.mark.parametrize(
    ("worker_arrivals", "weight"),
    [
        (239, math.sqrt(240 / 305)),  # paces 1,15,15,15,15: the fast worker has n = 305/240, and 1/√n
        (60, 1 / math.sqrt(5)),  # its fifth: n = K
        (14, 5 * 15 / 305 / math.sqrt(5)),  # one of the slow: n = 305/15, K/n times the weight at n = K
    ],
)
def test_at_the_end_the_discounted_weight_is_one_over_root_n_and_less_for_who_is_slower_than_average(worker_arrivals, weight):
    computed_weight = make_weight("discounted")(counts(worker_arrivals=worker_arrivals, arrivals=300))
    assert computed_weight == pytest.approx(weight, rel=1e-12)


@pytest.mark.parametrize(("step_share", "weight"), [(1 / 3, 1 / math.sqrt(3)), (1 / 6, 1 / math.sqrt(5))])
def test_under_dylu_nothing_is_discounted_and_who_does_more_steps_counts_more(step_share, weight):
    """Paces 1,2,2,2,2: all arrive equally often, and the fast worker does a third of the steps."""
    computed_weight = make_weight("discounted")(ArrivalCounts(4, 60, 300, 5, step_share))
    assert computed_weight == pytest.approx(weight, rel=1e-12)


@given(worker_arrivals=st.integers(1, 299))
def test_the_discounted_weight_has_no_cliff(worker_arrivals):
    weight = make_weight("discounted")
    smaller_weight, larger_weight = (
        weight(counts(worker_arrivals=n, arrivals=300, length=600)) for n in (worker_arrivals, worker_arrivals + 1)
    )
    assert smaller_weight < larger_weight < smaller_weight * (worker_arrivals + 2) / (worker_arrivals + 1) * 1.0001


@pytest.mark.parametrize("name", ["annealed", "discounted"])
@pytest.mark.parametrize("workers", [1, 5, 20, 64, 512])
def test_a_direction_that_one_round_learns_is_stable_for_any_number_of_workers(name, workers):
    """One parameter; a round from θ brings Δ = aθ, a falling from 1 to 0 with the learning rate, and all start together."""
    rounds = 20
    thetas = quadratic(make_weight(name), workers, rounds)
    assert max(map(abs, thetas)) < 1 and abs(thetas[-1]) < 0.05
    base = quadratic(make_weight("base"), workers, rounds)
    assert workers <= 5 or max(map(abs, base)) > 10  # what the weight is for


def quadratic(weight, workers, rounds, mu=0.9):
    """θ after each cycle of MLA with η = 1."""
    theta, m, thetas = 1.0, 0.0, []
    for n in range(rounds):
        delta = 0.5 * (1 + math.cos(math.pi * n / rounds)) * theta
        for worker in range(workers):
            arrivals = n * workers + worker + 1
            where = counts(worker_arrivals=n + 1, arrivals=arrivals, workers=workers, length=rounds * workers)
            g = weight(where) * delta
            m = mu * m + (1 - mu) * g
            theta -= g + mu * m
        thetas.append(theta)
    return thetas


@given(
    name=st.sampled_from(sorted(WEIGHTS)),
    staleness=st.integers(0, 10_000),
    worker_arrivals=st.integers(1, 1000),
    others=st.integers(0, 10_000),
    workers=st.integers(1, 1000),
)
def test_every_weight_is_positive_and_at_most_one_and_a_half(name, staleness, worker_arrivals, others, workers):
    assert 0 < make_weight(name)(ArrivalCounts(staleness, worker_arrivals, worker_arrivals + others, workers)) <= 1.5


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
    ("action", "decisions"),
    [
        ("never", ["apply", "apply", "apply", "apply"]),
        ("zero", ["apply", "apply", "zero", "zero"]),
        ("skip", ["apply", "apply", "skip", "skip"]),
    ],
)
def test_what_is_staler_than_the_limit_is_dropped_as_asked(action, decisions):
    assert [Drop(action, max_staleness=2)(staleness) for staleness in (0, 2, 3, 100)] == decisions


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
