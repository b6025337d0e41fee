"""Momentum look-ahead (MLA), Eq. 7 of Ajanthan et al. 2025.

    G       = ρΔ
    m_{t+1} = μ m_t + (1−μ) G
    θ_{t+1} = θ_t − η (G + μ m_{t+1})

The look-ahead lives in the step; a worker starts from θ. With `lookahead=True` it starts from θ − ημm, as HeLoCo's workers do:
the second of the four rules that separate HeLoCo's parts.
"""

from typing import Any, Unpack

from torch import Tensor

from .constants import LookaheadKnobs
from .kernels import BlockKernels
from .optimizer import Blocks, OuterOptimizer, momentum_step


def mla_step(theta: Tensor, m: Tensor, delta: Tensor, rho: float, *, lr: float, momentum: float) -> tuple[Tensor, Tensor]:
    """One arrival on one block: (θ_{t+1}, m_{t+1})."""
    g = rho * delta
    m = momentum * m + (1 - momentum) * g
    return theta - lr * (g + momentum * m), m


class MLA(OuterOptimizer, knobs=LookaheadKnobs):
    """Momentum look-ahead (MLA), Eq. 7 of Ajanthan et al. 2025.

        m ← μm + (1−μ)ρΔ
        θ ← θ − η(ρΔ + μm)

    Methods: `mla`, and `mla-lookahead`, whose workers start from θ − ημm.

    Knobs:

    {knobs}

    Example:

        outer = heloco.MLA(model.parameters(), lr=0.7, momentum=0.9)
        outer.step(weight=workers**-0.5, pseudo_gradients=deltas)
    """

    has_fused_step = True

    def __init__(self, params: Any, **knobs: Unpack[LookaheadKnobs]) -> None:
        """`params`: the model's parameters, or groups of them. Each knob is a keyword."""
        super().__init__(params, knobs)

    def _gain(self, group: dict[str, Any]) -> float:
        return 1 - float(group["momentum"])

    def _apply(self, blocks: Blocks, block_kernels: BlockKernels) -> list[float]:
        return momentum_step(blocks, block_kernels)
