"""The order in which a block's sums are added on the CPU: fixed, so that no bit depends on the threads or on who adds.

A block is cut into pieces of at most PIECE elements, counted in its logical order. native.c and portable.py add a piece in the
order that native.c describes. Here the sums of a block's pieces are added: in pairs of neighbours, then pairs of pairs, and so
on; a piece that has no neighbour stays as it is.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

PIECE = 1 << 15
ROWS, LANES = 8, 16  # as in native.c

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of some blocks, block after block. An empty block has one empty piece."""

    block: Indices
    offset: Indices
    """The element of its block that a piece begins with."""
    length: Indices
    first: Indices
    """The number of each block's first piece."""
    pairs: tuple[tuple[Indices, Indices], ...]
    """What is added to what, level by level: the sums of the second pieces to those of the first."""

    @staticmethod
    @lru_cache(maxsize=8)
    def from_sizes(sizes: tuple[int, ...]) -> "Pieces":
        elements = np.array(sizes, dtype=np.int64)
        counts = np.maximum(1, -(-elements // PIECE))
        first = np.cumsum(counts) - counts
        block = np.repeat(np.arange(len(sizes)), counts)
        number = np.arange(len(block)) - first[block]
        pairs, stride = [], 1
        while (left := np.flatnonzero((number % (2 * stride) == 0) & (number + stride < counts[block]))).size:
            pairs.append((left, left + stride))
            stride *= 2
        offset = number * PIECE
        return Pieces(block, offset, np.minimum(PIECE, elements[block] - offset), first, tuple(pairs))

    def add(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """The sums of the blocks from those of their pieces, a row each; overwrites what it is given."""
        for left, right in self.pairs:
            sums[left] += sums[right]
        return sums[self.first] + 0.0  # no −0, whose sign would depend on what was filled up with zeros
