"""What steps do to a block, against `correct`, which is Algorithm 2 line by line; and both against the paper's lemma."""

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from heloco.outer import CASES, correct, examine
from heloco.outer.constants import correction_constants
from support.equations import COSINES, F64, VARIANTS, pair

SHAPES = [(2,), (7,), (3, 4), (2, 3, 4, 5)]


def combined(delta: Tensor, momentum: Tensor, **settings: Any) -> Tensor:
    """What a step makes of a block: a·Δ + b·m, from its sums."""
    a, b, _ = examine(delta, momentum, **settings)
    step = delta * a
    return step.add_(momentum * b) if b else step


def assert_near(actual: Tensor, expected: Tensor, scale: Tensor, ulps: int = 16) -> None:
    """Equal up to a few roundings of numbers as large as the norm of `scale`."""
    assert actual.shape == expected.shape
    assert float((actual - expected).norm()) <= ulps * torch.finfo(F64).eps * float(scale.norm())


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(v.values()))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_corrects_by_algorithm_2(variant: dict[str, Any], shape: tuple[int, ...]) -> None:
    case_names = set()
    for cosine, ratio, rho in itertools.product(COSINES, (0.01, 1.0, 30.0), (1.0, 0.4472, 2.5)):
        u, m = pair(cosine, ratio, 1.0, shape)
        assert_near(combined(u, m, weight=rho, **variant), correct(u, m, weight=rho, **variant), scale=rho * u)
        case_names.add(examine(u, m, weight=rho, **variant)[2].case)
    assert case_names == {"kept", "damped", "turned"}


def test_algorithm_2_by_hand() -> None:
    """Numbers worked out on paper, with κ = 1 and ε = 0: for m = (2, 0), conf = ‖Δ‖ / (‖Δ‖ + 2)."""
    m, plain = vector(2, 0), {"kappa": 1.0, "eps": 0.0}
    agreeing, opposed, across = vector(3, 4), vector(-3, 4), vector(0, 6)
    assert_near(correct(agreeing, m, **plain), agreeing, scale=agreeing)  # c = .6
    beta = 0.5 * 0.6 * 5 / 7  # c = −.6: Δ − βc‖Δ‖m̂ = Δ + 3β m̂
    assert_near(correct(opposed, m, **plain), vector(-3 + 3 * beta, 4), scale=opposed)
    assert_near(correct(opposed, m, weight=0.2, **plain), 0.2 * vector(-3 + 3 * beta, 4), scale=opposed)
    before = 0.5 * 0.6 * 1 / 3  # ρΔ has the norm 1
    assert_near(correct(opposed, m, weight=0.2, weigh="before", **plain), vector(-0.6 + 0.6 * before, 0.8), scale=opposed)
    for reorient, lam in (("printed", 6 / 8), ("ramp", 0.5 * 6 / 8)):  # c = 0: slopes 1 and .2/.4
        mixed = vector(lam, 1 - lam)
        assert_near(correct(across, m, reorient=reorient, **plain), 6 * mixed / mixed.norm(), scale=across)  # type: ignore[arg-type]


CONSTANTS = [{"c_ok": 0.9, "k_s": 2.0, "k_d": 0.3}, {"kappa": 0.0, "beta_max": 1.0}, {"c_bad": -1.0, "eps": 0.3}, {"k_d": 5.0}]


@pytest.mark.parametrize("constants", CONSTANTS, ids=str)
def test_a_step_corrects_by_algorithm_2_with_other_constants(constants: dict[str, float]) -> None:
    for variant, cosine in itertools.product(VARIANTS, COSINES):
        u, m = pair(cosine, 0.5, 1.0, (3, 3))
        assert_near(
            combined(u, m, weight=0.7, **variant, **constants), correct(u, m, weight=0.7, **variant, **constants), scale=u
        )


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(v.values()))
def test_blocks_of_one_element_of_none_and_without_dimensions(variant: dict[str, Any]) -> None:
    for u, m in [(-0.3, 2.0), (0.3, 2.0), (0.0, 2.0), (0.3, 0.0)]:
        for shape in ((), (1,), (1, 1)):
            delta, momentum = torch.full(shape, u, dtype=F64), torch.full(shape, m, dtype=F64)
            assert_near(combined(delta, momentum, **variant), correct(delta, momentum, **variant), scale=delta)
    empty = torch.empty(0, 3, dtype=F64)
    assert combined(empty, empty, **variant).shape == (0, 3)


def test_layout_does_not_matter() -> None:
    for cosine in COSINES:
        u, m = pair(cosine, 1.0, 2.0, (2, 3, 4, 5))
        expected = correct(u, m)
        strided = torch.stack([u, u], dim=-1)[..., 0]
        for u_view, m_view in itertools.product((u, strided, u.to(memory_format=torch.channels_last)), (m, m.mT.contiguous().mT)):
            assert_near(combined(u_view, m_view), expected, scale=u)


