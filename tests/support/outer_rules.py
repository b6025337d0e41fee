"""The outer rules as torch optimizers, blocks of many shapes and layouts, and pseudo-gradients for them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from heloco.outer import MLA, DelayedNesterov, HeLoCo, Nesterov, OuterOptimizer
from support.equations import F64

RULES: dict[str, Callable[..., OuterOptimizer]] = {
    "nesterov": Nesterov,
    "delayed": lambda params, **kw: DelayedNesterov(params, **{"delay": 3, "c": 0.1, **kw}),
    "mla": MLA,
    "heloco": HeLoCo,
    "heloco-ramp": lambda params, **kw: HeLoCo(params, **{"reorient": "ramp", "weigh": "before", **kw}),
}
every_rule = pytest.mark.parametrize("rule", RULES)
WEIGHTS = [1.0, 1.0, 5**-0.5, 5**-0.5, 0.2, 2.0, 0.0, 1.0]
"""Of the arrivals that a rule is taken through."""


def parameters(dtype: torch.dtype = F64, seed: int = 0) -> list[Tensor]:
    """Blocks of many shapes and layouts."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        torch.randn(shape, dtype=F64, generator=generator) for shape in ((3, 4), (5,), (), (0, 2), (1,), (4, 3), (2, 3, 4, 4))
    ]
    tensors[5] = tensors[5].t()
    tensors[6] = tensors[6].to(memory_format=torch.channels_last)
    tensors.append(torch.randn(6, 8, dtype=F64, generator=generator)[:, ::2])
    return [torch.nn.Parameter(x.to(dtype)) for x in tensors]


def arrivals(params: list[Tensor], count: int, seed: int = 1) -> list[list[Tensor]]:
    """`count` pseudo-gradients like the parameters, each pointing partly where the one before pointed, or away from it."""
    generator = torch.Generator().manual_seed(seed)
    deltas: list[list[Tensor]] = []
    for t in range(count):
        deltas.append([torch.randn(p.shape, dtype=F64, generator=generator).to(p) for p in params])
        if t % 3:
            for now, last in zip(deltas[t], deltas[t - 1], strict=True):
                now.add_(last, alpha=(-0.8, 0.5)[t % 3 - 1])
    return deltas
