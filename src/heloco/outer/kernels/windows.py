"""A pseudo-gradient that lies in a mapped file is read window by window, and the pages of each are released: a step then needs
memory for θ, m and one window, however large the model is. (The compiled kernels release what they have read themselves.)"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

WINDOW = 1 << 22
"""Elements of a window."""
Release = Callable[[int, int], None]
"""(address, bytes): gives that memory back. Reading there again brings the same content."""


class CodedBlock(Protocol):
    """A block whose numbers are codes in a file. They are decoded as they are read, so the whole block is never in memory."""

    @property
    def shape(self) -> torch.Size: ...

    def read(self, first: int, into: Tensor) -> None:
        """Writes the numbers from the `first`-th on, in the block's logical order, into a flat float32 tensor on the CPU."""


Block = Tensor | CodedBlock


def dense(block: Block) -> Tensor:
    """The block as a tensor: itself, or its codes decoded into a new one."""
    if isinstance(block, Tensor):
        return block
    numbers = torch.empty(block.shape)
    block.read(0, numbers.view(-1))
    return numbers


def brought_to(device: torch.device, block: Block, release: Release | None) -> Block:
    """The block where kernels on this device can read it. Codes are on the CPU, and are decoded there as they are read."""
    if (block.device == device) if isinstance(block, Tensor) else (device.type == "cpu"):
        return block
    copy = dense(block).to(device)
    give_back(block, release)
    return copy


def give_back(block: Block, release: Release | None) -> None:
    """Releases a tensor that was read, if it lies in a mapped file. Codes are small, and stay."""
    if release is not None and isinstance(block, Tensor):
        release(block.data_ptr(), block.nbytes)


def flat_pieces(block: Block, size: int) -> Iterator[Tensor]:
    """The numbers of a block in pieces of this size. Those of codes share their memory: each is to be used before the next."""
    if isinstance(block, Tensor):
        yield from torch.split(block.reshape(-1), size)
        return
    numbers = torch.empty(min(size, block.shape.numel()))
    for first in range(0, block.shape.numel(), size):
        piece = numbers[: block.shape.numel() - first]
        block.read(first, piece)
        yield piece


def parts(tensors: Iterable[Tensor], release: Release | None) -> Iterator[Tensor]:
    """The tensors, cut into flat parts of at most a window, each of which is released when the next is asked for. Without
    `release` the tensors themselves."""
    for tensor in tensors:
        if release is None or not tensor.is_contiguous():
            yield tensor
            continue
        for part in torch.split(tensor.view(-1), WINDOW):
            yield part
            give_back(part, release)


def windows(lengths: npt.NDArray[np.int64]) -> Iterator[slice]:
    """Pieces of these lengths, in groups of about a window."""
    number = np.cumsum(lengths) // WINDOW
    edges = np.flatnonzero(np.diff(number)) + 1
    for first, last in pairwise([0, *edges.tolist(), len(lengths)]):
        yield slice(first, last)


def groups(blocks: Sequence[Block]) -> Iterator[list[int]]:
    """The numbers of blocks, in groups of about a window; one that is larger is a group of its own."""
    for window in windows(np.array([block.shape.numel() for block in blocks], dtype=np.int64)):
        yield list(range(window.start, window.stop))
