"""Muon and SGD over a stack: each slice has its own learning rate and weight decay, and may stand still while others go on."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from heloco.inner import adamw
from heloco.inner.address_table import AddressTable

COEFFICIENTS = (3.4445, -4.775, 2.0315)
"""The coefficients of the Newton-Schulz iteration. These and the two constants below are torch's defaults."""
ITERATIONS = 5
EPS = 1e-7
RMS_OF_ADAMW = 0.2
SIDES = (16, 32, 64, 128)
"""Shorter sides of matrices that the kernel moves."""


class Muon:
    """Moves the matrices of a stack, [S, rows, columns] each. Matrices of one shape are orthogonalised together."""

    def __init__(self, parameters: Sequence[Tensor], momenta: Sequence[Tensor], momentum: float) -> None:
        indices_of_shape: dict[torch.Size, list[int]] = {}
        for index, p in enumerate(parameters):
            indices_of_shape.setdefault(p.shape, []).append(index)
        self._groups = [
            (indices, MuonGroup([parameters[i].detach() for i in indices], [momenta[i] for i in indices], momentum))
            for indices in indices_of_shape.values()
        ]

    def move(self, gradients: Sequence[Tensor], lr: Tensor, weight_decay: Tensor, active: Tensor) -> None:
        """One step of all slices. `lr`, `weight_decay` and `active` have a number for each slice."""
        for indices, group in self._groups:
            group.move([gradients[i] for i in indices], lr * active, weight_decay, active)

    def finish_recording(self) -> None:
        """After a graph was recorded with a `move` in it."""
        for _, group in self._groups:
            group.finish_recording()


class MuonGroup:
    """Matrices of one shape, moved in one launch where the kernel serves."""

    def __init__(self, parameters: list[Tensor], momenta: list[Tensor], momentum: float) -> None:
        self._parameters, self._momenta, self._momentum = parameters, momenta, momentum
        _, rows, columns = parameters[0].shape
        self._size = RMS_OF_ADAMW * math.sqrt(max(rows, columns))
        self._addresses = AddressTable(len(parameters), 3, parameters[0].device) if serves(parameters) else None

    def move(self, gradients: Sequence[Tensor], lr: Tensor, weight_decay: Tensor, active: Tensor) -> None:
        decay, size, rise = 1 - lr * weight_decay, lr * self._size, (1 - self._momentum) * active
        if self._addresses is not None:
            self._launch(self._addresses, [g.contiguous() for g in gradients], torch.stack([decay, size, rise]).float())
            return
        directions = []
        for momentum, gradient in zip(self._momenta, gradients, strict=True):
            momentum.add_((gradient - momentum) * _per_slice(rise, momentum))
            directions.append(torch.lerp(gradient, momentum, self._momentum))
        orthogonal = torch.split(orthogonalise(torch.cat(directions)), len(lr))
        for p, direction in zip(self._parameters, orthogonal, strict=True):
            p.mul_(_per_slice(decay, p)).sub_(_per_slice(size, p) * direction)

    def _launch(self, addresses: AddressTable, gradients: list[Tensor], numbers: Tensor) -> None:
        from heloco.inner.muon_kernel import muon_kernel

        addresses.set(list(zip(self._parameters, self._momenta, gradients, strict=True)))
        slices, rows, columns = self._parameters[0].shape
        short, long = sorted((rows, columns))
        scratch = torch.empty(len(gradients) * slices * short * long, dtype=torch.bfloat16, device=numbers.device)
        muon_kernel[(len(gradients), slices)](
            addresses.table, scratch, numbers, slices, self._momentum, EPS, *COEFFICIENTS,
            SHORT=short, LONG=long, STEP=short, TALL=rows > columns, ITERATIONS=ITERATIONS, WIDE=not numbers.is_cuda,
            num_warps=8 if short > 64 else 4,
        )  # fmt: skip

    def finish_recording(self) -> None:
        if self._addresses is not None:
            self._addresses.finish_recording()


def serves(parameters: Sequence[Tensor]) -> bool:
    """Whether the kernel does: its programs hold a square of the shorter side, and go along the longer one in such squares."""
    short, long = sorted(parameters[0].shape[1:])
    return adamw.serves(parameters) and short in SIDES and long % short == 0


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

    def finish_recording(self) -> None:
        pass


def orthogonalise(matrices: Tensor) -> Tensor:
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


def _per_slice(numbers: Tensor, matrices: Tensor) -> Tensor:
    return numbers.to(matrices.dtype).view(-1, *[1] * (matrices.dim() - 1))
