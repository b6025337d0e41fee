"""Whether tensors hold numbers: no NaN, no Inf."""

from collections.abc import Iterable

import torch
from torch import Tensor

PIECE = 1 << 20


def is_finite(tensors: Iterable[Tensor]) -> bool:
    """Piece by piece, so that no temporary grows with a block."""
    return all(
        bool(torch.isfinite(piece).all())
        for tensor in tensors
        if tensor.is_floating_point() or tensor.is_complex()
        for piece in torch.split(tensor.detach().reshape(-1), PIECE)
    )
