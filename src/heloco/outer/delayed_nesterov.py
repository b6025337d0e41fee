"""Delayed Nesterov, Algorithm 3 of Liu et al. 2024: the momentum moves only at every N-th arrival.

    G = ρΔ, S = Σ of the last N of G; at every N-th arrival (t+1 divisible by N)
        m_{t+1} = μ m_t + S/N,   θ_{t+1} = θ_t − η [(1 − cN + c) μ m_{t+1} + G/N],   S = 0
    else
        m_{t+1} = m_t,           θ_{t+1} = θ_t − η [c μ m_{t+1} + G/N]

c in [0, 1/N] spreads the momentum's step over the arrivals in between; Liu's default is 0. N is the number of workers.
"""

from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from .constants import DelayKnobs
from .kernels import BlockKernels
from .kernels.portable import pieces
from .kernels.windows import Block, give_back
from .optimizer import Blocks, OuterOptimizer


def delayed_nesterov_step(
    theta: Tensor, m: Tensor, total: Tensor, delta: Tensor, rho: float, arrival: int,
    *, lr: float, momentum: float, delay: int, c: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One arrival on one block: (θ_{t+1}, m_{t+1}, S). `total` is S, and `arrival` is t+1."""
    g = rho * delta
    total = total + g
    if arrival % delay == 0:
        m = momentum * m + total / delay
        return theta - lr * ((1 - c * delay + c) * momentum * m + g / delay), m, torch.zeros_like(total)
    return theta - lr * (c * momentum * m + g / delay), m, total


class DelayedNesterov(OuterOptimizer, knobs=DelayKnobs):
    """Delayed Nesterov, Algorithm 3 of Liu et al. 2024: plain steps, and momentum at every N-th arrival.

        every N-th arrival    m ← μm + (Σ of the last N ρΔ)/N,  θ ← θ − η[(1 − cN + c)μm + ρΔ/N]
        else                  θ ← θ − η[cμm + ρΔ/N]

    Method: `delayed-nesterov`, with N = the number of workers.

    Knobs:

    {knobs}

    Example:

        outer = heloco.DelayedNesterov(model.parameters(), delay=workers)
        outer.step(pseudo_gradients=deltas)
    """

    def __init__(self, params: Any, **knobs: Unpack[DelayKnobs]) -> None:
        """`params`: the model's parameters, or groups of them. Each knob is a keyword."""
        super().__init__(params, knobs)

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        delay, c = group["delay"], group["c"]
        if c > 1 / delay:
            raise ValueError(f"c is {c!r}: it must lie between 0 and 1/delay = {1 / delay:g}.")

    def _apply(self, blocks: Blocks, block_kernels: BlockKernels) -> list[float]:
        tensors = zip(blocks.parameters, blocks.momenta, blocks.pseudo_gradients, strict=True)
        settings = zip(blocks.states, [self.param_groups[i] for i in blocks.group_of], blocks.a.tolist(), strict=True)
        turns = []
        for block, setting in zip(tensors, settings, strict=True):
            turns.append(self._move(*block, *setting))
            give_back(block[2], blocks.release)
        # η‖G/N + share·μm‖ from the sums with the momentum as it is now
        uu, mm, um = (block_kernels.statistics() if any(turn for turn, _ in turns) else blocks.sums).T
        lr, mu = blocks.coefficients[:2]
        x, y = blocks.a / [self.param_groups[i]["delay"] for i in blocks.group_of], mu * [share for _, share in turns]
        square = x * x * uu + 2 * x * y * um + y * y * mm
        lengths: list[float] = (lr * np.sqrt(np.maximum(square, 0.0))).tolist()
        return lengths

    @staticmethod
    def _move(p: Tensor, m: Tensor, u: Block, state: dict[str, Any], group: dict[str, Any], rho: float) -> tuple[bool, float]:
        """Whether it was the momentum's turn, and its share of the step."""
        n, c, mu, lr = group["delay"], group["c"], group["momentum"], group["lr"]
        total = state.setdefault("pseudo_gradient_sum", torch.zeros_like(m))
        state["arrivals"] = state.get("arrivals", 0) + 1
        is_turn = state["arrivals"] % n == 0
        share = 1 - c * n + c if is_turn else c
        for theta, momentum, delta, gathered in pieces(p, m, u, total):
            step = delta.to(m.dtype) * rho  # rounded before it is added, here and below: `alpha=` may fuse the two
            gathered.add_(step)
            if is_turn:
                momentum.mul_(mu).add_(gathered * (1 / n))
                gathered.zero_()
            step.mul_(1 / n).add_(momentum * (share * mu)).mul_(lr)
            theta.sub_(step)
        return is_turn, share