# The lemma: Δ̂·v̂ ≥ u·v̂ and ‖Δ̂‖ ≤ ‖u‖, whatever the constants

EDGES = [-1.0, -1e-3, -1e-12, -1e-300, 0.0, 1e-300, 1e-12, 1e-3, 1.0]
NORMS = st.one_of(st.floats(-12, 6).map(lambda x: 10.0**x), st.sampled_from([1e-8, 1.0000001e-8, 0.9999999e-8, 1.0]))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, dict[str, Any]]:
    c_ok = draw(st.one_of(st.just(0.2), st.floats(-1, 1), st.just(1.0)))
    about_c_ok = [max(-1.0, min(1.0, c_ok + h)) for h in (-1e-3, -1e-12, -2e-16, 0, 2e-16, 1e-12)]
    cosine = draw(st.one_of(st.floats(-1, 1), st.sampled_from(EDGES + about_c_ok)))
    size = draw(st.integers(2, 9))
    u, m = pair(cosine, draw(NORMS), draw(NORMS), (size,), draw(st.integers(0, 2**31)))
    strengths = st.one_of(st.just(0.0), st.floats(0, 20))
    constants = {
        "reorient": draw(st.sampled_from(["printed", "ramp"])),
        "c_ok": c_ok,
        "k_s": draw(strengths),
        "k_d": draw(strengths),
        "kappa": draw(strengths),
        "beta_max": draw(st.floats(0, 1)),
        "eps": draw(st.sampled_from([0.0, 1e-8, 1e-3])),
        "c_bad": draw(st.floats(-1, -1e-3)) + min(c_ok, 0.0),
    }
    return u, m, constants


@settings(max_examples=300)
@given(cases())
def test_lemma(case: tuple[Tensor, Tensor, dict[str, Any]]) -> None:
    u, m, constants = case
    v_hat, length = m / m.norm(), float(u.norm())
    rounding = 16 * torch.finfo(F64).eps
    for corrected in (correct(u, m, **constants), combined(u, m, **constants)):
        assert float((corrected * v_hat).sum()) >= float((u * v_hat).sum()) - rounding * length
        assert float(corrected.norm()) <= length * (1 + rounding)
    outcome = examine(u, m, **constants)[2]
    if outcome.case in ("kept", "skipped"):
        assert torch.equal(corrected, u)
    if outcome.case == "damped":  # only the component along the momentum changes, and by the factor 1 − β
        along, after = (u * v_hat).sum() * v_hat, (corrected * v_hat).sum() * v_hat
        assert_near(corrected - after, u - along, scale=u)
        assert_near(after, (1 - outcome.strength) * along, scale=u)
        assert 0 <= outcome.strength <= constants["beta_max"]
    if outcome.case == "turned":
        assert float(corrected.norm()) == pytest.approx(length, rel=rounding)
        assert 0 <= outcome.strength <= 1


@settings(max_examples=300)
@given(cases(), st.sampled_from(["after", "before"]), st.floats(0.01, 3))
def test_a_step_corrects_by_algorithm_2_for_any_constants(
    case: tuple[Tensor, Tensor, dict[str, Any]], weigh: Any, rho: float
) -> None:
    u, m, constants = case
    outcome = examine(u, m, weight=rho, weigh=weigh, **constants)[2]
    sharp = [constants["c_ok"], 0.0]  # where c is within roundings of a jump, either side is right
    if outcome.cosine is not None and min(abs(outcome.cosine - edge) for edge in sharp) < 1e-14:
        return
    if any(abs(float(x.norm()) * w / max(constants["eps"], 1e-300) - 1) < 1e-14 for x in (u, m) for w in (1, rho)):
        return
    expected = correct(u, m, weight=rho, weigh=weigh, **constants)
    # λ multiplies the rounding of c by at most k_d/(c_ok − c_bad): the ramp may be steep
    steep = 1 + constants["k_d"] / (constants["c_ok"] - constants["c_bad"])
    assert_near(combined(u, m, weight=rho, weigh=weigh, **constants), expected, scale=rho * u, ulps=int(16 * steep))


# Where one case ends and the next begins, with numbers that are exact in binary


def vector(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=F64)


def test_from_c_ok_on_a_block_is_kept() -> None:
    u, m = vector(3, 4), vector(1, 0)  # c = 3/5
    assert examine(u, m, c_ok=0.6)[2].case == "kept"
    assert examine(u, m, c_ok=math.nextafter(0.6, 1))[2].case == "turned"
    assert torch.equal(combined(u, m, c_ok=0.6), u)


