"""The two passes that every rule's step is made of, by the fastest kernels that serve each block."""

from collections.abc import Sequence

from torch import Tensor

from . import native, portable

Rule = tuple[float, float, float, float, float]


def _parted(*lists: Sequence[Tensor]) -> tuple[dict[object, list[int]], list[int]]:
    """Indices of the blocks for the compiled kernels, by dtype, and of the rest."""
    compiled: dict[object, list[int]] = {}
    rest: list[int] = []
    for index, tensors in enumerate(zip(*lists, strict=True)):
        (compiled.setdefault(tensors[0].dtype, []) if native.serves(*tensors) else rest).append(index)
    return compiled, rest


def _pick(blocks: Sequence[Tensor], indices: list[int]) -> list[Tensor]:
    return [blocks[i] for i in indices]


def statistics(pseudo_gradients: Sequence[Tensor], momenta: Sequence[Tensor]) -> list[tuple[float, float, float]]:
    """(Δ·Δ, m·m, Δ·m) of each block."""
    compiled, rest = _parted(pseudo_gradients, momenta)
    found: dict[int, tuple[float, float, float]] = {}
    for indices in compiled.values():
        found |= zip(indices, native.statistics(_pick(pseudo_gradients, indices), _pick(momenta, indices)), strict=True)
    if rest:
        found |= zip(rest, portable.statistics(_pick(pseudo_gradients, rest), _pick(momenta, rest)), strict=True)
    return [found[i] for i in range(len(momenta))]


def update(
    parameters: Sequence[Tensor], momenta: Sequence[Tensor], pseudo_gradients: Sequence[Tensor], rules: Sequence[Rule]
) -> None:
    """g = a·Δ + b·m, m = μm + gain·g, θ −= lr(g + μm) in place, for each block's rule (a, b, lr, μ, gain)."""
    compiled, rest = _parted(parameters, momenta, pseudo_gradients)
    for kernels, indices in [(native, i) for i in compiled.values()] + ([(portable, rest)] if rest else []):
        kernels.update(
            _pick(parameters, indices), _pick(momenta, indices), _pick(pseudo_gradients, indices), [rules[i] for i in indices]
        )
