"""Triton kernels: `codes.encode` and `codes.decode` on a GPU, with the same bits.

A program works on some groups of 128 numbers. Divisions are rounded as IEEE says (`div_rn`), and no product is fused with a sum.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import triton
import triton.language as tl
from torch import Tensor

from heloco.wire.codes import GROUP, KINDS, TINY, Kind, Noise, empty, groups_of, row_bytes

GROUPS_AT_ONCE = 16
TO_WHOLE = 12582912.0
"""1.5 · 2²³: a small number plus this has no digits after the point, rounded to the nearest even one."""


@triton.jit
def _mix_bits(x):
    x = (x ^ (x >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    x = (x ^ (x >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def _noise(seed, place):
    """24 random bits as a number in [0, 1)."""
    high = _mix_bits((place >> 32).to(tl.uint32) ^ seed)
    return (_mix_bits(place.to(tl.uint32) ^ high) >> 8).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _value(code, KIND: tl.constexpr):
    """The number that a code stands for, before its scale. KIND: 0 int8, 1 int4, 2 e3m0."""
    if KIND == 0:
        return ((code ^ 128) - 128).to(tl.float32)
    if KIND == 1:
        return ((code ^ 8) - 8).to(tl.float32)
    power = tl.where((code & 7) > 0, ((code & 7) + 120) << 23, 0).to(tl.float32, bitcast=True)
    return tl.where(code >= 8, -power, power)


@triton.jit
def _code(quotient, random, KIND: tl.constexpr, RANDOM: tl.constexpr, WHOLE: tl.constexpr):
    if KIND == 2:
        size = tl.abs(quotient)
        up = (random * 8388608.0).to(tl.int32) if RANDOM else 0x400000
        power = ((size.to(tl.int32, bitcast=True) + up) >> 23) - 120
        small = (size * 64.0 + (random if RANDOM else 0.5) >= 1.0).to(tl.int32)
        code = tl.where(size < 0.015625, small, tl.minimum(power, 7))
        return code | tl.where((quotient < 0) & (code > 0), 8, 0)
    limit: tl.constexpr = 127.0 if KIND == 0 else 7.0
    whole = tl.floor(quotient + random) if RANDOM else (quotient + WHOLE) - WHOLE
    return tl.minimum(tl.maximum(whole, -limit), limit).to(tl.int32) & (255 if KIND == 0 else 15)


@triton.jit(do_not_specialize=["seed", "first_place"])
def _encode_kernel(
    x, residual, codes, scales, count, groups, length, bytes_per_row, decay, seed, first_place, tiny,
    KIND: tl.constexpr, RANDOM: tl.constexpr, FEEDBACK: tl.constexpr, WHOLE: tl.constexpr, AT_ONCE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * AT_ONCE + tl.arange(0, AT_ONCE)
    row, begin = index // groups, index % groups * WIDTH
    column = begin[:, None] + tl.arange(0, WIDTH)[None, :]
    mask = (index < count)[:, None] & (column < length)
    place = row[:, None] * length + column
    numbers = tl.load(x + place, mask=mask, other=0.0)
    if FEEDBACK:
        numbers = tl.load(residual + place, mask=mask, other=0.0) * decay + numbers
    size = tl.abs(numbers)
    largest = tl.max(size, 1)
    is_finite = tl.sum((~(size < float("inf"))).to(tl.int32), 1) == 0
    limit: tl.constexpr = 127.0 if KIND == 0 else 7.0
    scale = largest if KIND == 2 else tl.div_rn(largest, limit)
    scale = tl.where(largest < tiny, 1.0, scale)
    usable = tl.where(is_finite, scale, 1.0)[:, None]
    is_coded = is_finite[:, None] & (size >= tiny)
    quotient = tl.where(is_coded, tl.div_rn(tl.where(is_coded, numbers, 0.0), usable), 0.0)
    random = _noise(seed.to(tl.uint32), first_place + place) if RANDOM else 0.0
    code = _code(quotient, random, KIND, RANDOM, WHOLE)
    scale = tl.where(is_finite, scale, float("nan"))
    tl.store(scales + index, scale, mask=index < count)
    if FEEDBACK:
        tl.store(residual + place, numbers - _value(code, KIND) * scale[:, None], mask=mask)
    if KIND == 0:
        tl.store(codes + row[:, None] * bytes_per_row + column, code.to(tl.uint8), mask=mask)
    else:
        code = tl.where(mask, code, 0)
        low, high = tl.split(tl.reshape(code, (AT_ONCE, WIDTH // 2, 2)))
        byte = begin[:, None] // 2 + tl.arange(0, WIDTH // 2)[None, :]
        inside = (index < count)[:, None] & (byte < bytes_per_row)
        tl.store(codes + row[:, None] * bytes_per_row + byte, (low | (high << 4)).to(tl.uint8), mask=inside)


@triton.jit
def _decode_kernel(
    codes, scales, out, first, count, length, groups, bytes_per_row, KIND: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    i = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    mask = i < count
    place = first + i
    row, column = place // length, place % length
    if KIND == 0:
        code = tl.load(codes + row * bytes_per_row + column, mask=mask, other=0).to(tl.int32)
    else:
        pair = tl.load(codes + row * bytes_per_row + column // 2, mask=mask, other=0).to(tl.int32)
        code = tl.where(column % 2 == 1, pair >> 4, pair & 15)
    scale = tl.load(scales + row * groups + column // 128, mask=mask, other=1.0)
    tl.store(out + i, _value(code, KIND) * scale, mask=mask)


def encode(
    x: Tensor, kind: Kind, *, residual: Tensor | None = None, decay: float = 1.0, noise: Noise | None = None
) -> tuple[Tensor, Tensor]:
    """See `codes.encode`. All tensors are contiguous."""
    codes, scales = empty(x, kind)
    rows, length = x.shape
    groups = groups_of(length)
    count = rows * groups
    seed, first_row = (noise.seed, noise.first_row) if noise else (0, 0)
    if count:
        _encode_kernel[(triton.cdiv(count, GROUPS_AT_ONCE),)](
            x, x if residual is None else residual, codes, scales, count, groups, length, row_bytes(kind, length), decay,
            seed, first_row * length, TINY,
            KIND=KINDS.index(kind), RANDOM=noise is not None, FEEDBACK=residual is not None, WHOLE=TO_WHOLE,
            AT_ONCE=GROUPS_AT_ONCE, WIDTH=GROUP, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scales


def decode(code_bytes: Tensor, scales: Tensor, kind: Kind, length: int, first: int, into: Tensor) -> None:
    """See `codes.decode`. All tensors are contiguous."""
    chunk = 2048
    if into.numel():
        _decode_kernel[(triton.cdiv(into.numel(), chunk),)](
            code_bytes, scales, into, first, into.numel(), length, groups_of(length), row_bytes(kind, length),
            KIND=KINDS.index(kind), CHUNK=chunk,
        )  # fmt: skip