def test_from_zero_on_a_block_is_turned_and_below_it_damped() -> None:
    m = vector(1, 0)
    assert [examine(vector(x, 1), m)[2].case for x in (-1e-300, -0.0, 0.0, 1e-300)] == ["damped", "turned", "turned", "turned"]


def test_parallel_and_opposite_blocks() -> None:
    m = vector(0.1, 0.7, -0.3)
    assert examine(3 * m, m)[2].cosine == pytest.approx(1, abs=2.3e-16)
    assert examine(-3 * m, m)[2].cosine == pytest.approx(-1, abs=2.3e-16)
    assert torch.equal(combined(3 * m, m), 3 * m)
    opposite = examine(-3 * m, m)[2]
    assert_near(combined(-3 * m, m), -3 * m * (1 - opposite.strength), scale=3 * m)
    assert opposite.strength == pytest.approx(0.5 * 3 / (3 + 3), rel=1e-7)  # k_s conf


@pytest.mark.parametrize("tiny", ["pseudo-gradient", "momentum"])
def test_below_eps_the_block_is_skipped_and_at_eps_not(tiny: str) -> None:
    eps = 2.0**-27
    for norm, skipped in ((eps, False), (math.nextafter(eps, 0), True), (0.0, True)):
        u, m = vector(0, -norm), vector(0, 1)
        u, m = (u, m) if tiny == "pseudo-gradient" else (m, u)
        outcome = examine(u, m, eps=eps)[2]
        assert (outcome.case == "skipped") is skipped
        assert (outcome.cosine is None) is skipped
        assert (outcome.confidence is None) is skipped
        assert torch.equal(combined(u, m, eps=eps), u) is skipped


def test_eps_sees_the_weighted_block_only_when_weighed_before() -> None:
    u, m = vector(-1, 0), vector(1, 0)
    assert examine(u, m, weight=0.25, weigh="before", eps=0.5)[2].case == "skipped"
    assert examine(u, m, weight=0.25, weigh="after", eps=0.5)[2].case == "damped"


def test_without_eps_zeros_are_skipped_all_the_same() -> None:
    zero, one = vector(0, 0), vector(1, 0)
    assert examine(zero, one, eps=0.0)[2].case == "skipped"
    assert examine(one, zero, eps=0.0)[2].case == "skipped"
    assert torch.equal(combined(one, zero, eps=0.0), one)


def test_damping_takes_at_most_beta_max() -> None:
    u, m = vector(-2, 1), vector(1, 0)
    for beta_max in (0.0, 0.25, 1.0):
        assert examine(u, m, k_s=100.0, beta_max=beta_max)[2].strength == beta_max
        assert_near(combined(u, m, k_s=100.0, beta_max=beta_max), vector(-2 * (1 - beta_max), 1), scale=u, ulps=2)


@pytest.mark.parametrize("reorient", ["printed", "ramp"])
def test_turning_goes_at_most_as_far_as_the_momentum(reorient: Any) -> None:
    u, m = vector(0, 3), vector(2, 0)
    assert examine(u, m, k_d=100.0, reorient=reorient)[2].strength == 1
    assert_near(combined(u, m, k_d=100.0, reorient=reorient), vector(3, 0), scale=u, ulps=2)


def test_the_ramp_falls_to_zero_at_c_ok_and_the_printed_formula_jumps() -> None:
    for h in (1e-2, 1e-5, 1e-8, 1e-11):
        u, m = pair(0.2 - h, 1.0, 1.0, (5,))
        ramp, printed = (examine(u, m, reorient=r)[2] for r in ("ramp", "printed"))
        conf = 1 / (1 + 3 + 1e-8)
        assert ramp.case == printed.case == "turned"
        assert ramp.strength == pytest.approx(h / 0.4 * conf, abs=1e-15)
        assert printed.strength == pytest.approx((0.8 + h) * conf, rel=1e-14)
        assert float((combined(u, m, reorient="ramp") - u).norm()) < h
        assert float((combined(u, m, reorient="printed") - u).norm()) > 0.2


def test_at_cosine_zero_the_ramp_is_not_yet_full() -> None:
    assert examine(vector(0, 1), vector(1, 0), reorient="ramp", kappa=0.0, eps=0.0)[2].strength == pytest.approx(0.5, rel=1e-15)
    assert examine(vector(0, 1), vector(1, 0), reorient="printed", kappa=0.0, eps=0.0)[2].strength == 1


# Neutral constants

NEUTRAL = [{"c_ok": -1.0}, {"k_s": 0.0, "k_d": 0.0}, {"beta_max": 0.0, "k_d": 0.0}, {"kappa": 1e300}]


