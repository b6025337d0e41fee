"""A table of which a round reads a few rows (the token embedding): only those rows are put into the stack.

A row that is not read has no gradient. AdamW that starts afresh only decays it: p ← p Π(1 − lr·wd). AdamW that keeps its state
also moves it by what is left of the momentum, and needs nothing but the row itself for that (`adamw.without_gradient`). So the
rows that a round reads are gathered at its start, moved with everything else, and put back at its end. The others are moved
at the end, all steps at once.
"""

from typing import Any

import torch
from torch import Tensor

from heloco.inner.stacked_loss import Reads

STRIDE = 1024  # rows come in multiples of this, so that a stack of other rounds finds its place


class Table:
    """The rows of a table that the rounds of a stack read, gathered for each slice."""

    def __init__(self, reads: Reads, size: int, device: torch.device) -> None:
        self.index, self.height = reads.index, reads.height
        self._reads = reads.rows
        self.capacity = 0
        self._read_mask = torch.zeros(size, self.height, dtype=torch.bool, device=device)
        self._rows: list[Tensor] = []

    def load(self, data: Any) -> Tensor:
        """Notes the rows that the data, [steps, S, …], read. Returns their places in the stack, in the same form."""
        read = self._reads(data)
        by_slice = read.transpose(0, 1).flatten(1)
        self._read_mask.zero_().scatter_(1, by_slice, True)
        counts = self._read_mask.sum(1).tolist()
        self._rows = list(torch.split(self._read_mask.nonzero()[:, 1], counts))
        rows_needed = min(self.height, -(-max(counts) // STRIDE) * STRIDE)
        self.capacity = max(self.capacity, rows_needed)
        places = self._read_mask.cumsum(1) - 1
        shape = read.transpose(0, 1).shape
        return places.gather(1, by_slice).view(shape).transpose(0, 1)

    def read(self, s: int, start: Tensor, into: Tensor) -> None:
        torch.index_select(start, 0, self._rows[s], out=into[: len(self._rows[s])])

    def write(self, s: int, rows: Tensor, into: Tensor) -> Tensor:
        """The rows that the round read, put into their places."""
        return into.index_copy_(0, self._rows[s], rows[: len(self._rows[s])])
