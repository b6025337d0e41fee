"""The two passes that every rule's step is made of, by the fastest kernels that serve each block."""

from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from . import native, portable

Rule = tuple[float, float, float, float, float]


def _parted(*lists: Sequence[Tensor]) -> list[tuple[ModuleType, list[int]]]:
    """The indices of the blocks that go through the same kernels together: the compiled ones by dtype, and the rest."""
    parts: dict[object, list[int]] = {}
    for index, tensors in enumerate(zip(*lists, strict=True)):
        part = tensors[0].dtype if native.serves(*tensors) else None
        if part in parts:
            parts[part].append(index)
        else:
            parts[part] = [index]
    return [(portable if part is None else native, indices) for part, indices in parts.items()]


def _pick(blocks: Sequence[Tensor], indices: list[int]) -> list[Tensor]:
    return [blocks[i] for i in indices]


def statistics(pseudo_gradients: Sequence[Tensor], momenta: Sequence[Tensor]) -> list[tuple[float, float, float]]:
    """(Δ·Δ, m·m, Δ·m) of each block."""
    found = [(0.0, 0.0, 0.0)] * len(momenta)
    for kernels, indices in _parted(pseudo_gradients, momenta):
        sums = kernels.statistics(_pick(pseudo_gradients, indices), _pick(momenta, indices))
        for index, of_block in zip(indices, sums, strict=True):
            found[index] = of_block
    return found


def update(
    parameters: Sequence[Tensor], momenta: Sequence[Tensor], pseudo_gradients: Sequence[Tensor], rules: Sequence[Rule]
) -> None:
    """g = a·Δ + b·m, m = μm + gain·g, θ −= lr(g + μm) in place, for each block's rule (a, b, lr, μ, gain)."""
    for kernels, indices in _parted(parameters, momenta, pseudo_gradients):
        kernels.update(
            _pick(parameters, indices), _pick(momenta, indices), _pick(pseudo_gradients, indices), [rules[i] for i in indices]
        )
