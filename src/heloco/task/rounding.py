"""Whether the fused kernels may serve: they round the operands of products to 11 bits, as TF32 does."""

import functools
import importlib.util

import torch
from torch import Tensor


def may_round(*tensors: Tensor) -> bool:
    """float32 on a GPU that the kernels run on, where `torch.set_float32_matmul_precision` allows it, outside of autocast (whose
    rounding is another) and of torch.compile (which has kernels of its own)."""
    device = tensors[0].device
    return (
        runs_on(device)
        and all(t.dtype is torch.float32 for t in tensors)
        and torch.get_float32_matmul_precision() != "highest"
        and not torch.is_autocast_enabled(device.type)
        and not torch.compiler.is_compiling()
    )


@functools.cache
def runs_on(device: torch.device) -> bool:
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_properties(device).major >= 8
