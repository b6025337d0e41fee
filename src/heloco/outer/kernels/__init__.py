"""The two passes that every rule's step is made of, by the fastest kernels that serve each block."""

from collections.abc import Sequence

from torch import Tensor

from . import native, portable

Sums = tuple[float, float, float]
Rule = tuple[float, float, float, float, float]


class Passes:
    """The two passes over the blocks of one step.

    Which kernels serve a block and where it lies is found out once and beforehand: the first pass drives everything else out of
    the processor's caches, and looking at hundreds of tensors again would take a good part of the time of a pass.
    """

    def __init__(self, parameters: Sequence[Tensor], momenta: Sequence[Tensor], pseudo_gradients: Sequence[Tensor]) -> None:
        alike: dict[object, list[int]] = {}
        for index, block in enumerate(zip(parameters, momenta, pseudo_gradients, strict=True)):
            kind = block[0].dtype if native.serves(*block) else None
            alike.setdefault(kind, []).append(index)
        self._parts = [
            (
                (portable if kind is None else native).Passes(
                    *(_pick(x, indices) for x in (parameters, momenta, pseudo_gradients))
                ),
                indices,
            )
            for kind, indices in alike.items()
        ]
        self._count = len(momenta)

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


def _pick(blocks: Sequence[Tensor], indices: list[int]) -> list[Tensor]:
    return [blocks[i] for i in indices]
