"""HeLoCo's block correction (the paper's Algorithm 2): keep, damp or turn each block of a pseudo-gradient.

Every case of the algorithm leaves a combination a·Δ + b·m of the block and the momentum, so the correction needs only the three
sums Δ·Δ, m·m and Δ·m of a block. With c = Δ·m / (‖Δ‖‖m‖) and conf = ‖Δ‖ / (‖Δ‖ + κ‖m‖ + ε):

    skipped  ‖Δ‖ < ε or ‖m‖ < ε     Δ̂ = Δ
    kept     c ≥ c_ok                Δ̂ = Δ
    damped   c < 0                   Δ̂ = Δ − β c ‖Δ‖ m/‖m‖,            β = min(k_s (−c) conf, β_max)
    turned   0 ≤ c < c_ok            Δ̂ = ‖Δ‖ ũ / max(‖ũ‖, ε),          ũ = (1−λ) Δ/‖Δ‖ + λ m/‖m‖

The paper's text and its authors' public code differ in λ and in when the arrival weight ρ comes in; both are here by name:

    reorient="printed"   λ = min(k_d (1−c) conf, 1)                                      (Eq. lambda; jumps at c_ok)
    reorient="ramp"      λ = min(k_d (c_ok−c)/(c_ok−c_bad) conf, 1), c_bad = −0.2        (falls to 0 at c_ok)
    weigh="after"        G = ρ·correct(Δ, m)
    weigh="before"       G = correct(ρΔ, m)
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import numpy as np
from torch import Tensor

from . import kernels
from .kernels import NO_CORRECTION, Law, Numbers

Case = Literal["kept", "damped", "turned", "skipped"]
CASES: tuple[Case, ...] = ("kept", "damped", "turned", "skipped")


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """The correction's constants; the defaults are the paper's."""

    reorient: Literal["printed", "ramp"] = "printed"
    """Which λ turns weakly aligned blocks: the paper's text or the authors' code."""
    weigh: Literal["after", "before"] = "after"
    """Whether the arrival weight ρ is applied after the correction (paper) or before it (authors' code)."""
    c_ok: float = 0.2
    """Cosine from which a block is kept as it is."""
    k_s: float = 0.5
    """Strength of damping blocks that oppose the momentum."""
    k_d: float = 1.0
    """Strength of turning blocks that agree weakly."""
    kappa: float = 3.0
    """How much the momentum's norm lowers the confidence in a block."""
    beta_max: float = 0.5
    """The most of the opposing component that damping removes."""
    eps: float = 1e-8
    """Norm below which a direction is not trusted and the block is skipped."""
    c_bad: float = -0.2
    """Cosine at which the ramp would reach k_d·conf; used by reorient="ramp" alone."""

    def __post_init__(self) -> None:
        for name, known in (("reorient", ("printed", "ramp")), ("weigh", ("after", "before"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}: choose one of {', '.join(known)}.")
        for name in ("k_s", "k_d", "kappa", "eps"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)!r}: it must be a finite number ≥ 0.")
        if not 0 <= self.beta_max <= 1:
            raise ValueError(f"beta_max is {self.beta_max!r}: it must lie between 0 and 1, or damping would overshoot.")
        if not (math.isfinite(self.c_ok) and math.isfinite(self.c_bad) and self.c_bad < max(self.c_ok, 0)):
            raise ValueError(f"c_ok is {self.c_ok!r} and c_bad {self.c_bad!r}: both must be finite and c_bad below c_ok.")


class Constants(TypedDict, total=False):
    """The fields of `Correction` as keywords."""

    reorient: Literal["printed", "ramp"]
    weigh: Literal["after", "before"]
    c_ok: float
    k_s: float
    k_d: float
    kappa: float
    beta_max: float
    eps: float
    c_bad: float


class Outcome(NamedTuple):
    """What the correction did to one block."""

    case: Case
    cosine: float | None
    """c, or None where a norm was below ε."""
    confidence: float | None
    strength: float
    """β of a damped block, λ of a turned one, else 0."""
    pseudo_gradient_norm: float
    momentum_norm: float


def combine(uu: float, mm: float, um: float, correction: Correction | None, weight: float = 1.0) -> tuple[float, float, Outcome]:
    """(a, b, outcome) such that G = a·Δ + b·m, from a block's sums Δ·Δ, m·m, Δ·m. Without a correction: a = ρ, b = 0."""
    a, b, [outcome] = combine_all(np.array([[uu, mm, um]]), np.array([law(correction, weight)], dtype=np.float64).T)
    return float(a[0]), float(b[0]), outcome


@lru_cache(maxsize=64)
def law(correction: Correction | None, weight: float) -> Law:
    """A correction and the arrival weight ρ in numbers alone, still without the rule's own (lr, mu, gain)."""
    if correction is None:
        return NO_CORRECTION._replace(weight=weight)
    before, after = (weight, 1.0) if correction.weigh == "before" else (1.0, weight)
    constants = {name: getattr(correction, name) for name in ("c_ok", "k_s", "k_d", "kappa", "beta_max", "eps", "c_bad")}
    ramp = correction.reorient == "ramp"
    return NO_CORRECTION._replace(weight=weight, before=before, after=after, ramp=ramp, **constants)


@np.errstate(all="ignore")  # a block that is skipped has no cosine
def combine_all(sums: Numbers, laws: Numbers) -> tuple[Numbers, Numbers, list[Outcome]]:
    """`combine` for all blocks at once: (a, b, outcomes) from rows of sums, and columns of the fields of laws."""
    of, um, (pseudo_gradient_norm, momentum_norm) = Law(*laws), sums[:, 2], np.sqrt(sums[:, :2]).T
    u, v = of.before * pseudo_gradient_norm, momentum_norm  # ‖Δ‖ (‖ρΔ‖ when weighed before) and ‖m‖
    uv = u * v
    c = np.fmax(np.fmin(of.before * um / uv, 1.0), -1.0)  # 1 where there is none, for the momentum is not finite
    conf = u / (u + of.kappa * v + of.eps)

    skipped = (np.fmin(u, v) < of.eps) | (uv == 0)
    corrected = (c < of.c_ok) & ~skipped
    a, b, strength, case = np.array(of.weight), np.zeros(len(sums)), np.zeros(len(sums)), 3 * skipped
    if corrected.any():
        opposed = c < 0
        for chosen, number, change in ((corrected & opposed, 1, _damp), (corrected & ~opposed, 2, _turn)):
            case[chosen] = number
            some, of_some = (u[chosen], v[chosen], c[chosen], conf[chosen]), Law(*laws[:, chosen])
            a[chosen], b[chosen], strength[chosen] = change(*some, of_some)

    cosines, confidences = c.tolist(), conf.tolist()
    for i in np.flatnonzero(skipped).tolist():
        cosines[i] = confidences[i] = None
    for i in np.flatnonzero(of.c_ok == -math.inf).tolist():
        confidences[i] = None
    cases = map(CASES.__getitem__, case.tolist())
    columns = cases, cosines, confidences, strength.tolist(), pseudo_gradient_norm.tolist(), momentum_norm.tolist()
    return a, b, list(map(_outcome, zip(*columns, strict=True)))


def _damp(u: Numbers, v: Numbers, c: Numbers, conf: Numbers, of: Any) -> tuple[Numbers, Numbers, Numbers]:
    """(a, b, β) of blocks that oppose the momentum. `of` is their laws, each field an array."""
    beta = np.minimum(of.k_s * -c * conf, of.beta_max)
    return of.weight, of.after * (-beta * c * u / v), beta


def _turn(u: Numbers, v: Numbers, c: Numbers, conf: Numbers, of: Any) -> tuple[Numbers, Numbers, Numbers]:
    """(a, b, λ) of blocks that agree weakly with the momentum."""
    slope = np.where(of.ramp, (of.c_ok - c) / (of.c_ok - of.c_bad), 1 - c)
    lam = np.minimum(of.k_d * slope * conf, 1.0)
    length = np.sqrt((1 - lam) * (1 - lam) + lam * lam + 2 * lam * (1 - lam) * c)  # ‖ũ‖ of two unit vectors at cosine c
    length = np.maximum(length, of.eps)
    return of.weight * (1 - lam) / length, of.after * (lam * u / (v * length)), lam


_outcome: Callable[[tuple[Any, ...]], Outcome] = partial(tuple.__new__, Outcome)  # `_make` without a call in Python for each


def correct(pseudo_gradient: Tensor, momentum: Tensor, *, weight: float = 1.0, **constants: Unpack[Constants]) -> Tensor:
    """G = ρ·correct(Δ, m) of one block (Algorithm 2), as a new tensor. `constants` are the fields of `Correction`."""
    a, b, _ = examine(pseudo_gradient, momentum, weight=weight, **constants)
    corrected = pseudo_gradient * a
    return corrected.add_(momentum * b) if b else corrected


def examine(
    pseudo_gradient: Tensor, momentum: Tensor, *, weight: float = 1.0, **constants: Unpack[Constants]
) -> tuple[float, float, Outcome]:
    """(a, b, outcome) of one block: what `correct` would do, G = a·Δ + b·m."""
    if pseudo_gradient.shape != momentum.shape:
        raise ValueError(
            f"pseudo_gradient has shape {tuple(pseudo_gradient.shape)} and momentum {tuple(momentum.shape)}: they must be alike."
        )
    u, m = pseudo_gradient.detach(), momentum.detach()
    [(uu, mm, um)] = kernels.Passes([m], [m], [u]).statistics().tolist()
    return combine(uu, mm, um, Correction(**constants), weight)
