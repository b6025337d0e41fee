"""The compiled CPU kernels of `native.c`: 7 passes over memory for a whole HeLoCo step.

They are built at installation if there is a C compiler. `available` is False if there was none, or if they are switched off with
HELOCO_KERNELS=portable; `portable.py` then gives the same bits with torch operations.
"""

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .compiled import load_compiled
from .order import PIECE, Pieces
from .windows import Block, Release

NAMES = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16"}
PAIRS = (
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float64),
)
"""The dtypes of momentum and pseudo-gradient that there are kernels for; parameters have the momentum's."""
DECODED_PIECES = 16
"""The number of pieces of codes that are decoded at a time. They stay in the processor's cache until they are used."""
PLAIN = (Tensor, torch.nn.Parameter)  # a subclass such as DTensor may have no memory of its own to point at


def _function(name: str, dtype: torch.dtype, pseudo_gradient_dtype: torch.dtype) -> str:
    return f"heloco_{name}_{NAMES[dtype]}_{NAMES[pseudo_gradient_dtype]}"


library = load_compiled("heloco.outer.kernels._native", [_function("sums", *pair) for pair in PAIRS])
available = library is not None


def serves(parameter: Tensor, momentum: Tensor, pseudo_gradient: Block) -> bool:
    """Whether a block can go through the compiled kernels."""
    tensors = [t for t in (parameter, momentum, pseudo_gradient) if isinstance(t, Tensor)]
    if not available or parameter.dtype is not momentum.dtype or (momentum.dtype, dtype_of(pseudo_gradient)) not in PAIRS:
        return False
    return all(type(t) in PLAIN and t.is_cpu and t.is_contiguous() for t in tensors)


def dtype_of(block: Block) -> torch.dtype:
    return block.dtype if isinstance(block, Tensor) else torch.float32


class BlockKernels:
    """Both passes over blocks of one pair of dtypes. The blocks are cut into pieces, each with its block, length and address."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        momenta: Sequence[Tensor],
        pseudo_gradients: Sequence[Block],
        release: Release | None = None,
    ) -> None:
        """Either all pseudo-gradients are tensors, or all are codes."""
        self._is_mapped = release is not None  # the kernels themselves give back what they have read
        self._pieces = Pieces.from_sizes(tuple(map(Tensor.numel, momenta)))
        self._dtypes = momenta[0].dtype, dtype_of(pseudo_gradients[0])
        tensors = [u for u in pseudo_gradients if isinstance(u, Tensor)]
        self._tensors = (parameters, momenta, tensors)  # which must live as long as the pointers to them
        self._p, self._m = self._addresses(parameters), self._addresses(momenta)
        self._u = self._addresses(tensors) if tensors else None
        self._codes = [u for u in pseudo_gradients if not isinstance(u, Tensor)]

    def _addresses(self, tensors: Sequence[Tensor]) -> npt.NDArray[np.int64]:
        """The memory address of each piece."""
        starts = np.array(list(map(Tensor.data_ptr, tensors)), dtype=np.int64)
        return starts[self._pieces.block] + self._pieces.offset * tensors[0].element_size()

    def statistics(self) -> npt.NDArray[np.float64]:
        """u·u, m·m and u·m of each block, a row each."""
        sums = np.zeros((len(self._pieces.block), 3))
        for window, u in self._windows():
            self._call("sums", u, self._m[window], numbers=sums[window], lengths=self._pieces.length[window])
        return self._pieces.add(sums)

    def update(self, rules: npt.ArrayLike) -> None:
        """g = a·u + b·m, m = μm + gain·g, p −= lr(g + μm) for each block's rule (a, b, lr, μ, gain)."""
        piece_rules = np.asarray(rules, dtype=np.float64).take(self._pieces.block, axis=0)
        for window, u in self._windows():
            p, m, lengths = self._p[window], self._m[window], self._pieces.length[window]
            self._call("update", p, m, u, numbers=piece_rules[window], lengths=lengths)

    def _windows(self) -> Iterator[tuple[slice, npt.NDArray[np.int64]]]:
        """Pieces, and where their pseudo-gradients lie: all at once, or a few at a time that were decoded for it."""
        if self._u is not None:
            yield slice(None), self._u
            return
        numbers = torch.empty(DECODED_PIECES * PIECE)
        for first in range(0, len(self._pieces.block), DECODED_PIECES):
            window = slice(first, min(first + DECODED_PIECES, len(self._pieces.block)))
            self._decode(window, numbers)
            yield window, numbers.data_ptr() + np.arange(window.stop - first) * (PIECE * numbers.element_size())

    def _decode(self, window: slice, numbers: Tensor) -> None:
        """Decodes pieces, each to a place of its own; those of one block in one go."""
        block, offset, length = (column[window] for column in (self._pieces.block, self._pieces.offset, self._pieces.length))
        starts = np.flatnonzero(np.diff(block, prepend=-1)).tolist()
        for begin, end in pairwise([*starts, len(block)]):
            count = int(length[begin:end].sum())
            if count:
                self._codes[block[begin]].read(int(offset[begin]), numbers[begin * PIECE : begin * PIECE + count])

    def _call(
        self, name: str, *addresses: npt.NDArray[np.int64], numbers: npt.NDArray[np.float64], lengths: npt.NDArray[np.int64]
    ) -> None:
        kernel = getattr(library, _function(name, *self._dtypes))
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*addresses, lengths)]
        page = mmap.PAGESIZE if self._is_mapped and self._u is not None else 0
        kernel(*pointers, ctypes.c_int64(len(lengths)), ctypes.c_void_p(numbers.ctypes.data), ctypes.c_int64(page))
