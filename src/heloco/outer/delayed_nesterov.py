"""Delayed Nesterov, Algorithm 3 of Liu et al. 2024: the momentum moves only at every N-th arrival.

    G = ρΔ, S = Σ of the last N of G; at every N-th arrival (t+1 divisible by N)
        m_{t+1} = μ m_t + S/N,   θ_{t+1} = θ_t − η [(1 − cN + c) μ m_{t+1} + G/N],   S = 0
    else
        m_{t+1} = m_t,           θ_{t+1} = θ_t − η [c μ m_{t+1} + G/N]

c in [0, 1/N] spreads the momentum's step over the arrivals in between; Liu's default is 0. N is the number of workers.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .kernels import Passes
from .kernels.portable import pieces
from .optimizer import Blocks, OuterOptimizer


class DelayedNesterov(OuterOptimizer):
    def __init__(self, params: Any, lr: float = 0.7, momentum: float = 0.9, *, delay: int = 5, c: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "delay": delay, "c": c})

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        delay, c = group["delay"], group["c"]
        if delay < 1:
            raise ValueError(f"delay is {delay!r}: the momentum must move at every N-th arrival, N ≥ 1.")
        if not 0 <= c <= 1 / delay:
            raise ValueError(f"c is {c!r}: it must lie between 0 and 1/delay = {1 / delay:g}.")

    def _apply(self, blocks: Blocks, passes: Passes) -> list[float]:
        tensors = zip(blocks.parameters, blocks.momenta, blocks.pseudo_gradients, strict=True)
        settings = zip(blocks.states, [self.param_groups[i] for i in blocks.group_of], blocks.a.tolist(), strict=True)
        turns = [self._move(*of_block, *how) for of_block, how in zip(tensors, settings, strict=True)]
        # η‖G/N + share·μm‖ from the sums with the momentum as it is now
        uu, mm, um = (passes.statistics() if any(turn for turn, _ in turns) else blocks.sums).T
        lr, mu = blocks.laws[:2]
        x, y = blocks.a / [self.param_groups[i]["delay"] for i in blocks.group_of], mu * [share for _, share in turns]
        square = x * x * uu + 2 * x * y * um + y * y * mm
        lengths: list[float] = (lr * np.sqrt(np.maximum(square, 0.0))).tolist()
        return lengths

    @staticmethod
    def _move(p: Tensor, m: Tensor, u: Tensor, state: dict[str, Any], group: dict[str, Any], rho: float) -> tuple[bool, float]:
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
