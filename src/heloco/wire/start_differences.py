"""Starts as differences from the start that a worker already has.

    D = Q(S − B),   S̃ = B + D

B is the worker's last start and S the new one. The worker goes on from S̃, and so does the synchronizer's knowledge of it: S̃ is a
function of B and D, computed by both sides to the bit. What Q leaves out of D is in the next difference.
"""

from torch import Tensor

from heloco.outer.kernels.windows import CodedBlock
from heloco.wire.formats import Format, decode_block, wide


def encode_difference(format: Format, new: Tensor, base: Tensor) -> tuple[Tensor, ...]:
    """The tensors that stand for new − base, of one block."""
    return format.encode(new.to(wide(new.dtype)) - base.to(wide(base.dtype)))


def add_difference(base: Tensor, difference: Tensor | CodedBlock) -> Tensor:
    """The block that the difference leads to, as a new tensor in the dtype of the base."""
    new_start = base.to(wide(base.dtype)) + decode_block(difference, base.device).to(wide(base.dtype))
    return new_start.to(base.dtype)
