"""AdamW over a stack: each slice has its own settings, its own count of steps, and may stand still while others go on."""

import importlib.util
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from heloco.inner.address_table import AddressTable
from heloco.inner.options import InnerOptions

CHUNK = 2048  # elements per program of the kernel


SETTINGS = ("beta1", "beta2", "adam_eps", "weight_decay")
"""The fields of `InnerOptions` that each slice has its own value of, a row each in the settings of a stack."""


def settings_of(options: InnerOptions) -> list[float]:
    return [getattr(options, name) for name in SETTINGS]


def adamw_factors(steps_taken: Tensor, lr: Tensor, active: Tensor, settings: Tensor) -> Tensor:
    """What a step of AdamW multiplies with, in float64, a column for each slice:

    the step's size, the second moment's correction, the decay, whether the slice is active, 1 − β1, 1 − β2, ε.
    """
    beta1, beta2, eps, weight_decay = settings
    count = steps_taken.clamp(min=1)
    size = active * lr / (1 - beta1**count)
    return torch.stack(
        [size, (1 - beta2**count).sqrt(), 1 - active * lr * weight_decay, active, (1 - beta1) * active, (1 - beta2) * active, eps]
    )


class AdamW:
    """Moves all blocks of a stack, in one launch where the kernel serves. The blocks are contiguous and stay where they are."""

    def __init__(self, parameters: list[Tensor], exp_avg: list[Tensor], exp_avg_sq: list[Tensor]) -> None:
        self._blocks = list(zip([p.detach() for p in parameters], exp_avg, exp_avg_sq, strict=True))
        self._fused = serves(parameters)
        if self._fused:
            sizes = [p[0].numel() for p in parameters]
            pieces = [(block, size, start) for block, size in enumerate(sizes) for start in range(0, size, CHUNK)]
            self._aligned = all(size % 4 == 0 for size in sizes)
            self._pieces = torch.from_numpy(np.array(pieces, dtype=np.int64)).to(parameters[0].device)
            self._addresses = AddressTable(len(sizes), 4, parameters[0].device)

    def move(self, gradients: Sequence[Tensor], factors: Tensor) -> None:
        """`factors`: those of `adamw_factors`."""
        if self._fused:
            self._launch([g.contiguous() for g in gradients], factors.float())
            return
        for (p, m, v), g in zip(self._blocks, gradients, strict=True):
            adamw_move(p, m, v, g, factors.to(p.dtype).view(len(factors), -1, *[1] * (p.dim() - 1)))

    def _launch(self, gradients: list[Tensor], factors: Tensor) -> None:
        from heloco.inner.adamw_kernel import adamw_kernel

        is_aligned = self._addresses.set([(*block, g) for block, g in zip(self._blocks, gradients, strict=True)])
        slices = factors.shape[1]
        adamw_kernel[(len(self._pieces), slices)](
            self._addresses.table, self._pieces, factors, slices,
            CHUNK=CHUNK, ALIGNED=self._aligned and is_aligned, num_warps=8,
        )  # fmt: skip

    def finish_recording(self) -> None:
        """After a graph was recorded with a `move` in it."""
        if self._fused:
            self._addresses.finish_recording()


def serves(parameters: Sequence[Tensor]) -> bool:
    """Whether the kernel does: float32 on a GPU that Triton compiles for."""
    return importlib.util.find_spec("triton") is not None and all(p.is_cuda and p.dtype is torch.float32 for p in parameters)


def adamw_move(p: Tensor, m: Tensor, v: Tensor, g: Tensor, factors: Tensor) -> None:
    """AdamW on one block of all slices."""
    size, root, decay, _, rise1, rise2, eps = factors
    m.add_((g - m) * rise1)
    v.add_((g * g - v) * rise2)
    p.mul_(decay).sub_(size * m / (v.sqrt() / root + eps))


def without_gradient(p: Tensor, m: Tensor, v: Tensor, factors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(p, m, v) after steps of AdamW without a gradient, as new tensors: what becomes of table rows that a round does not read.

    m decays by β1 and v by β2 in each step, and p moves by what is left of m. `factors`: a column for each step.
    """
    if serves([p, m, v]) and p.is_contiguous() and m.is_contiguous() and v.is_contiguous():
        from heloco.inner.adamw_kernel import without_gradient_kernel

        after = torch.empty_like(p), torch.empty_like(m), torch.empty_like(v)
        numbers = factors.float().contiguous()
        without_gradient_kernel[(-(-p.numel() // CHUNK),)](
            p, m, v, *after, numbers, factors.shape[1], p.numel(), CHUNK=CHUNK, num_warps=8
        )
        return after
    p, m, v = p.clone(), m.clone(), v.clone()
    zero_gradient = torch.zeros_like(p)
    for column in factors.to(p.dtype).unbind(1):
        adamw_move(p, m, v, zero_gradient, column)
    return p, m, v


def clip_gradients(gradients: Sequence[Tensor], norm: float) -> list[Tensor]:
    """The gradients of each slice scaled down to this norm where they exceed it, as `clip_grad_norm_` does for one model."""
    squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0)
    scale = (norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    return [g * scale.view(-1, *([1] * (g.dim() - 1))) for g in gradients]
