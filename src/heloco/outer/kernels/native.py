"""The compiled CPU kernels of `native.c`: 7 passes over memory for a whole HeLoCo step.

Built at installation where there is a C compiler; `available` is False where there was none, and `portable.py` serves instead.
"""

import ctypes
import importlib.util
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SPAN = 1 << 16  # elements a thread takes at once; fixed, so that sums do not depend on the number of threads
NAMES = {torch.float32: "f32", torch.float64: "f64"}
PLAIN = (Tensor, torch.nn.Parameter)  # a subclass such as DTensor may have no memory of its own to point at


def _load() -> ctypes.CDLL | None:
    """The compiled library over torch's own OpenMP runtime, or None: not built here, or no such runtime in this torch."""
    spec = importlib.util.find_spec("heloco.outer.kernels._native")
    runtimes = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    if spec is None or spec.origin is None or not runtimes:
        return None
    try:
        ctypes.CDLL(str(runtimes[0]), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(spec.origin)
    except OSError:  # built for another machine or another C library: the portable kernels do the same
        return None


_library = _load()
available = _library is not None


def serves(*tensors: Tensor) -> bool:
    """Whether these tensors of one block can go through the compiled kernels."""
    dtype = tensors[0].dtype
    if not available or dtype not in NAMES:
        return False
    for t in tensors:  # noqa: SIM110 (asked of every block in every step: the quickest way to say it counts)
        if type(t) not in PLAIN or t.dtype is not dtype or not t.is_cpu or not t.is_contiguous():
            return False
    return True


def _call(name: str, dtype: torch.dtype, *arrays: npt.NDArray[np.generic], spans: int, last: npt.NDArray[np.float64]) -> None:
    function = getattr(_library, f"heloco_{name}_{NAMES[dtype]}")
    function(*(ctypes.c_void_p(a.ctypes.data) for a in arrays), ctypes.c_int64(spans), ctypes.c_void_p(last.ctypes.data))


@lru_cache(maxsize=8)
def _cut(sizes: tuple[int, ...]) -> tuple[npt.NDArray[np.int64], ...]:
    """The number of each block's first span, and of each span its block, where in it it begins, and its length."""
    elements = np.array(sizes, dtype=np.int64)
    counts = np.maximum(1, -(-elements // SPAN))
    first = np.concatenate(([0], np.cumsum(counts)[:-1]))
    block = np.repeat(np.arange(len(sizes)), counts)
    offset = (np.arange(len(block)) - first[block]) * SPAN
    return first, block, offset, np.minimum(SPAN, elements[block] - offset)


class Passes:
    """Both passes over blocks of one dtype, cut into spans of at most SPAN elements: of each its block, length and beginning."""

    def __init__(self, parameters: Sequence[Tensor], momenta: Sequence[Tensor], pseudo_gradients: Sequence[Tensor]) -> None:
        self._first, self._block, offset, self._length = _cut(tuple(map(Tensor.numel, momenta)))
        self._dtype = momenta[0].dtype
        self._tensors = (parameters, momenta, pseudo_gradients)  # which must live as long as the pointers to them
        offset = offset * momenta[0].element_size()
        self._p, self._m, self._u = (
            np.array(list(map(Tensor.data_ptr, tensors)), dtype=np.int64)[self._block] + offset for tensors in self._tensors
        )

    def statistics(self) -> npt.NDArray[np.float64]:
        """u·u, m·m and u·m of each block, a row each."""
        parts = np.zeros((len(self._block), 3))
        _call("statistics", self._dtype, self._u, self._m, self._length, spans=len(parts), last=parts)
        return np.add.reduceat(parts, self._first)

    def update(self, rules: npt.ArrayLike) -> None:
        """g = a·u + b·m, m = μm + gain·g, p −= lr(g + μm) for each block's rule (a, b, lr, μ, gain)."""
        each = np.asarray(rules, dtype=np.float64).take(self._block, axis=0)  # which lie one behind the other, always
        _call("update", self._dtype, self._p, self._m, self._u, self._length, spans=len(each), last=each)
