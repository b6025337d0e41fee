"""Muon and SGD over a stack: each slice has its own learning rate and weight decay, and may stand still while others go on."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""Of the Newton-Schulz iteration; these and the two below are torch's defaults."""
ITERATIONS = 5
EPS = 1e-7
RMS_OF_ADAMW = 0.2


class Muon:
    """Moves the matrices of a stack, [S, rows, columns] each. Matrices of one shape are orthogonalised together."""

    def __init__(self, parameters: Sequence[Tensor], momenta: Sequence[Tensor], momentum: float) -> None:
        self._blocks = [(p.detach(), m) for p, m in zip(parameters, momenta, strict=True)]
        self._momentum = momentum
        self._alike: dict[torch.Size, list[int]] = {}
        for index, p in enumerate(parameters):
            self._alike.setdefault(p.shape, []).append(index)

    def move(self, gradients: Sequence[Tensor], lr: Tensor, weight_decay: Tensor, active: Tensor) -> None:
        """`lr`, `weight_decay`, `active`: a number for each slice."""
        lr = lr * active
        for (_, rows, columns), indices in self._alike.items():
            directions = []
            for index in indices:
                (_, momentum), gradient = self._blocks[index], gradients[index]
                momentum.add_((gradient - momentum) * _per_slice((1 - self._momentum) * active, momentum))
                directions.append(torch.lerp(gradient, momentum, self._momentum))
            orthogonal = torch.split(orthogonalised(torch.cat(directions)), len(lr))
            size = RMS_OF_ADAMW * math.sqrt(max(rows, columns))
            for index, direction in zip(indices, orthogonal, strict=True):
                p = self._blocks[index][0]
                p.mul_(_per_slice(1 - lr * weight_decay, p)).sub_(_per_slice(lr * size, p) * direction)


class SGD:
    """Moves all blocks of a stack. `momenta` is empty where there is no momentum."""

    def __init__(self, parameters: Sequence[Tensor], momenta: Sequence[Tensor], momentum: float) -> None:
        self._parameters, self._momenta, self._momentum = [p.detach() for p in parameters], list(momenta), momentum

    def move(self, gradients: Sequence[Tensor], lr: Tensor, weight_decay: Tensor, active: Tensor) -> None:
        for index, (p, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            direction = gradient + _per_slice(weight_decay, p) * p
            if self._momenta:
                momentum = self._momenta[index]
                momentum.add_((direction - (1 - self._momentum) * momentum) * _per_slice(active, p))
                direction = momentum
            p.sub_(_per_slice(lr * active, p) * direction)


def orthogonalised(matrices: Tensor) -> Tensor:
    """UVᵀ, roughly, of each matrix USVᵀ: torch's `_zeropower_via_newtonschulz` for many at once, in bfloat16 as there."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.bfloat16()
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(ITERATIONS):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _per_slice(numbers: Tensor, like: Tensor) -> Tensor:
    return numbers.to(like.dtype).view(-1, *[1] * (like.dim() - 1))
