"""HeLoCo's block correction (the paper's Algorithm 2): keep, damp or turn each block of a pseudo-gradient.

`correct` is the algorithm itself. With c = Δ·m / (‖Δ‖‖m‖) and conf = ‖Δ‖ / (‖Δ‖ + κ‖m‖ + ε):

    skipped  ‖Δ‖ < ε or ‖m‖ < ε     Δ̂ = Δ
    kept     c ≥ c_ok                Δ̂ = Δ
    damped   c < 0                   Δ̂ = Δ − β c ‖Δ‖ m/‖m‖,            β = min(k_s (−c) conf, β_max)
    turned   0 ≤ c < c_ok            Δ̂ = ‖Δ‖ ũ / max(‖ũ‖, ε),          ũ = (1−λ) Δ/‖Δ‖ + λ m/‖m‖

The paper's text and its authors' public code differ in λ and in when the arrival weight ρ comes in; both are here by name:

    reorient="printed"   λ = min(k_d (1−c) conf, 1)                                      (Eq. lambda; jumps at c_ok)
    reorient="ramp"      λ = min(k_d (c_ok−c)/(c_ok−c_bad) conf, 1)                      (falls to 0 at c_ok)
    weigh="after"        G = ρ·correct(Δ, m)
    weigh="before"       G = correct(ρΔ, m)

Every case leaves a combination G = a·Δ + b·m, and a and b follow from the three sums Δ·Δ, m·m and Δ·m of the block. That is how
the steps do it, for all blocks at once (`combine_all`), without a temporary the size of a block.
"""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, Unpack

import numpy as np
from torch import Tensor

from . import kernels
from .constants import CORRECTION, CorrectionKnobs, correction_constants
from .kernels import Numbers
from .kernels.coefficients import CONSTANTS, NAMES, Coefficients, coefficients

Case = Literal["kept", "damped", "turned", "skipped"]
CASES: tuple[Case, ...] = ("kept", "damped", "turned", "skipped")


def correct(pseudo_gradient: Tensor, momentum: Tensor, *, weight: float = 1.0, **constants: Unpack[CorrectionKnobs]) -> Tensor:
    """G of one block: Algorithm 2, line by line. `weight` is ρ. See `heloco.HeLoCo` for the constants."""
    _check_shapes(pseudo_gradient, momentum)
    k = correction_constants(constants)
    before, after = (weight, 1.0) if k.weigh == "before" else (1.0, weight)
    u, v = before * pseudo_gradient, momentum
    u_norm, v_norm = float(u.norm()), float(v.norm())
    if u_norm < k.eps or v_norm < k.eps or u_norm * v_norm == 0:
        return after * u  # skipped
    u_hat, v_hat = u / u_norm, v / v_norm
    c = max(-1.0, min(1.0, float((u_hat * v_hat).sum())))
    conf = u_norm / (u_norm + k.kappa * v_norm + k.eps)
    if c >= k.c_ok:
        return after * u  # kept
    if c < 0:
        beta: float = min(k.k_s * -c * conf, k.beta_max)
        return after * (u - beta * c * u_norm * v_hat)  # damped
    slope = (k.c_ok - c) / (k.c_ok - k.c_bad) if k.reorient == "ramp" else 1 - c
    lam: float = min(k.k_d * slope * conf, 1.0)
    u_tilde = (1 - lam) * u_hat + lam * v_hat
    length: float = max(float(u_tilde.norm()), k.eps)
    return after * u_norm * u_tilde / length  # turned


class Outcome(NamedTuple):
    """What the correction did to one block."""

    case: Case
    cosine: float | None
    """c, or None if a norm was below ε."""
    confidence: float | None
    strength: float
    """β of a damped block, λ of a turned one, else 0."""
    pseudo_gradient_norm: float
    momentum_norm: float


def examine(
    pseudo_gradient: Tensor, momentum: Tensor, *, weight: float = 1.0, **constants: Unpack[CorrectionKnobs]
) -> tuple[float, float, Outcome]:
    """(a, b, outcome) of one block: what a step does to it, G = a·Δ + b·m."""
    _check_shapes(pseudo_gradient, momentum)
    u, m = pseudo_gradient.detach(), momentum.detach()
    [(uu, mm, um)] = kernels.BlockKernels([m], [m], [u]).statistics().tolist()
    return combine(uu, mm, um, weight, **constants)


def _check_shapes(pseudo_gradient: Tensor, momentum: Tensor) -> None:
    if pseudo_gradient.shape != momentum.shape:
        raise ValueError(
            f"pseudo_gradient has shape {tuple(pseudo_gradient.shape)} and momentum {tuple(momentum.shape)}: they must be alike."
        )


# ---- from the sums of blocks to their combinations


