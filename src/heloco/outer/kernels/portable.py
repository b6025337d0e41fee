"""The same two passes in torch operations, for every device, dtype and layout.

On the CPU a block is worked on in pieces that fit the cache, so that no temporary grows with the block, and every operation is
elementwise. So the results are those of the compiled kernels to the bit, whatever the number of threads: sums are added in the
order that native.c describes, and a product is rounded before it is added (torch's `alpha=` may fuse the two).
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .native import PLAIN
from .order import LANES, PIECE, ROWS, Pieces
from .windows import Block, Release, dense, flat_pieces, give_back


def pieces(*blocks: Block) -> Iterator[tuple[Tensor, ...]]:
    """Flat pieces of blocks of one shape. Those of tensors can be written to. If a tensor cannot be cut so, the whole blocks."""
    if all(block.is_cpu and block.is_contiguous() for block in blocks if isinstance(block, Tensor)):
        yield from zip(*(flat_pieces(block, PIECE) for block in blocks), strict=True)
    else:
        yield tuple(map(dense, blocks))


def in_order(*blocks: Block) -> bool:
    """Whether sums over these blocks are added in the fixed order: plain tensors on the CPU, and codes."""
    return all(type(block) in PLAIN and block.is_cpu for block in blocks if isinstance(block, Tensor))


class _Adder:
    """Adds the products of one piece after the other, in memory that is used again for each. With numpy, because threads would
    only wait for each other here."""

    def __init__(self) -> None:
        self._factors = torch.empty(2, PIECE, dtype=torch.float64)
        self._products = np.empty((3, PIECE))

    def sums(self, momentum: Tensor, pseudo_gradient: Block) -> list[list[float]]:
        """u·u, m·m and u·m of each piece of a block."""
        pairs = zip(flat_pieces(pseudo_gradient, PIECE), torch.split(momentum.reshape(-1), PIECE), strict=True)
        return [self._piece(*pair) for pair in pairs]

    def _piece(self, u: Tensor, m: Tensor) -> list[float]:
        count, groups = u.numel(), max(1, -(-u.numel() // (ROWS * LANES)))
        self._factors[0, :count].copy_(u.to(m.dtype))
        self._factors[1, :count].copy_(m)
        x, y = factors = self._factors.numpy()[:, : groups * ROWS * LANES]
        factors[:, count:] = 0
        products = self._products[:, : factors.shape[1]]
        for out, left, right in zip(products, (x, y, x), (x, y, y), strict=True):
            np.multiply(left, right, out=out)
        rows = _halve(products, groups * LANES).reshape(3, groups, LANES)
        while rows.shape[1] > 1:
            if rows.shape[1] % 2:
                rows = np.concatenate([rows, np.zeros((3, 1, LANES))], axis=1)
            rows = rows[:, 0::2] + rows[:, 1::2]
        return [float(total) for total in _halve(rows[:, 0], 1)[:, 0]]


def _halve(x: npt.NDArray[np.float64], length: int) -> npt.NDArray[np.float64]:
    """The second half of the last dimension added to the first, in place, again and again, down to this length."""
    while x.shape[-1] > length:
        half = x.shape[-1] // 2
        x[..., :half] += x[..., half:]
        x = x[..., :half]
    return x


def _sums_elsewhere(momentum: Tensor, pseudo_gradient: Block) -> Tensor:
    """On other devices, and of tensors that torch spreads over processes: in whatever order torch adds there."""
    u, m = dense(pseudo_gradient).to(momentum).reshape(-1), momentum.reshape(-1)
    return torch.stack([torch.dot(u, u), torch.dot(m, m), torch.dot(u, m)]).double()


class BlockKernels:
    """Both passes over blocks of any kind on one device, all of them in order or none."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        momenta: Sequence[Tensor],
        pseudo_gradients: Sequence[Block],
        release: Release | None = None,
    ) -> None:
        self._blocks = list(zip(parameters, momenta, pseudo_gradients, strict=True))
        self._release = release

    @np.errstate(all="ignore")  # what is not finite shows in the sums
    def statistics(self) -> npt.NDArray[np.float64]:
        """u·u, m·m and u·m of each block, a row each."""
        if not all(in_order(m, u) for _, m, u in self._blocks):  # with one transfer to the host for all blocks
            return np.array(torch.stack([_sums_elsewhere(m, u) for _, m, u in self._blocks]).tolist())
        whole = Pieces.from_sizes(tuple(m.numel() for _, m, _ in self._blocks))
        adder, rows = _Adder(), list[list[float]]()
        for _, m, u in self._blocks:
            rows += adder.sums(m, u)
            give_back(u, self._release)
        return whole.add(np.array(rows))

    def update(self, rules: npt.ArrayLike) -> None:
        """g = a·u + b·m, m = μm + gain·g, p −= lr(g + μm) for each block's rule (a, b, lr, μ, gain)."""
        for block, rule in zip(self._blocks, np.asarray(rules).tolist(), strict=True):
            for p, m, u in pieces(*block):
                _update_piece(p, m, u, *rule)
            give_back(block[2], self._release)


def _update_piece(p: Tensor, m: Tensor, u: Tensor, a: float, b: float, lr: float, mu: float, gain: float) -> None:
    g = torch.mul(u.to(m.dtype), a)
    g.add_(torch.mul(m, b))
    m.mul_(mu).add_(torch.mul(g, gain))
    g.add_(torch.mul(m, mu)).mul_(lr)
    p.sub_(g)
