"""Whether the fused kernels may serve: they round the operands of products to 11 bits, as TF32 does."""

import functools
import importlib.util

import torch
from torch import Tensor


def may_round(*tensors: Tensor) -> bool:
    """On a GPU that the kernels run on: float32 where `torch.set_float32_matmul_precision` allows it, and whatever autocast gives
    where that rounds to bfloat16, which keeps fewer bits. Not inside torch.compile, which has kernels of its own, nor inside
    transforms such as vmap, which cannot see into ours."""
    device = tensors[0].device
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or not runs_on(device):
        return False
    if torch.is_autocast_enabled(device.type):
        is_coarser = torch.get_autocast_dtype(device.type) is torch.bfloat16
        return is_coarser and all(t.dtype in (torch.float32, torch.bfloat16) for t in tensors)
    return torch.get_float32_matmul_precision() != "highest" and all(t.dtype is torch.float32 for t in tensors)


@functools.cache
def runs_on(device: torch.device) -> bool:
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_properties(device).major >= 8
