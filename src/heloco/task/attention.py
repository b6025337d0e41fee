"""Causal self-attention from packed queries, keys and values, [sequences, length, 3, heads, depth] -> [sequences, length, width].

On a GPU whose products may be rounded (TF32), windows of up to 128 tokens have kernels of their own: see `attention_kernels`.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from heloco.task.rounding import may_round

LONGEST = 128
DEPTHS = (16, 32)  # of a head; the tiles of a deeper one do not fit in shared memory


def attend(qkv: Tensor) -> Tensor:
    """Attends to earlier tokens: [sequences, length, 3, heads, depth] -> [sequences, length, width]. It uses the fused kernels
    if they support the shape and rounding is allowed, otherwise torch's attention."""
    _, length, _, _, depth = qkv.shape
    if may_round(qkv) and length <= LONGEST and depth in DEPTHS:
        fused: Tensor = FusedAttention.apply(qkv)  # type: ignore[no-untyped-call]
        return fused
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class FusedAttention(torch.autograd.Function):
    """Causal attention of all heads by the kernels, forward and backward."""

    @staticmethod
    def forward(context: Any, qkv: Tensor) -> Tensor:
        from heloco.task.attention_kernels import attend_kernel

        qkv = qkv.contiguous()
        context.save_for_backward(qkv)
        sequences, length, _, heads, depth = qkv.shape
        out = qkv.new_empty(sequences, length, heads * depth)
        attend_kernel[(sequences * heads,)](qkv, out, length, 1 / math.sqrt(depth), **_tile(qkv))
        return out

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        from heloco.task.attention_kernels import attend_gradient_kernel

        [qkv] = context.saved_tensors
        sequences, length, _, heads, depth = qkv.shape
        gradients = torch.empty_like(qkv)
        attend_gradient_kernel[(sequences * heads,)](
            qkv, gradient.contiguous(), gradients, length, 1 / math.sqrt(depth), **_tile(qkv)
        )
        return gradients


def _tile(qkv: Tensor) -> dict[str, int]:
    _, length, _, heads, depth = qkv.shape
    return {"HEADS": heads, "LENGTH": max(16, 1 << (length - 1).bit_length()), "DEPTH": depth, "num_warps": 8, "num_stages": 1}
