"""Momentum look-ahead (MLA), Eq. 7 of Ajanthan et al. 2025.

    G       = ρΔ
    m_{t+1} = μ m_t + (1−μ) G
    θ_{t+1} = θ_t − η (G + μ m_{t+1})

The look-ahead lives in the step; a worker starts from θ. With `lookahead=True` it starts from θ − ημm, as HeLoCo's workers do:
the second of the four rules that separate HeLoCo's parts.
"""

from typing import Any

from .kernels import Passes
from .optimizer import Blocks, OuterOptimizer, momentum_step


class MLA(OuterOptimizer):
    in_one_go = True

    def __init__(self, params: Any, lr: float = 0.7, momentum: float = 0.9, *, lookahead: bool = False) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "lookahead": lookahead})

    def _gain(self, group: dict[str, Any]) -> float:
        return 1 - float(group["momentum"])

    def _apply(self, blocks: Blocks, passes: Passes) -> list[float]:
        return momentum_step(blocks, passes)
