"""Whether the operands of products may be rounded, and whether our kernels may serve: they round to 11 bits, as TF32 does."""

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def may_round(*tensors: Tensor) -> bool:
    """On a GPU that the kernels run on: float32 where `torch.set_float32_matmul_precision` allows it, and whatever autocast gives
    where that rounds to bfloat16, which keeps fewer bits. Not inside torch.compile, which has kernels of its own, nor inside
    transforms such as vmap, which cannot see into ours."""
    device = tensors[0].device
    if not kernels_serve(device):
        return False
    if torch.is_autocast_enabled(device.type):
        is_coarser = torch.get_autocast_dtype(device.type) is torch.bfloat16
        return is_coarser and all(t.dtype in (torch.float32, torch.bfloat16) for t in tensors)
    return torch.get_float32_matmul_precision() != "highest" and all(t.dtype is torch.float32 for t in tensors)


def kernels_serve(device: torch.device) -> bool:
    """Whether our kernels can be called here: not inside torch.compile or a transform."""
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()) and runs_on(device)


@functools.cache
def runs_on(device: torch.device) -> bool:
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_properties(device).major >= 8


@contextmanager
def rounded_products(device: torch.device) -> Iterator[None]:
    """On a GPU, float32 products in TF32 (operands keep 11 bits, sums are float32), unless the user chose otherwise."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda" and before == "highest":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
