"""The two passes that every rule's step is made of, by the fastest kernels that serve each block."""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from operator import attrgetter
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from . import native, portable

Sums = tuple[float, float, float]
Rule = tuple[float, float, float, float, float]
on_gpu: Callable[[Tensor], bool] = attrgetter("is_cuda")  # which blocks go through gpu.py; Triton's interpreter has others


class Law(NamedTuple):
    """What makes a block's rule out of its sums: for kernels that do so themselves, which know the fields by their order."""

    lr: float
    mu: float
    gain: float
    weight: float
    """ρ, and what of it Δ is multiplied with before and after the correction."""
    before: float
    after: float
    c_ok: float
    """As all that follow, a field of `Correction`. Minus infinity keeps every block as it is."""
    k_s: float = 0.0
    k_d: float = 0.0
    kappa: float = 0.0
    beta_max: float = 0.0
    eps: float = 0.0
    c_bad: float = 0.0
    ramp: bool = False
    """Whether reorient is "ramp"."""


NO_CORRECTION = Law(lr=0.0, mu=0.0, gain=0.0, weight=1.0, before=1.0, after=1.0, c_ok=-math.inf)  # G = ρΔ


class Passes:
    """The two passes over the blocks of one step.

    Which kernels serve a block and where it lies is found out once and beforehand: the first pass drives everything else out of
    the processor's caches, and looking at hundreds of tensors again would take a good part of the time of a pass.
    """

    def __init__(self, parameters: Sequence[Tensor], momenta: Sequence[Tensor], pseudo_gradients: Sequence[Tensor]) -> None:
        alike: dict[tuple[ModuleType, Hashable], list[int]] = {}
        for index, block in enumerate(zip(parameters, momenta, pseudo_gradients, strict=True)):
            alike.setdefault(_kernels(*block), []).append(index)
        self._parts: list[tuple[Any, list[int]]] = [
            (kernels.Passes(*(_pick(x, indices) for x in (parameters, momenta, pseudo_gradients))), indices)
            for (kernels, _), indices in alike.items()
        ]
        self._count = len(momenta)
        self.moved = False
        """Whether `step` was made."""

    def step(self, laws: Sequence[Law], law_of: Sequence[int]) -> list[Sums] | None:
        """Both passes at once, each block's rule made out of its sums by its law, where one set of kernels can do that for all.

        (Δ·Δ, m·m, Δ·m) of each block; or None, and nothing has happened, where the passes must be made one by one. If a Δ·Δ is
        not finite, nothing has changed.
        """
        if len(self._parts) != 1 or not hasattr(self._parts[0][0], "step"):
            return None
        self.moved = True
        sums: list[Sums] = self._parts[0][0].step(laws, law_of)
        return sums

    def statistics(self) -> list[Sums]:
        """(Δ·Δ, m·m, Δ·m) of each block."""
        found = [(0.0, 0.0, 0.0)] * self._count
        for passes, indices in self._parts:
            for index, sums in zip(indices, passes.statistics(), strict=True):
                found[index] = sums
        return found

    def update(self, rules: Sequence[Rule]) -> None:
        """g = a·Δ + b·m, m = μm + gain·g, θ −= lr(g + μm) in place, for each block's rule (a, b, lr, μ, gain)."""
        for passes, indices in self._parts:
            passes.update([rules[i] for i in indices])


def _kernels(parameter: Tensor, momentum: Tensor, pseudo_gradient: Tensor) -> tuple[ModuleType, Hashable]:
    """The kernels that serve a block, and what blocks must have in common to go through them together."""
    if on_gpu(momentum):
        device = momentum.get_device()
        if device == parameter.get_device() == pseudo_gradient.get_device():
            gpu = _gpu(device)
            if gpu is not None and gpu.serves(parameter, momentum, pseudo_gradient):
                return gpu, (device, parameter.dtype, pseudo_gradient.dtype)
    elif native.serves(parameter, momentum, pseudo_gradient):
        return native, momentum.dtype
    return portable, momentum.device


@lru_cache
def _gpu(device: int) -> ModuleType | None:
    """The kernels for the GPU of this number, or None without Triton, or where Triton cannot compile for it."""
    try:
        from . import gpu
    except ImportError:
        return None
    return gpu if gpu.works(device) else None


def _pick(blocks: Sequence[Tensor], indices: list[int]) -> list[Tensor]:
    return [blocks[i] for i in indices]
