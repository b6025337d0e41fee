"""`codes.encode` and `codes.decode` by the fastest that serves: codes.c on the CPU, Triton on a GPU, else torch operations."""

import ctypes
from types import ModuleType

from torch import Tensor

from heloco.outer.kernels import gpu_kernels
from heloco.outer.kernels.compiled import load_compiled
from heloco.wire import codes
from heloco.wire.codes import KINDS, Kind, Noise

library = load_compiled("heloco.wire._codes", ("heloco_encode", "heloco_decode"))


class _Task(ctypes.Structure):
    """As in codes.c."""

    _fields_ = (
        ("rows", ctypes.c_int64), ("length", ctypes.c_int64), ("first_row", ctypes.c_int64), ("kind", ctypes.c_int),
        ("is_random", ctypes.c_int), ("seed", ctypes.c_uint32), ("decay", ctypes.c_float),
    )  # fmt: skip


def encode(
    x: Tensor, kind: Kind, *, residual: Tensor | None = None, decay: float = 1.0, noise: Noise | None = None
) -> tuple[Tensor, Tensor]:
    """See `codes.encode`."""
    tensors = [x] if residual is None else [x, residual]
    if gpu := _gpu_codes(*tensors):
        encoded: tuple[Tensor, Tensor] = gpu.encode(x, kind, residual=residual, decay=decay, noise=noise)
        return encoded
    if library is None or not _are_plain(*tensors):
        return codes.encode(x, kind, residual=residual, decay=decay, noise=noise)
    result = codes.empty(x, kind)
    first_row, seed = (noise.first_row, noise.seed) if noise else (0, 0)
    task = _Task(*x.shape, first_row, KINDS.index(kind), noise is not None, seed, decay)
    library.heloco_encode(ctypes.byref(task), *map(_pointer, (x, residual, *result)))
    return result


def decode(code_bytes: Tensor, scales: Tensor, kind: Kind, length: int, first: int, into: Tensor) -> None:
    """See `codes.decode`."""
    if gpu := _gpu_codes(code_bytes, scales, into):
        gpu.decode(code_bytes, scales, kind, length, first, into)
        return
    if library is None or not _are_plain(code_bytes, scales, into):
        codes.decode(code_bytes, scales, kind, length, first, into)
        return
    numbers = ctypes.c_int64(length), KINDS.index(kind), ctypes.c_int64(first), ctypes.c_int64(into.numel())
    library.heloco_decode(_pointer(code_bytes), _pointer(scales), *numbers, _pointer(into))


def _gpu_codes(*tensors: Tensor) -> ModuleType | None:
    """The kernels for a GPU, if all tensors are there and Triton compiles for it."""
    if not all(t.is_cuda and t.is_contiguous() for t in tensors) or gpu_kernels(tensors[0].get_device()) is None:
        return None
    from heloco.wire import gpu_codes

    return gpu_codes


def _are_plain(*tensors: Tensor) -> bool:
    return all(t.is_cpu and t.is_contiguous() for t in tensors)


def _pointer(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())
