"""The compiled CPU kernels of `native.c`: 7 passes over memory for a whole HeLoCo step.

They are built at installation if there is a C compiler. `available` is False if there was none, or if they are switched off with
HELOCO_KERNELS=portable; `portable.py` then gives the same bits with torch operations.
"""

import ctypes
import importlib.util
import mmap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .order import Pieces
from .switch import compiled_kernels_wanted
from .windows import Release

NAMES = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16"}
PAIRS = (
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float64),
)
"""The dtypes of momentum and pseudo-gradient that there are kernels for; parameters have the momentum's."""
PLAIN = (Tensor, torch.nn.Parameter)  # a subclass such as DTensor may have no memory of its own to point at


def _load() -> ctypes.CDLL | None:
    """The compiled library over torch's own OpenMP runtime, or None: not wanted, not built here, built from an older source, or
    no such runtime in this torch."""
    spec = importlib.util.find_spec("heloco.outer.kernels._native")
    runtimes = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    if not compiled_kernels_wanted() or spec is None or spec.origin is None or not runtimes:
        return None
    try:
        ctypes.CDLL(str(runtimes[0]), mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(spec.origin)
    except OSError:  # built for another machine or another C library: the portable kernels do the same
        return None
    return library if all(hasattr(library, _function("sums", *pair)) for pair in PAIRS) else None


def _function(name: str, dtype: torch.dtype, pseudo_gradient_dtype: torch.dtype) -> str:
    return f"heloco_{name}_{NAMES[dtype]}_{NAMES[pseudo_gradient_dtype]}"


library = _load()
available = library is not None


def serves(parameter: Tensor, momentum: Tensor, pseudo_gradient: Tensor) -> bool:
    """Whether a block can go through the compiled kernels."""
    if not available or parameter.dtype is not momentum.dtype or (momentum.dtype, pseudo_gradient.dtype) not in PAIRS:
        return False
    for t in (parameter, momentum, pseudo_gradient):
        if type(t) not in PLAIN or not t.is_cpu or not t.is_contiguous():
            return False
    return True


class BlockKernels:
    """Both passes over blocks of one pair of dtypes, cut into pieces: of each its block, length and address."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        momenta: Sequence[Tensor],
        pseudo_gradients: Sequence[Tensor],
        release: Release | None = None,
    ) -> None:
        self._is_mapped = release is not None  # the kernels themselves give back what they have read
        self._pieces = Pieces.from_sizes(tuple(map(Tensor.numel, momenta)))
        self._dtypes = momenta[0].dtype, pseudo_gradients[0].dtype
        self._tensors = (parameters, momenta, pseudo_gradients)  # which must live as long as the pointers to them
        self._p, self._m, self._u = (
            np.array(list(map(Tensor.data_ptr, tensors)), dtype=np.int64)[self._pieces.block]
            + self._pieces.offset * tensors[0].element_size()
            for tensors in self._tensors
        )

    def statistics(self) -> npt.NDArray[np.float64]:
        """u·u, m·m and u·m of each block, a row each."""
        sums = np.zeros((len(self._pieces.block), 3))
        self._call("sums", self._u, self._m, last=sums)
        return self._pieces.add(sums)

    def update(self, rules: npt.ArrayLike) -> None:
        """g = a·u + b·m, m = μm + gain·g, p −= lr(g + μm) for each block's rule (a, b, lr, μ, gain)."""
        piece_rules = np.asarray(rules, dtype=np.float64).take(self._pieces.block, axis=0)
        self._call("update", self._p, self._m, self._u, last=piece_rules)

    def _call(self, name: str, *addresses: npt.NDArray[np.int64], last: npt.NDArray[np.float64]) -> None:
        kernel = getattr(library, _function(name, *self._dtypes))
        pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*addresses, self._pieces.length)]
        page = mmap.PAGESIZE if self._is_mapped else 0
        kernel(*pointers, ctypes.c_int64(len(last)), ctypes.c_void_p(last.ctypes.data), ctypes.c_int64(page))
