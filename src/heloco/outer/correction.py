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
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypedDict, Unpack

from torch import Tensor

from . import kernels

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
    eps = 1e-8 if correction is None else correction.eps
    before = weight if correction is not None and correction.weigh == "before" else 1.0
    after = 1.0 if correction is not None and correction.weigh == "before" else weight
    norms = math.sqrt(uu), math.sqrt(mm)
    u, v = before * norms[0], norms[1]  # ‖Δ‖ (‖ρΔ‖ when weighed before) and ‖m‖

    if u < eps or v < eps or u * v == 0:
        return weight, 0.0, Outcome("skipped", None, None, 0.0, *norms)
    c = max(-1.0, min(1.0, before * um / (u * v)))
    if correction is None:
        return weight, 0.0, Outcome("kept", c, None, 0.0, *norms)
    conf = u / (u + correction.kappa * v + eps)
    if c >= correction.c_ok:
        return weight, 0.0, Outcome("kept", c, conf, 0.0, *norms)
    if c < 0:
        beta = min(correction.k_s * -c * conf, correction.beta_max)
        return weight, after * (-beta * c * u / v), Outcome("damped", c, conf, beta, *norms)
    ramp = (correction.c_ok - c) / (correction.c_ok - correction.c_bad)
    slope = 1 - c if correction.reorient == "printed" else ramp
    lam = min(correction.k_d * slope * conf, 1.0)
    length = math.sqrt((1 - lam) ** 2 + lam**2 + 2 * lam * (1 - lam) * c)  # ‖ũ‖ of two unit vectors at cosine c
    length = max(length, eps)
    return weight * (1 - lam) / length, after * (lam * u / (v * length)), Outcome("turned", c, conf, lam, *norms)


def correct(pseudo_gradient: Tensor, momentum: Tensor, *, weight: float = 1.0, **constants: Unpack[Constants]) -> Tensor:
    """G = ρ·correct(Δ, m) of one block (Algorithm 2), as a new tensor. `constants` are the fields of `Correction`."""
    a, b, _ = examine(pseudo_gradient, momentum, weight=weight, **constants)
    corrected = pseudo_gradient * a
    return corrected.add_(momentum, alpha=b) if b else corrected


def examine(
    pseudo_gradient: Tensor, momentum: Tensor, *, weight: float = 1.0, **constants: Unpack[Constants]
) -> tuple[float, float, Outcome]:
    """(a, b, outcome) of one block: what `correct` would do, G = a·Δ + b·m."""
    if pseudo_gradient.shape != momentum.shape:
        raise ValueError(
            f"pseudo_gradient has shape {tuple(pseudo_gradient.shape)} and momentum {tuple(momentum.shape)}: they must be alike."
        )
    u, m = pseudo_gradient.detach(), momentum.detach()
    [(uu, mm, um)] = kernels.Passes([m], [m], [u]).statistics()
    return combine(uu, mm, um, Correction(**constants), weight)
