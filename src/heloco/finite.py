"""Whether tensors hold NaN or Inf."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """True if no tensor holds NaN or Inf, whatever their dtypes. Nothing is squared or added, so nothing can overflow."""
    extremes = [extreme for tensor in tensors if _can_be_infinite(tensor) for extreme in _extremes(tensor)]
    on_cpu = [x for x in extremes if x.is_cpu]
    elsewhere = [x.double() for x in extremes if not x.is_cpu]
    if elsewhere:  # one transfer for all
        on_cpu.append(torch.stack([x.to(elsewhere[0].device) for x in elsewhere]).abs().amax().cpu())
    return all(math.isfinite(x.item()) for x in on_cpu)


def _can_be_infinite(tensor: Tensor) -> bool:
    return tensor.numel() > 0 and (tensor.is_floating_point() or tensor.is_complex())


def _extremes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest number, in one pass without a temporary; both are NaN if the tensor holds NaN."""
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    smallest, largest = torch.aminmax(real)
    return smallest, largest
