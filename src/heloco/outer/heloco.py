"""HeLoCo (the paper's Algorithm 1): MLA's step over the corrected pseudo-gradient, workers starting from the look-ahead model.

    θ̄       = θ_r − η μ m_r                  what a worker starts from (Eq. dispatch)
    G       = ρ · correct(Δ, m_t)             block by block (Algorithm 2, correction.py)
    m_{t+1} = μ m_t + (1−μ) G                 (Eq. mom_update)
    θ_{t+1} = θ_t − η (G + μ m_{t+1})         (Eq. theta_update)

An outer rule like the others: it fits any DiLoCo that takes a torch optimizer.
"""

from functools import lru_cache
from typing import Any, Literal

from .correction import Correction
from .mla import MLA

CONSTANTS = ("reorient", "weigh", "c_ok", "k_s", "k_d", "kappa", "beta_max", "eps", "c_bad")


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
    ) -> None:
        given = locals()
        super().__init__(params, lr, momentum, lookahead=lookahead)
        for name in CONSTANTS:  # beside lr and momentum, so that each can be set per parameter group
            self.defaults[name] = given[name]
        for group in self.param_groups:
            for name in CONSTANTS:
                group.setdefault(name, given[name])
            self._correction(group)  # refuses constants outside their range

    def _correction(self, group: dict[str, Any]) -> Correction:
        return _checked(*(group[name] for name in CONSTANTS))


@lru_cache(maxsize=64)
def _checked(*constants: Any) -> Correction:
    """The same in every step: looked at once."""
    return Correction(**dict(zip(CONSTANTS, constants, strict=True)))
