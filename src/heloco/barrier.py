"""The barrier of synchronous runs: adds contributions up until all workers have handed in."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from heloco.buffers import mix
from heloco.outer.kernels import Numbers
from heloco.outer.kernels.portable import pieces
from heloco.outer.kernels.windows import Block, Release, brought_to, give_back


class Barrier:
    """Σ ρΔ of the workers that wait, and the mean of their buffers."""

    def __init__(self) -> None:
        self.workers: list[int] = []
        self.sums: list[Tensor] = []
        self.buffers: list[Tensor] = []

    def add(
        self,
        parameters: Sequence[Tensor],
        pseudo_gradient: Sequence[Block],
        weights: Sequence[float],
        buffers: Sequence[Tensor],
        release: Release | None = None,
    ) -> None:
        """Adds the tensors of the worker that was appended last: each block with its own weight, in float32 or wider."""
        if not self.sums:
            dtypes = [torch.promote_types(p.dtype, torch.float32) for p in parameters]
            self.sums = [torch.zeros_like(p, dtype=dtype) for p, dtype in zip(parameters, dtypes, strict=True)]
            self.buffers = [b.clone() for b in buffers]
        else:
            share = 1 / len(self.workers)  # the mean moves by 1/2, 1/3, …, so equal values stay equal to the bit
            self.buffers = [mix(mean, b, share) for mean, b in zip(self.buffers, buffers, strict=True)]
        for total, delta, weight in zip(self.sums, pseudo_gradient, weights, strict=True):
            for part, delta_part in pieces(total, brought_to(total.device, delta, None)):
                part.add_(delta_part.to(part.dtype) * weight)  # rounded before it is added: `alpha=` may fuse the two
            give_back(delta, release)

    def open(self) -> None:
        """Forgets the workers that waited, their sums and their buffers. The next contributions are gathered from zero."""
        self.workers, self.sums, self.buffers = [], [], []


def can_be_added(squares: Numbers, parameters: Sequence[Tensor], share: float) -> bool:
    """Whether all blocks are finite, and so small that the square of the sum of such blocks of all workers does not overflow."""
    limits = [torch.finfo(torch.promote_types(p.dtype, torch.float32)).max for p in parameters]
    return bool((np.sqrt(squares) * share < 0.5 * np.sqrt(limits)).all())  # False for NaN
