"""HeLoCo (the paper's Algorithm 1): MLA's step over the corrected pseudo-gradient, workers starting from the look-ahead model.

θ̄       = θ_r − η μ m_r                  what a worker starts from (Eq. dispatch)
G       = ρ · correct(Δ, m_t)             block by block (Algorithm 2, correction.py)
m_{t+1} = μ m_t + (1−μ) G                 (Eq. mom_update)
θ_{t+1} = θ_t − η (G + μ m_{t+1})         (Eq. theta_update)
"""

from typing import Any, Unpack

from torch import Tensor

from .constants import CORRECTION, CorrectionKnobs, HeLoCoKnobs, correction_constants
from .correction import correct, corrected_coefficients
from .kernels.coefficients import Coefficients
from .mla import MLA, mla_step
from .optimizer import OuterOptimizer


def heloco_start(theta: Tensor, m: Tensor, *, lr: float, momentum: float) -> Tensor:
    """What a worker starts from: θ̄."""
    return theta - lr * momentum * m


def heloco_step(
    theta: Tensor, m: Tensor, delta: Tensor, rho: float, *, lr: float, momentum: float, **constants: Unpack[CorrectionKnobs]
) -> tuple[Tensor, Tensor]:
    """One arrival on one block: (θ_{t+1}, m_{t+1})."""
    g = correct(delta, m, weight=rho, **constants)
    return mla_step(theta, m, g, 1.0, lr=lr, momentum=momentum)


class HeLoCo(MLA, knobs=HeLoCoKnobs, lookahead=True):
    """HeLoCo: block-corrected momentum look-ahead for asynchronous low-communication training.

    For each block (parameter tensor) of an arriving pseudo-gradient Δ, with the outer momentum m and the arrival weight ρ:

        G ← ρ · correct(Δ, m)          Algorithm 2: the block is kept, damped or turned by its cosine c with m
        m ← μm + (1−μ)G
        θ ← θ − η(G + μm)              and a worker starts from θ − ημm

        correct(Δ, m) = Δ                                     c ≥ c_ok, or a norm below ε
                        Δ − βc‖Δ‖ m/‖m‖                       c < 0,  β = min(k_s(−c)conf, β_max)
                        ‖Δ‖ũ/‖ũ‖, ũ = (1−λ)Δ/‖Δ‖ + λm/‖m‖     else,   λ = min(k_d(1−c)conf, 1)
        conf = ‖Δ‖ / (‖Δ‖ + κ‖m‖ + ε)

    There are two published forms. The default is the one printed in the paper (method `heloco`). The authors' public code has
    another λ, min(k_d(c_ok−c)/(c_ok−c_bad)·conf, 1), and applies ρ before the correction, G = correct(ρΔ, m):
    `HeLoCo(params, reorient="ramp", weigh="before")` (method `heloco-ramp`). The default
    of `heloco train` and `heloco.simulate`, `heloco-adaptive`, is the second form with η 1:

        outer = heloco.METHODS["heloco-adaptive"].build(params, workers=5)

    and its ρ grows during the run, from 1/K to 1/√K with K workers. An optimizer does not know how far the run is, so it cannot
    be the default of this class: give ρ to each `step(weight=…)`.

    Knobs, all of which can differ between parameter groups:

    {knobs}

    Example:

        outer = heloco.HeLoCo(model.parameters(), lr=0.7, momentum=0.9)
        start = outer.lookahead()                                      # what a worker trains from
        deltas = [a - b for a, b in zip(start, trained)]               # its pseudo-gradient
        outer.step(weight=workers**-0.5, pseudo_gradients=deltas)      # or set p.grad, and call step()
        outer.outcomes[0].case                                         # "kept", "damped", "turned" or "skipped"

    It is an outer optimizer like the others, so it fits any DiLoCo that takes a torch optimizer.
    """

    def __init__(self, params: Any, **knobs: Unpack[HeLoCoKnobs]) -> None:
        """`params`: the model's parameters, or groups of them. Each knob is a keyword."""
        OuterOptimizer.__init__(self, params, knobs)

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        correction_constants({name: group[name] for name in CORRECTION})

    def coefficients_of(self, group: dict[str, Any], weight: float) -> Coefficients:
        """The numbers of a parameter group that decide how its blocks are corrected and moved."""
        return corrected_coefficients(weight, (group[name] for name in CORRECTION), self._step_coefficients(group))
