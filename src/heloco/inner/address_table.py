"""Where the tensors of a launch lie, for kernels that move many blocks at once."""

from collections.abc import Sequence

import torch
from torch import Tensor


class AddressTable:
    """A table on the device: a row for each block, a column for each of its tensors."""

    def __init__(self, blocks: int, columns: int, device: torch.device) -> None:
        self.table = torch.zeros(blocks, columns, dtype=torch.int64, device=device)
        self._recorded_addresses: Tensor | None = None

    def set(self, blocks: Sequence[tuple[Tensor, ...]]) -> bool:
        """Whether all lie at multiples of 16 bytes. While a graph is recorded, the table waits for `finish_recording`."""
        addresses = torch.tensor([[tensor.data_ptr() for tensor in block] for block in blocks])
        if self.table.is_cuda and torch.cuda.is_current_stream_capturing():
            self._recorded_addresses = addresses  # the same in every replay
        else:
            self.table.copy_(addresses)
        return not (addresses % 16).any().item()

    def finish_recording(self) -> None:
        """After a graph was recorded with a launch in it: now its addresses are known."""
        if self._recorded_addresses is not None:
            self.table.copy_(self._recorded_addresses)