def combine(
    uu: float, mm: float, um: float, weight: float = 1.0, **constants: Unpack[CorrectionKnobs]
) -> tuple[float, float, Outcome]:
    """(a, b, outcome) such that G = a·Δ + b·m, from a block's sums Δ·Δ, m·m, Δ·m."""
    values = correction_constants(constants)
    block_coefficients = corrected_coefficients(weight, (getattr(values, name) for name in CORRECTION))
    a, b, [outcome] = combine_all(np.array([[uu, mm, um]]), np.array([block_coefficients]).T)
    return float(a[0]), float(b[0]), outcome


def corrected_coefficients(weight: float, constants: Iterable[Any], step: Coefficients = (0.0, 0.0, 0.0)) -> Coefficients:
    """The coefficients of a block that is corrected with these constants, in the order of their declaration."""
    is_weighed_before, correction = _checked(*constants)
    return coefficients(step, weight=weight, is_weighed_before=is_weighed_before, correction=correction)


@lru_cache(maxsize=64)  # the same in every step
def _checked(*constants: Any) -> tuple[bool, Coefficients]:
    k = correction_constants(dict(zip(CORRECTION, constants, strict=True)))
    return k.weigh == "before", (*(float(getattr(k, name)) for name in CONSTANTS), float(k.reorient == "ramp"))


@np.errstate(all="ignore")  # a block that is skipped has no cosine
def combine_all(sums: Numbers, columns: Numbers) -> tuple[Numbers, Numbers, list[Outcome]]:
    """(a, b, outcomes) of all blocks: from a row of sums for each, and a column of coefficients for each."""
    k, um, (pseudo_gradient_norm, momentum_norm) = _by_name(columns), sums[:, 2], np.sqrt(sums[:, :2]).T
    u, v = k.before * pseudo_gradient_norm, momentum_norm  # ‖Δ‖ (‖ρΔ‖ when weighed before) and ‖m‖
    uv = u * v
    c = np.fmax(np.fmin(k.before * um / uv, 1.0), -1.0)  # NaN (momentum not finite) becomes 1: the block is kept
    conf = u / (u + k.kappa * v + k.eps)

    is_skipped = (np.fmin(u, v) < k.eps) | (uv == 0)
    is_corrected = (c < k.c_ok) & ~is_skipped
    a, b, strength, case = np.array(k.weight), np.zeros(len(sums)), np.zeros(len(sums)), 3 * is_skipped
    if is_corrected.any():
        is_opposed = c < 0
        for is_case, number, change in ((is_corrected & is_opposed, 1, _damp), (is_corrected & ~is_opposed, 2, _turn)):
            case[is_case] = number
            measures = u[is_case], v[is_case], c[is_case], conf[is_case]
            a[is_case], b[is_case], strength[is_case] = change(*measures, _by_name(columns[:, is_case]))

    cosines, confidences = c.tolist(), conf.tolist()
    for i in np.flatnonzero(is_skipped).tolist():
        cosines[i] = confidences[i] = None
    for i in np.flatnonzero(k.c_ok == -math.inf).tolist():
        confidences[i] = None
    cases = map(CASES.__getitem__, case.tolist())
    fields = cases, cosines, confidences, strength.tolist(), pseudo_gradient_norm.tolist(), momentum_norm.tolist()
    return a, b, list(map(_outcome, zip(*fields, strict=True)))


def _by_name(columns: Numbers) -> SimpleNamespace:
    """Each coefficient as an array with a number for each block."""
    return SimpleNamespace(**dict(zip(NAMES, columns, strict=True)))


def _damp(u: Numbers, v: Numbers, c: Numbers, conf: Numbers, k: SimpleNamespace) -> tuple[Numbers, Numbers, Numbers]:
    """(a, b, β) of blocks that oppose the momentum."""
    beta = np.minimum(k.k_s * -c * conf, k.beta_max)
    return k.weight, k.after * (-beta * c * u / v), beta


def _turn(u: Numbers, v: Numbers, c: Numbers, conf: Numbers, k: SimpleNamespace) -> tuple[Numbers, Numbers, Numbers]:
    """(a, b, λ) of blocks that agree weakly with the momentum."""
    slope = np.where(k.ramp, (k.c_ok - c) / (k.c_ok - k.c_bad), 1 - c)
    lam = np.minimum(k.k_d * slope * conf, 1.0)
    length = np.sqrt((1 - lam) * (1 - lam) + lam * lam + 2 * lam * (1 - lam) * c)  # ‖ũ‖ of two unit vectors at cosine c
    length = np.maximum(length, k.eps)
    return k.weight * (1 - lam) / length, k.after * (lam * u / (v * length)), lam


_outcome: Callable[[tuple[Any, ...]], Outcome] = partial(tuple.__new__, Outcome)  # `_make` without a call in Python for each
