"""Attention's kernels against torch in float64; on a machine without a GPU in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from heloco.task.attention import FusedAttention, attend

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def packed(sequences: int, length: int, heads: int, depth: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(length)
    qkv = torch.randn(sequences, length, 3, heads, depth, generator=draw).to(DEVICE)
    return qkv.requires_grad_(), torch.randn(sequences, length, heads * depth, generator=draw).to(DEVICE)


def off_by(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.detach().double() - theirs.detach()).norm() / theirs.detach().norm())


@pytest.mark.parametrize(
    ("sequences", "length", "heads", "depth"), [(1, 1, 1, 16), (3, 16, 2, 16), (2, 50, 4, 32), (1, 127, 1, 32), (2, 128, 4, 32)]
)
def test_attention_and_its_gradient(fused: None, sequences: int, length: int, heads: int, depth: int) -> None:  # noqa: ARG001
    qkv, weight = packed(sequences, length, heads, depth)
    ours = attend(qkv)
    assert type(ours.grad_fn).__name__ == f"{FusedAttention.__name__}Backward"
    exact = qkv.detach().double().requires_grad_()
    theirs = attend(exact)  # float64 goes through torch
    assert type(theirs.grad_fn).__name__ != f"{FusedAttention.__name__}Backward"
    [ours_back] = torch.autograd.grad((ours * weight).sum(), qkv)
    [theirs_back] = torch.autograd.grad((theirs * weight).sum(), exact)
    assert off_by(ours, theirs) < 1e-3 and off_by(ours_back, theirs_back) < 1e-3  # TF32: 2⁻¹¹ ≈ 5e-4


def test_bf16_goes_through_the_kernels_under_autocast(fused: None) -> None:  # noqa: ARG001
    qkv, weight = packed(2, 50, 2, 16)
    halves = qkv.detach().bfloat16().requires_grad_()
    assert type(attend(halves).grad_fn).__name__ != f"{FusedAttention.__name__}Backward"
    with torch.autocast(DEVICE, torch.bfloat16):
        ours = attend(halves)
    assert type(ours.grad_fn).__name__ == f"{FusedAttention.__name__}Backward" and ours.dtype is torch.bfloat16
    exact = halves.detach().double().requires_grad_()
    theirs = attend(exact)
    [ours_back] = torch.autograd.grad((ours * weight).sum(), halves)
    [theirs_back] = torch.autograd.grad((theirs * weight).sum(), exact)
    assert off_by(ours, theirs) < 4e-3 and off_by(ours_back, theirs_back) < 8e-3  # the results have 8 bits: 2⁻⁹ ≈ 2e-3


def test_nobody_sees_the_future(fused: None) -> None:  # noqa: ARG001
    qkv, _ = packed(1, 20, 2, 16)
    before = attend(qkv)
    changed = qkv.detach().clone()
    changed[:, 12:] += 1
    after = attend(changed)
    assert torch.equal(before[:, :12], after[:, :12]) and not torch.equal(before[:, 12:], after[:, 12:])


def test_what_the_kernels_are_not_written_for_goes_through_torch(fused: None) -> None:  # noqa: ARG001
    for length, depth in ((129, 16), (8, 8)):
        qkv, _ = packed(1, length, 2, depth)
        assert type(attend(qkv).grad_fn).__name__ != f"{FusedAttention.__name__}Backward"
