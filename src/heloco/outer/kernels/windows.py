"""A pseudo-gradient that lies in a mapped file is read window by window, and the pages of each are released: a step then needs
memory for θ, m and one window, however large the model is. (The compiled kernels release what they have read themselves.)"""

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

WINDOW = 1 << 22
"""Elements of a window."""
Release = Callable[[int, int], None]
"""(address, bytes): gives that memory back. Reading there again brings the same content."""


def give_back(tensor: Tensor, release: Release | None) -> None:
    """Releases a tensor that was read, if it lies in a mapped file."""
    if release is not None:
        release(tensor.data_ptr(), tensor.nbytes)


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


def groups(tensors: list[Tensor]) -> Iterator[list[int]]:
    """The numbers of tensors, in groups of about a window; one that is larger is a group of its own."""
    for window in windows(np.array([t.numel() for t in tensors], dtype=np.int64)):
        yield list(range(window.start, window.stop))
