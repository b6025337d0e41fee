"""The compiled CPU kernels of `native.c`: 7 passes over memory for a whole HeLoCo step.

Built at installation where there is a C compiler; `available` is False where there was none, and `portable.py` serves instead.
"""

import ctypes
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SPAN = 1 << 16  # elements a thread takes at once; fixed, so that sums do not depend on the number of threads
NAMES = {torch.float32: "f32", torch.float64: "f64"}
PLAIN = (Tensor, torch.nn.Parameter)  # a subclass such as DTensor may have no memory of its own to point at

Pointers = npt.NDArray[np.int64]


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


class _Spans:
    """Blocks cut into spans of at most SPAN elements: for each span its block, its length and where it begins."""

    def __init__(self, blocks: Sequence[Tensor]) -> None:
        sizes = np.array([block.numel() for block in blocks], dtype=np.int64)
        counts = np.maximum(1, -(-sizes // SPAN))
        self.first = np.concatenate(([0], np.cumsum(counts)[:-1]))
        self.block = np.repeat(np.arange(len(blocks)), counts)
        self.offset = (np.arange(len(self.block)) - self.first[self.block]) * SPAN
        self.length = np.minimum(SPAN, sizes[self.block] - self.offset)
        self.width = blocks[0].element_size()

    def pointers(self, blocks: Sequence[Tensor]) -> Pointers:
        starts = np.array([block.data_ptr() for block in blocks], dtype=np.int64)
        return starts[self.block] + self.offset * self.width


def _call(name: str, dtype: torch.dtype, *arrays: npt.NDArray[np.generic], spans: int, last: npt.NDArray[np.float64]) -> None:
    function = getattr(_library, f"heloco_{name}_{NAMES[dtype]}")
    function(*(ctypes.c_void_p(a.ctypes.data) for a in arrays), ctypes.c_int64(spans), ctypes.c_void_p(last.ctypes.data))


def statistics(pseudo_gradients: Sequence[Tensor], momenta: Sequence[Tensor]) -> list[tuple[float, float, float]]:
    """(u·u, m·m, u·m) of each block. All of one dtype."""
    spans = _Spans(momenta)
    parts = np.zeros((len(spans.block), 3))
    u, m = spans.pointers(pseudo_gradients), spans.pointers(momenta)
    _call("statistics", momenta[0].dtype, u, m, spans.length, spans=len(spans.block), last=parts)
    return [(uu, mm, um) for uu, mm, um in np.add.reduceat(parts, spans.first).tolist()]


def update(
    parameters: Sequence[Tensor],
    momenta: Sequence[Tensor],
    pseudo_gradients: Sequence[Tensor],
    rules: Sequence[tuple[float, float, float, float, float]],
) -> None:
    """g = a·u + b·m, m = μm + gain·g, p −= lr(g + μm) for each block's rule (a, b, lr, μ, gain). All of one dtype."""
    spans = _Spans(momenta)
    each = np.ascontiguousarray(np.array(rules, dtype=np.float64)[spans.block])
    p, m, u = (spans.pointers(blocks) for blocks in (parameters, momenta, pseudo_gradients))
    _call("update", momenta[0].dtype, p, m, u, spans.length, spans=len(spans.block), last=each)
