"""AdamW over a stack: each slice has its own learning rate, its own count of steps, and may stand still while others go on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from heloco.inner.options import InnerOptions


def adamw_factors(taken: Tensor, lr: Tensor, active: Tensor, options: InnerOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Per slice, in float64: the step's size, the second moment's correction, the decay. A slice that is not active stays."""
    count = taken.clamp(min=1)
    return active * lr / (1 - options.beta1**count), (1 - options.beta2**count).sqrt(), 1 - active * lr * options.weight_decay


def adamw_move(p: Tensor, m: Tensor, v: Tensor, g: Tensor, factors: Tensor, options: InnerOptions) -> None:
    """AdamW on one block of all slices, a slice a row, whatever its shape: one compiled kernel serves all blocks."""
    size, root, decay, here = factors
    m.add_((g - m) * ((1 - options.beta1) * here))
    v.add_((g * g - v) * ((1 - options.beta2) * here))
    p.mul_(decay).sub_(size * m / (v.sqrt() / root + options.adam_eps))


def clipped(gradients: Sequence[Tensor], norm: float) -> list[Tensor]:
    """The gradients of each slice scaled down to this norm where they exceed it, as `clip_grad_norm_` does for one model."""
    squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0)
    scale = (norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    return [g * scale.view(-1, *([1] * (g.dim() - 1))) for g in gradients]
