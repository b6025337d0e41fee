"""Nesterov's outer momentum: DiLoCo's synchronous rule, and its asynchronous use one arrival at a time.

    G       = ρΔ            (synchronous: Δ̄, the mean over the workers)
    m_{t+1} = μ m_t + G
    θ_{t+1} = θ_t − η (G + μ m_{t+1})

This is `torch.optim.SGD(nesterov=True)` to the letter, so torch's own function does it, `fused` or not as there.
"""

from typing import Any, Unpack

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from .constants import MomentumKnobs
from .kernels import BlockKernels
from .kernels.native import PLAIN
from .kernels.windows import dense, give_back, groups
from .optimizer import Blocks, OuterOptimizer, momentum_step_lengths


def nesterov_step(theta: Tensor, m: Tensor, delta: Tensor, rho: float, *, lr: float, momentum: float) -> tuple[Tensor, Tensor]:
    """One arrival on one block: (θ_{t+1}, m_{t+1})."""
    g = rho * delta
    m = momentum * m + g
    return theta - lr * (g + momentum * m), m


class Nesterov(OuterOptimizer, knobs=MomentumKnobs):
    """Nesterov's outer momentum, as in DiLoCo: `torch.optim.SGD(nesterov=True)` over pseudo-gradients.

        m ← μm + ρΔ
        θ ← θ − η(ρΔ + μm)

    Methods: `sync-nesterov` (all workers wait, Δ is their mean) and `async-nesterov` (a step at every arrival, η .07).

    Knobs:

    {knobs}

    `fused` is torch's own: whether SGD's fused kernel is used.

    Example:

        outer = heloco.Nesterov(model.parameters(), lr=0.7, momentum=0.9)
        outer.step(weight=1 / workers, pseudo_gradients=deltas)
    """

    def __init__(self, params: Any, *, fused: bool | None = None, **knobs: Unpack[MomentumKnobs]) -> None:
        """`params`: the model's parameters, or groups of them. Each knob is a keyword."""
        super().__init__(params, knobs, fused=fused)

    def _apply(self, blocks: Blocks, block_kernels: BlockKernels) -> list[float]:
        has_codes = not all(isinstance(u, Tensor) for u in blocks.pseudo_gradients)
        is_small = blocks.release is None and not has_codes
        for part in [blocks] if is_small else map(blocks.pick, groups(blocks.pseudo_gradients)):
            deltas = list(map(dense, part.pseudo_gradients))
            if block_kernels.is_homogeneous and len(self.param_groups) == 1:
                self._sgd(part, deltas, self.param_groups[0], contiguous=True)
            else:
                self._by_kind(part, deltas)
            for delta in part.pseudo_gradients:
                give_back(delta, blocks.release)
        return momentum_step_lengths(blocks)

    def _by_kind(self, blocks: Blocks, deltas: list[Tensor]) -> None:
        kinds: dict[tuple[int, bool], list[int]] = {}
        columns = blocks.group_of, blocks.parameters, blocks.momenta, deltas
        for i, (group, *tensors) in enumerate(zip(*columns, strict=True)):
            # torch's fused SGD walks through memory whatever the strides: it would pair tensors laid out otherwise wrongly
            kinds.setdefault((group, all(t.is_contiguous() for t in tensors)), []).append(i)
        for (group, contiguous), indices in kinds.items():
            self._sgd(blocks.pick(indices), [deltas[i] for i in indices], self.param_groups[group], contiguous)

    def _sgd(self, blocks: Blocks, deltas: list[Tensor], group: dict[str, Any], contiguous: bool) -> None:
        if any(u.dtype is not p.dtype for u, p in zip(deltas, blocks.parameters, strict=True)):
            deltas = [u.to(p.dtype) for u, p in zip(deltas, blocks.parameters, strict=True)]
        gradients = _times(deltas, blocks.a.tolist())
        fused = None if group["fused"] and not contiguous else group["fused"]
        # One call for all blocks rather than four for each: the same operations, but torch adds to what it takes for gradients.
        can_use_foreach = (
            gradients is not deltas and contiguous and {*map(type, blocks.parameters), *map(type, blocks.momenta)}.issubset(PLAIN)
        )
        sgd(
            blocks.parameters,
            gradients,
            list(blocks.momenta),
            foreach=True if can_use_foreach and fused is None else None,
            fused=fused,
            weight_decay=0.0,
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["momentum"] > 0,  # torch's word for it: without momentum there is nothing to look ahead with
            maximize=False,
        )


def _times(tensors: list[Tensor], numbers: list[float]) -> list[Tensor]:
    """Each tensor times its number: ρ for all of them, unless some blocks are scaled down. If all numbers are 1, the tensors
    themselves. On the CPU by a tensor: of a number torch would make one for each block, which takes longer than a small block."""
    if len(set(numbers)) > 1:
        return list(torch._foreach_mul(tensors, numbers))
    if numbers[0] == 1:
        return tensors
    dtypes = {x.dtype for x in tensors}
    by = torch.tensor(numbers[0], dtype=dtypes.pop()) if len(dtypes) == 1 and tensors[0].is_cpu else numbers[0]
    return list(torch._foreach_mul(tensors, by))
