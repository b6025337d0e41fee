"""Nesterov's outer momentum: DiLoCo's synchronous rule, and its asynchronous use one arrival at a time.

    G       = ρΔ            (synchronous: Δ̄, the mean over the workers)
    m_{t+1} = μ m_t + G
    θ_{t+1} = θ_t − η (G + μ m_{t+1})

This is `torch.optim.SGD(nesterov=True)` to the letter, so torch's own function does it, `fused` or not as there.
"""

from typing import Any

import torch
from torch.optim.sgd import sgd

from .kernels import Passes
from .optimizer import Block, OuterOptimizer, momentum_step, momentum_step_length


class Nesterov(OuterOptimizer):
    def __init__(self, params: Any, lr: float = 0.7, momentum: float = 0.9, *, fused: bool | None = None) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "fused": fused})

    def _apply(self, blocks: list[Block], passes: Passes) -> list[float]:  # noqa: ARG002
        mixed = [x for x in blocks if x.parameter.dtype != x.momentum.dtype]
        own = Passes([x.parameter for x in mixed], [x.momentum for x in mixed], [x.pseudo_gradient for x in mixed])
        momentum_step(mixed, [1.0] * len(mixed), own)  # torch's SGD keeps no float32 momentum for half-precision parameters
        for group in self.param_groups:
            alike = [x for x in blocks if x.group is group and x.parameter.dtype == x.momentum.dtype]
            for fusable in {_fusable(x) for x in alike}:
                fused = None if group["fused"] and not fusable else group["fused"]
                self._sgd([x for x in alike if _fusable(x) is fusable], group, fused)
        return [momentum_step_length(block, 1.0) for block in blocks]

    def _sgd(self, blocks: list[Block], group: dict[str, Any], fused: bool | None) -> None:
        weighted = tuple(x.pseudo_gradient for x in blocks)
        if blocks[0].a != 1:  # ρ, the same for all blocks of a step
            weighted = torch._foreach_mul(weighted, blocks[0].a)
        sgd(
            [x.parameter for x in blocks],
            [g.to(x.parameter.dtype) for g, x in zip(weighted, blocks, strict=True)],
            [x.momentum for x in blocks],
            fused=fused,
            weight_decay=0.0,
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["momentum"] > 0,  # torch's word for it: without momentum there is nothing to look ahead with
            maximize=False,
        )


def _fusable(block: Block) -> bool:
    """torch's fused SGD walks through memory whatever the strides: tensors laid out otherwise would be paired wrongly."""
    return all(x.is_contiguous() for x in (block.parameter, block.momentum, block.pseudo_gradient))
