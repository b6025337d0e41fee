"""The correction of all blocks at once is that of each block alone, to the bit."""

import math
from typing import Any

import numpy as np
import pytest

from heloco.outer import CASES, Outcome
from heloco.outer.constants import CORRECTION, correction_constants
from heloco.outer.correction import combine, combine_all, corrected_coefficients
from heloco.outer.kernels.coefficients import NAMES, coefficients
from support.equations import COSINES, VARIANTS

Constants = dict[str, Any]


def one_block(uu: float, mm: float, um: float, correction: Constants | None, weight: float) -> tuple[float, float, Outcome]:
    """(a, b, outcome) of a block in Python's numbers, one case after the other."""
    constants = correction_constants(correction or {})
    before, after = (weight, 1.0) if constants.weigh == "before" else (1.0, weight)
    norms = math.sqrt(uu), math.sqrt(mm)
    u, v = before * norms[0], norms[1]
    if u < constants.eps or v < constants.eps or u * v == 0:
        return weight, 0.0, Outcome("skipped", None, None, 0.0, *norms)
    c = max(-1.0, min(1.0, before * um / (u * v)))
    if correction is None:
        return weight, 0.0, Outcome("kept", c, None, 0.0, *norms)
    conf = u / (u + constants.kappa * v + constants.eps)
    if c >= constants.c_ok:
        return weight, 0.0, Outcome("kept", c, conf, 0.0, *norms)
    if c < 0:
        beta = min(constants.k_s * -c * conf, constants.beta_max)
        return weight, after * (-beta * c * u / v), Outcome("damped", c, conf, beta, *norms)
    slope = 1 - c if constants.reorient == "printed" else (constants.c_ok - c) / (constants.c_ok - constants.c_bad)
    lam = min(constants.k_d * slope * conf, 1.0)
    length = max(math.sqrt((1 - lam) * (1 - lam) + lam * lam + 2 * lam * (1 - lam) * c), constants.eps)
    return weight * (1 - lam) / length, after * (lam * u / (v * length)), Outcome("turned", c, conf, lam, *norms)


SETTINGS: list[Constants | None] = [
    None,
    *VARIANTS,
    {"eps": 0.0, "kappa": 0.0, "k_d": 5.0, "weigh": "before"},
    {"c_ok": 0.9, "c_bad": -0.9, "k_s": 4.0, "k_d": 3.0, "reorient": "ramp"},
    {"c_ok": 1e-300, "c_bad": -1e-300, "reorient": "ramp"},
    {"c_ok": -0.5, "c_bad": -0.5},
    {"c_ok": 2.0, "eps": 1.7, "beta_max": 0.1},
]


def coefficients_of(correction: Constants | None, weight: float) -> tuple[float, ...]:
    if correction is None:
        return coefficients(weight=weight)
    values = correction_constants(correction)
    return corrected_coefficients(weight, (getattr(values, name) for name in CORRECTION))


EXTREMES = [0.0, 5e-324, 1e-170, 1e-16, 1.0, 1e300, math.inf, math.nan]


@pytest.mark.parametrize("weight", [1.0, 0.0, 5**-0.5, 2.5])
def test_all_blocks_at_once_are_each_block_alone_to_the_bit(weight: float) -> None:
    """Every case, constants that differ from block to block, and sums beyond what a finite model has."""
    draw = np.random.default_rng(5)
    sums = [(u * u, m * m, u * m * c) for u, m, c in draw.uniform((0.01, 0.01, -1), (3, 3, 1), (500, 3)).tolist()]
    sums += [(u * u, 1.0, c * u) for u in (0.3, 7.0) for c in (*COSINES, 0.0, -0.0, 0.2)]
    sums += [(uu, mm, um) for uu in EXTREMES[:-2] for mm in EXTREMES for um in (0.0, -1e-200, 1.0, -1e300, math.inf, math.nan)]
    for shift in range(len(SETTINGS)):
        chosen = [SETTINGS[(i + shift) % len(SETTINGS)] for i in range(len(sums))]
        columns = np.array([coefficients_of(correction, weight) for correction in chosen]).T
        a, b, outcomes = combine_all(np.array(sums), columns)
        together = list(zip(a.tolist(), b.tolist(), outcomes, strict=True))
        alone = [one_block(*block_sums, correction, weight) for block_sums, correction in zip(sums, chosen, strict=True)]
        assert list(map(repr, together)) == list(map(repr, alone))  # which tells 0 from −0, and takes one NaN for another
        assert {outcome.case for outcome in outcomes} == set(CASES)
    assert repr(combine(*sums[0], weight, **VARIANTS[0])) == repr(one_block(*sums[0], VARIANTS[0], weight))


def test_no_blocks_are_combined_to_none() -> None:
    a, b, outcomes = combine_all(np.zeros((0, 3)), np.zeros((len(NAMES), 0)))
    assert (a.tolist(), b.tolist(), outcomes) == ([], [], [])
