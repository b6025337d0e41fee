"""AdamW over a stack: each slice has its own learning rate, its own count of steps, and may stand still while others go on."""

import importlib.util
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from heloco.inner.options import InnerOptions

CHUNK = 2048  # elements per program of the kernel


def adamw_factors(taken: Tensor, lr: Tensor, active: Tensor, options: InnerOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Per slice, in float64: the step's size, the second moment's correction, the decay. A slice that is not active stays."""
    count = taken.clamp(min=1)
    return active * lr / (1 - options.beta1**count), (1 - options.beta2**count).sqrt(), 1 - active * lr * options.weight_decay


class AdamW:
    """Moves all blocks of a stack, in one launch where the kernel serves. The blocks are contiguous and stay where they are."""

    def __init__(self, parameters: list[Tensor], exp_avg: list[Tensor], exp_avg_sq: list[Tensor], options: InnerOptions) -> None:
        self.options = options
        self._blocks = list(zip([p.detach() for p in parameters], exp_avg, exp_avg_sq, strict=True))
        self._fused = serves(parameters)
        if self._fused:
            sizes = [p[0].numel() for p in parameters]
            pieces = [(block, size, start) for block, size in enumerate(sizes) for start in range(0, size, CHUNK)]
            self._aligned = all(size % 4 == 0 for size in sizes)
            self._pieces = torch.from_numpy(np.array(pieces, dtype=np.int64)).to(parameters[0].device)
            self._addresses = torch.zeros(len(sizes), 4, dtype=torch.int64, device=parameters[0].device)
            self._recorded: Tensor | None = None

    def move(self, gradients: Sequence[Tensor], factors: Tensor) -> None:
        """`factors`: those of `adamw_factors`, and whether a slice is active, [4, S]."""
        if self._fused:
            self._launch([g.contiguous() for g in gradients], factors.float())
            return
        for (p, m, v), g in zip(self._blocks, gradients, strict=True):
            adamw_move(p, m, v, g, factors.to(p.dtype).view(4, -1, *[1] * (p.dim() - 1)), self.options)

    def _launch(self, gradients: list[Tensor], factors: Tensor) -> None:
        from heloco.inner.adamw_kernel import adamw_kernel

        addresses = torch.tensor([[x.data_ptr() for x in (*b, g)] for b, g in zip(self._blocks, gradients, strict=True)])
        if factors.is_cuda and torch.cuda.is_current_stream_capturing():
            self._recorded = addresses  # the same in every replay
        else:
            self._addresses.copy_(addresses)
        slices, options = factors.shape[1], self.options
        adamw_kernel[(len(self._pieces), slices)](
            self._addresses, self._pieces, factors, slices, 1 - options.beta1, 1 - options.beta2, options.adam_eps,
            CHUNK=CHUNK, ALIGNED=self._aligned and not (addresses % 16).any().item(), num_warps=8,
        )  # fmt: skip

    def recorded(self) -> None:
        """After a graph was recorded with a `move` in it: now its addresses are known."""
        if self._fused and self._recorded is not None:
            self._addresses.copy_(self._recorded)


def serves(parameters: Sequence[Tensor]) -> bool:
    """Whether the kernel does: float32 on a GPU that Triton compiles for."""
    return importlib.util.find_spec("triton") is not None and all(p.is_cuda and p.dtype is torch.float32 for p in parameters)


def adamw_move(p: Tensor, m: Tensor, v: Tensor, g: Tensor, factors: Tensor, options: InnerOptions) -> None:
    """AdamW on one block of all slices."""
    size, root, decay, here = factors
    m.add_((g - m) * ((1 - options.beta1) * here))
    v.add_((g * g - v) * ((1 - options.beta2) * here))
    p.mul_(decay).sub_(size * m / (v.sqrt() / root + options.adam_eps))


def clipped(gradients: Sequence[Tensor], norm: float) -> list[Tensor]:
    """The gradients of each slice scaled down to this norm where they exceed it, as `clip_grad_norm_` does for one model."""
    squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0)
    scale = (norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    return [g * scale.view(-1, *([1] * (g.dim() - 1))) for g in gradients]
