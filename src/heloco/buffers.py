"""A model's buffers, for example BatchNorm's statistics, with many workers: which are accepted, and how they are mixed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from heloco.finite import all_finite
from heloco.outer.kernels.portable import pieces


def are_usable(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether all values are finite, or equal to an infinite value in ours (for example a mask of −∞)."""
    if all_finite(theirs):
        return True
    parts = (part for x, y in zip(ours, theirs, strict=True) for part in pieces(x.to(y.device), y))
    return all(bool((y.isfinite() | (y == x)).all()) for x, y in parts)


def largest(buffers: Sequence[Tensor]) -> list[float]:
    """The largest finite absolute value of each buffer."""
    return [max(0.0, *(_largest(part) for (part,) in pieces(buffer.detach()))) for buffer in buffers]


def distances(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[float]:
    """The largest difference between the two buffers of each pair. Entries that are infinite in one of them do not count."""
    pairs = zip(ours, theirs, strict=True)
    return [max(0.0, *(_largest(_wide(y) - _wide(x)) for x, y in pieces(a, b.to(a.device)))) for a, b in pairs]


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in double precision, so that differences do not overflow."""
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _largest(tensor: Tensor) -> float:
    if not tensor.numel():
        return 0.0
    values = _wide(tensor).abs()
    return torch.where(values.isfinite(), values, 0.0).max().item()


def shorten(ours: Tensor, theirs: Tensor, scale: float) -> Tensor:
    """The other buffer, or for a scale below 1 a point on the way to it. A counter is taken entirely or not at all."""
    if scale == 1:
        return theirs
    return mix(ours, theirs, scale) if ours.is_floating_point() or ours.is_complex() else ours


def mix(ours: Tensor, theirs: Tensor, share: float) -> Tensor:
    """A new buffer, moved from ours towards the other one by `share`. Of two counters the larger counts, and of an infinite and a
    finite entry the finite one. Equal entries stay equal to the bit."""
    theirs = theirs.to(ours.device)
    if not (ours.is_floating_point() or ours.is_complex()):
        return torch.maximum(ours, theirs)
    theirs = theirs.to(ours.dtype)
    a, b = _wide(ours), _wide(theirs)
    distance = b - a  # without `lerp` and `alpha=`, which round differently from processor to processor
    mixed_values = (a + distance * share if share < 0.5 else b - distance * (1 - share)).to(ours.dtype)
    return torch.where(theirs.isfinite(), torch.where(ours.isfinite(), mixed_values, theirs), ours)
