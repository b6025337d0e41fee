"""Loads libraries of compiled kernels. They are built at installation if there is a C compiler."""

import ctypes
import importlib.util
from collections.abc import Iterable
from pathlib import Path

import torch

from .switch import compiled_kernels_wanted


def load_compiled(module: str, functions: Iterable[str]) -> ctypes.CDLL | None:
    """The library that was built as this module, over torch's own OpenMP runtime. None if compiled kernels are not wanted, it was
    not built here or from a source without these functions, or this torch has no such runtime."""
    spec = importlib.util.find_spec(module)
    runtimes = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    if not compiled_kernels_wanted() or spec is None or spec.origin is None or not runtimes:
        return None
    try:
        ctypes.CDLL(str(runtimes[0]), mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(spec.origin)
    except OSError:  # built for another machine or another C library: the portable kernels do the same
        return None
    return library if all(hasattr(library, name) for name in functions) else None
