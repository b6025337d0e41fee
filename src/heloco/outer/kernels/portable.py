"""The same two passes in torch operations, for every device, dtype and layout.

On the CPU a block is worked on in pieces that fit the cache, so that no temporary grows with the block.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PIECE = 1 << 18


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    if tensors[0].device.type == "cpu" and all(t.is_contiguous() for t in tensors):
        yield from zip(*(torch.split(t.view(-1), PIECE) for t in tensors), strict=True)
    else:
        yield tensors


def _statistics(pseudo_gradient: Tensor, momentum: Tensor) -> Tensor:
    parts = []
    for u, m in _pieces(pseudo_gradient, momentum):
        u, m = u.to(m.dtype).reshape(-1), m.reshape(-1)
        parts.append(torch.stack([torch.dot(u, u), torch.dot(m, m), torch.dot(u, m)]).double())
    return torch.stack(parts).sum(0) if parts else torch.zeros(3, dtype=torch.float64, device=momentum.device)


class Passes:
    """Both passes over blocks of any kind."""

    def __init__(self, parameters: Sequence[Tensor], momenta: Sequence[Tensor], pseudo_gradients: Sequence[Tensor]) -> None:
        self._blocks = list(zip(parameters, momenta, pseudo_gradients, strict=True))

    def statistics(self) -> npt.NDArray[np.float64]:
        """u·u, m·m and u·m of each block, a row each, with one transfer to the host for all of them."""
        return np.array(torch.stack([_statistics(u, m) for _, m, u in self._blocks]).tolist())

    def update(self, rules: npt.ArrayLike) -> None:
        """g = a·u + b·m, m = μm + gain·g, p −= lr(g + μm) for each block's rule (a, b, lr, μ, gain)."""
        for block, (a, b, lr, mu, gain) in zip(self._blocks, np.asarray(rules).tolist(), strict=True):
            for p, m, u in _pieces(*block):
                g = torch.mul(u.to(m.dtype), a).add_(m, alpha=b)
                m.mul_(mu).add_(g, alpha=gain)
                p.add_(g.add_(m, alpha=mu), alpha=-lr)
