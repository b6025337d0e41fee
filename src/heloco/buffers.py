"""A model's buffers (BatchNorm's statistics, say) under many workers: which are taken, and how they are mixed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from heloco.finite import all_finite
from heloco.outer.kernels.portable import pieces


def are_usable(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether all buffers are finite, but for what is infinite in ours too (a mask of −∞, say)."""
    if all_finite(theirs):
        return True
    parts = (part for x, y in zip(ours, theirs, strict=True) for part in pieces(x.to(y.device), y))
    return all(bool((y.isfinite() | (y == x)).all()) for x, y in parts)


def mixed(ours: Tensor, theirs: Tensor, share: float) -> Tensor:
    """A new buffer, moved from ours towards the other one by `share`. Counters take the larger value, infinite entries the finite
    one. What is equal in both stays to the bit."""
    theirs = theirs.to(ours.device)
    if not (ours.is_floating_point() or ours.is_complex()):
        return torch.maximum(ours, theirs)
    theirs = theirs.to(ours.dtype)
    distance = theirs - ours  # without `lerp` and `alpha=`, which round differently from processor to processor
    moved = ours + distance * share if share < 0.5 else theirs - distance * (1 - share)
    return torch.where(theirs.isfinite(), torch.where(ours.isfinite(), moved, theirs), ours)