@pytest.mark.parametrize("constants", NEUTRAL, ids=str)
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(v.values()))
def test_neutral_constants_leave_every_block_alone(constants: dict[str, float], variant: dict[str, Any]) -> None:
    for cosine in COSINES:
        u, m = pair(cosine, 1.0, 2.0, (7,))
        assert torch.equal(combined(u, m, **variant, **constants), u)
        assert torch.equal(combined(u, m, weight=0.3, **variant, **constants), u * 0.3)


def test_weight_one_is_no_weight_and_weight_zero_leaves_nothing() -> None:
    for cosine, variant in itertools.product(COSINES, VARIANTS):
        u, m = pair(cosine, 1.0, 2.0, (7,))
        assert torch.equal(combined(u, m, weight=1.0, **variant), combined(u, m, reorient=variant["reorient"]))
        assert not combined(u, m, weight=0.0, **variant).any()


def test_weighing_after_scales_the_result_and_weighing_before_changes_the_confidence() -> None:
    u, m = pair(-0.5, 1.0, 2.0, (7,))
    after, before = (examine(u, m, weight=0.25, weigh=w)[2] for w in ("after", "before"))
    assert_near(combined(u, m, weight=0.25), 0.25 * combined(u, m), scale=u)
    assert after.confidence == pytest.approx(1 / (1 + 6 + 1e-8), rel=1e-15)
    assert before.confidence == pytest.approx(0.25 / (0.25 + 6 + 1e-8), rel=1e-15)
    assert after.cosine == pytest.approx(before.cosine, rel=1e-15)
    assert_near(combined(u, m, weight=0.25, weigh="before"), combined(0.25 * u, m), scale=u, ulps=4)


# What comes back


@pytest.mark.parametrize("cosine", [-0.6, 0.1, 0.5])
def test_the_outcome_holds_what_was_measured(cosine: float) -> None:
    u, m = pair(cosine, 0.7, 1.9, (3, 5))
    a, b, outcome = examine(u, m, weight=0.4)
    conf = 0.7 / (0.7 + 3 * 1.9 + 1e-8)
    strengths = {"damped": min(0.5 * -cosine * conf, 0.5), "turned": min((1 - cosine) * conf, 1), "kept": 0.0}
    assert outcome.case == ("damped" if cosine < 0 else "turned" if cosine < 0.2 else "kept")
    assert outcome.case in CASES
    assert outcome.cosine == pytest.approx(cosine, abs=1e-15)
    assert outcome.confidence == pytest.approx(conf, rel=1e-14)
    assert outcome.strength == pytest.approx(strengths[outcome.case], rel=1e-14)
    assert (outcome.pseudo_gradient_norm, outcome.momentum_norm) == pytest.approx((0.7, 1.9), rel=1e-14)
    assert_near(a * u + b * m, combined(u, m, weight=0.4), scale=u)


@pytest.mark.parametrize("cosine", [-0.6, 0.1, 0.5])
def test_inputs_stay_as_they_were(cosine: float) -> None:
    u, m = pair(cosine, 1.0, 1.0, (4, 4))
    u_before, m_before = u.clone(), m.clone()
    corrected = combined(u, m, weight=0.5)
    corrected.zero_()
    assert torch.equal(u, u_before)
    assert torch.equal(m, m_before)


def test_blocks_of_unlike_shape_are_refused() -> None:
    for function in (correct, examine):
        with pytest.raises(ValueError, match=r"shape \(2, 3\) and momentum \(3, 2\)"):
            function(torch.ones(2, 3), torch.ones(3, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_precisions_are_close_to_float64(dtype: torch.dtype) -> None:
    for cosine in (-0.6, 0.1, 0.5):
        u, m = pair(cosine, 1.0, 1.0, (50, 3))
        corrected = combined(u.to(dtype), m.float())
        assert corrected.dtype == dtype
        assert float((corrected.double() - correct(u, m)).norm()) < 4 * torch.finfo(dtype).eps


BAD: list[dict[str, Any]] = [
    {"reorient": "slerp"},
    {"weigh": "never"},
    *({name: value} for name in ("k_s", "k_d", "kappa", "eps") for value in (-0.1, math.inf, math.nan)),
    *({"beta_max": value} for value in (-0.1, 1.1, math.nan)),
    *({"c_ok": value} for value in (math.nan, math.inf, -math.inf)),
    *({"c_bad": value} for value in (math.nan, math.inf, -math.inf, 0.2, 0.3)),
]


@pytest.mark.parametrize("constants", BAD, ids=str)
def test_constants_outside_their_range_are_refused_in_a_sentence(constants: dict[str, Any]) -> None:
    [(name, value)] = constants.items()
    with pytest.raises(ValueError, match=r"\.$") as refusal:
        correction_constants(constants)
    assert name in str(refusal.value)
    assert str(value) in str(refusal.value)
