"""How the norm guard judges contributions with norms far outside the usual ones."""

import math
import random

import pytest

from heloco.errors import UserError
from heloco.policy import Judgement, NormGuard, NormHistory

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
