"""Delayed Nesterov, Algorithm 3 of Liu et al. 2024: the momentum moves only at every N-th arrival.

    G = ρΔ, S = Σ of the last N of G; at every N-th arrival (t+1 divisible by N)
        m_{t+1} = μ m_t + S/N,   θ_{t+1} = θ_t − η [(1 − cN + c) μ m_{t+1} + G/N],   S = 0
    else
        m_{t+1} = m_t,           θ_{t+1} = θ_t − η [c μ m_{t+1} + G/N]

c in [0, 1/N] spreads the momentum's step over the arrivals in between; Liu's default is 0. N is the number of workers.
"""

from typing import Any

import torch
from torch import Tensor

from .kernels import Passes
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

    def _apply(self, blocks: Blocks, passes: Passes) -> list[float]:  # noqa: ARG002
        each = zip(blocks.parameters, blocks.momenta, blocks.pseudo_gradients, blocks.group_of, blocks.a.tolist(), strict=True)
        moved = [self._move(p, m, u, self.param_groups[i], a).to(blocks.parameters[0].device) for p, m, u, i, a in each]
        return [float(x) for x in torch.stack(moved).tolist()] if moved else []  # one transfer from a GPU

    def _move(self, p: Tensor, m: Tensor, pseudo_gradient: Tensor, group: dict[str, Any], rho: float) -> Tensor:
        n, c, mu, lr = group["delay"], group["c"], group["momentum"], group["lr"]
        state = self.state[p]
        total = state.setdefault("pseudo_gradient_sum", torch.zeros_like(m))
        state["arrivals"] = state.get("arrivals", 0) + 1
        step = pseudo_gradient.to(m.dtype) * rho
        total.add_(step)
        share = c
        if state["arrivals"] % n == 0:
            m.mul_(mu).add_(total, alpha=1 / n)
            total.zero_()
            share = 1 - c * n + c
        step.mul_(1 / n).add_(m, alpha=share * mu)
        p.add_(step, alpha=-lr)
        length: Tensor = torch.linalg.vector_norm(step)
        return length.mul_(lr)
