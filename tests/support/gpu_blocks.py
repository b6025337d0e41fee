"""Blocks for the outer step's GPU kernels: on a GPU if there is one, otherwise on the CPU through Triton's interpreter.

Importing this module skips the test file if Triton cannot be used here."""

import os
import sys

import pytest
import torch
from torch import Tensor

from heloco.outer import OuterOptimizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"  # which Triton reads when it is imported
triton = pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")
if DEVICE == "cpu" and "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was imported without its interpreter, and there is no GPU", allow_module_level=True)
import triton.language as tl  # noqa: E402

from heloco.outer.kernels import gpu  # noqa: E402, F401 - test files import it from here, where Triton was found first

EPS = torch.finfo(torch.float32).eps


@triton.jit
def counted(number, out):
    for _ in range(tl.load(number)):
        tl.store(out, tl.load(out) + 1)


def random(size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def blocks(sizes: list[int], p: torch.dtype = torch.float32, u: torch.dtype = torch.float32) -> list[list[Tensor]]:
    """Lists θ, m and Δ of blocks of these sizes."""
    return [[random(n, 3 * i + k, dtype) for i, n in enumerate(sizes)] for k, dtype in enumerate((p, torch.float32, u))]


def with_state(optimizer: OuterOptimizer, params: list[Tensor], m: list[Tensor], u: list[Tensor]) -> OuterOptimizer:
    for p, momentum, delta in zip(params, m, u, strict=True):
        optimizer.state[p]["momentum_buffer"] = momentum
        p.grad = delta
    return optimizer


def parameters(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.nn.Parameter(x.clone()) for x in tensors]


def near(left: list[Tensor], right: list[Tensor], ulps: float = 16, eps: float = EPS) -> None:
    for x, y in zip(left, right, strict=True):
        torch.testing.assert_close(x.detach().double(), y.detach().double(), rtol=ulps * eps, atol=ulps * eps)
