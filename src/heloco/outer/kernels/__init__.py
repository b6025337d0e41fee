"""The two passes that every rule's step is made of, by the fastest kernels that serve each block."""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from operator import attrgetter
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import native, portable
from .coefficients import Coefficients
from .switch import compiled_kernels_wanted
from .windows import Block, Release

Numbers = npt.NDArray[np.float64]
on_gpu: Callable[[Tensor], bool] = attrgetter("is_cuda")  # which blocks go through gpu.py; Triton's interpreter has others


def are_homogeneous(tensors: Sequence[Any]) -> bool:
    """Whether these blocks can be treated alike: plain contiguous tensors of one dtype and on one device.

    All are checked together: checking a hundred small blocks one by one would take longer than their step.
    """
    return (
        set(map(type, tensors)).issubset(native.PLAIN)
        and len(set(map(_dtype, tensors))) == 1
        and (all(map(_is_cpu, tensors)) or len(set(map(_device, tensors))) == 1)
        and all(map(Tensor.is_contiguous, tensors))
    )


_dtype, _device, _is_cpu = attrgetter("dtype"), attrgetter("device"), attrgetter("is_cpu")


class BlockKernels:
    """The two passes over the blocks of one step.

    Which kernels serve a block and where it lies is found out once and beforehand: the first pass drives everything else out of
    the processor's caches, and looking at hundreds of tensors again would take a good part of the time of a pass.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        momenta: Sequence[Tensor],
        pseudo_gradients: Sequence[Block],
        release: Release | None = None,
    ) -> None:
        """`release`: the pseudo-gradients lie in a mapped file, and what was read of them is given back."""
        lists: tuple[Sequence[Any], ...] = (parameters, momenta, pseudo_gradients)
        self.is_homogeneous = all(map(are_homogeneous, lists))
        """Whether the first block speaks for all, as far as kernels are concerned."""
        served: dict[tuple[ModuleType, Hashable], list[int]] = {}
        for index, block in enumerate(zip(*lists, strict=True)):
            served.setdefault(kernels_for(*block), []).append(index)
            if self.is_homogeneous:
                break
        every = slice(None)
        self._parts: list[tuple[Any, list[int] | slice]] = [
            (kernels.BlockKernels(*lists, release), every)
            if len(served) == 1
            else (kernels.BlockKernels(*(_pick(x, indices) for x in lists), release), indices)
            for (kernels, _), indices in served.items()
        ]
        self._count = len(momenta)
        self.has_moved = False
        """Whether `step` was made."""

    def step(self, coefficients: Sequence[Coefficients], group_of: Sequence[int]) -> Numbers | None:
        """Both passes at once, if one set of kernels serves all blocks and can decide each block's step by itself.

        `coefficients` of each group, and `group_of` each block. Returns Δ·Δ, m·m and Δ·m of each block; or None, and nothing has
        happened, if the passes must be made one by one. If a Δ·Δ is not finite, nothing has changed.
        """
        if len(self._parts) != 1 or not hasattr(self._parts[0][0], "step"):
            return None
        self.has_moved = True
        sums: Numbers = self._parts[0][0].step(coefficients, group_of)
        return sums

    def statistics(self) -> Numbers:
        """Δ·Δ, m·m and Δ·m of each block, a row each."""
        sums = np.zeros((self._count, 3))
        for part, indices in self._parts:
            sums[indices] = part.statistics()
        return sums

    def update(self, rules: Numbers) -> None:
        """g = a·Δ + b·m, m = μm + gain·g, θ −= lr(g + μm) in place, for each block's rule (a, b, lr, μ, gain)."""
        for part, indices in self._parts:
            part.update(rules[indices])


def kernels_for(parameter: Tensor, momentum: Tensor, pseudo_gradient: Block) -> tuple[ModuleType, Hashable]:
    """The kernels that serve a block, and what blocks must have in common to go through them together."""
    if not isinstance(pseudo_gradient, Tensor):
        serving = native if native.serves(parameter, momentum, pseudo_gradient) else portable
        return serving, (momentum.device, momentum.dtype, "codes")
    if on_gpu(momentum):
        device = momentum.get_device()
        if device == parameter.get_device() == pseudo_gradient.get_device():
            gpu = gpu_kernels(device)
            if gpu is not None and gpu.serves(parameter, momentum, pseudo_gradient):
                return gpu, (device, pseudo_gradient.dtype)
    elif native.serves(parameter, momentum, pseudo_gradient):
        return native, (momentum.dtype, pseudo_gradient.dtype)
    return portable, (momentum.device, portable.in_order(momentum, pseudo_gradient))


def name_for(device: torch.device) -> str:
    """Which kernels serve plain blocks on a device: compiled (native.c), triton, or portable (torch operations)."""
    if device.type == "cuda":
        return "portable" if gpu_kernels(device.index or 0) is None else "triton"
    return "compiled" if device.type == "cpu" and native.available else "portable"


@lru_cache
def gpu_kernels(device: int) -> ModuleType | None:
    """The kernels for the GPU of this number, or None: not wanted, without Triton, or where Triton cannot compile for it."""
    if not compiled_kernels_wanted():
        return None
    try:
        from . import gpu
    except ImportError:
        return None
    return gpu if gpu.works(device) else None


def _pick(blocks: Sequence[Any], indices: list[int]) -> list[Any]:
    return [blocks[i] for i in indices]
