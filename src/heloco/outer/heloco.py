"""HeLoCo (the paper's Algorithm 1): MLA's step over the corrected pseudo-gradient, workers starting from the look-ahead model.

    θ̄       = θ_r − η μ m_r                  what a worker starts from (Eq. dispatch)
    G       = ρ · correct(Δ, m_t)             block by block (Algorithm 2, correction.py)
    m_{t+1} = μ m_t + (1−μ) G                 (Eq. mom_update)
    θ_{t+1} = θ_t − η (G + μ m_{t+1})         (Eq. theta_update)

With k_fresh or k_stale given, how strongly a block is corrected depends on how stale the whole contribution is. A contribution is
fresh while no more than one cycle of the K workers passed since its dispatch, τ ≤ K:

    s       = k_fresh + k_stale · max(0, 1 − K/τ)
    c_ok, k_d, k_s  ←  s·c_ok, s·k_d, s·k_s

s is continuous in τ and approaches k_fresh + k_stale. k_fresh = 1, k_stale = 0 is the correction as it is; s = 0 is none.
`step(age=τ/K)` says how stale a contribution is.

An outer rule like the others: it fits any DiLoCo that takes a torch optimizer.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

from .correction import Correction
from .mla import MLA

CONSTANTS = ("reorient", "weigh", "c_ok", "k_s", "k_d", "kappa", "beta_max", "eps", "c_bad")
STRENGTHS = ("k_fresh", "k_stale")
SETTINGS = (*CONSTANTS, *STRENGTHS)


class HeLoCo(MLA):
    def __init__(
        self,
        params: Any,
        lr: float = 0.7,
        momentum: float = 0.9,
        *,
        lookahead: bool = True,
        reorient: Literal["printed", "ramp"] = "printed",
        weigh: Literal["after", "before"] = "after",
        c_ok: float = 0.2,
        k_s: float = 0.5,
        k_d: float = 1.0,
        kappa: float = 3.0,
        beta_max: float = 0.5,
        eps: float = 1e-8,
        c_bad: float = -0.2,
        k_fresh: float | None = None,
        k_stale: float | None = None,
    ) -> None:
        given = locals()
        super().__init__(params, lr, momentum, lookahead=lookahead)
        for name in SETTINGS:  # beside lr and momentum, so that each can be set per parameter group
            self.defaults[name] = given[name]
        for group in self.param_groups:
            for name in SETTINGS:
                group.setdefault(name, given[name])
            self._correction(group)  # refuses constants outside their range
            strength(0.0, group["k_fresh"], group["k_stale"])

    def _correction(self, group: dict[str, Any], age: float = 0.0) -> Correction:
        correction = _checked(*(group[name] for name in CONSTANTS))
        if group["k_fresh"] is None and group["k_stale"] is None:
            return correction
        return _scaled(correction, strength(age, group["k_fresh"], group["k_stale"]))


def strength(age: float, k_fresh: float | None = None, k_stale: float | None = None) -> float:
    """s = k_fresh + k_stale · max(0, 1 − 1/age), age = τ/K. Not given, k_fresh is 1 and k_stale 0."""
    fresh, stale = 1.0 if k_fresh is None else k_fresh, 0.0 if k_stale is None else k_stale
    for name, value in (("k_fresh", fresh), ("k_stale", stale)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r}: it must be a finite number ≥ 0.")
    return fresh + stale * max(0.0, 1 - 1 / age) if age > 0 else fresh


@lru_cache(maxsize=1024)
def _scaled(correction: Correction, s: float) -> Correction:
    return replace(correction, c_ok=s * correction.c_ok, k_d=s * correction.k_d, k_s=s * correction.k_s)


@lru_cache(maxsize=64)
def _checked(*constants: Any) -> Correction:
    """The same in every step: looked at once."""
    return Correction(**dict(zip(CONSTANTS, constants, strict=True)))
