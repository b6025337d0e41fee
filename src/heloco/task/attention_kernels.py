"""Triton kernels: causal attention over windows short enough to be one tile, from packed q, k, v to packed gradients.

A program has one head of one sequence: its scores never leave the multiprocessor, forwards or backwards, and nothing but q, k
and v is kept in between.

    p = softmax(q kᵀ / √D + mask),   o = p v
    ∂v = pᵀ ∂o,   ∂p = ∂o vᵀ,   ∂s = p (∂p − Σ p ∂p) / √D,   ∂q = ∂s k,   ∂k = ∂sᵀ q

Products are TF32, sums float32. The matrix units cut operands off after 10 bits of mantissa, so they are rounded before.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import triton
import triton.language as tl


@triton.jit
def _product(a, b):
    return tl.dot(_round_product(a), _round_product(b), input_precision="tf32")


@triton.jit
def _round_product(x):
    """To the nearest number of TF32, half away from zero."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _probabilities(q, k, t, length, scale):
    scores = _product(q, tl.trans(k)) * scale
    scores = tl.where((t[None, :] <= t[:, None]) & (t[None, :] < length), scores, float("-inf"))
    p = tl.exp(scores - tl.max(scores, 1)[:, None])
    return p / tl.sum(p, 1)[:, None]


@triton.jit
def attend_kernel(qkv, out, length, scale, HEADS: tl.constexpr, LENGTH: tl.constexpr, DEPTH: tl.constexpr):
    n, h = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    t, d = tl.arange(0, LENGTH), tl.arange(0, DEPTH)
    row_mask, width = (t < length)[:, None], HEADS * DEPTH
    at = qkv + (n * length + t)[:, None] * (3 * width) + (h * DEPTH + d)[None, :]
    q = tl.load(at, mask=row_mask, other=0.0).to(tl.float32)
    k = tl.load(at + width, mask=row_mask, other=0.0).to(tl.float32)
    v = tl.load(at + 2 * width, mask=row_mask, other=0.0).to(tl.float32)
    outputs = _product(_probabilities(q, k, t, length, scale), v)
    tl.store(out + (n * length + t)[:, None] * width + (h * DEPTH + d)[None, :], outputs, mask=row_mask)


@triton.jit
def attend_gradient_kernel(qkv, gradient, dqkv, length, scale, HEADS: tl.constexpr, LENGTH: tl.constexpr, DEPTH: tl.constexpr):
    n, h = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    t, d = tl.arange(0, LENGTH), tl.arange(0, DEPTH)
    row_mask, width = (t < length)[:, None], HEADS * DEPTH
    place = (n * length + t)[:, None] * (3 * width) + (h * DEPTH + d)[None, :]
    q = tl.load(qkv + place, mask=row_mask, other=0.0).to(tl.float32)
    k = tl.load(qkv + place + width, mask=row_mask, other=0.0).to(tl.float32)
    v = tl.load(qkv + place + 2 * width, mask=row_mask, other=0.0).to(tl.float32)
    do = tl.load(gradient + (n * length + t)[:, None] * width + (h * DEPTH + d)[None, :], mask=row_mask, other=0.0).to(tl.float32)
    p = _probabilities(q, k, t, length, scale)
    tl.store(dqkv + place + 2 * width, _product(tl.trans(p), do), mask=row_mask)
    dp = _product(do, tl.trans(v))
    ds = p * (dp - tl.sum(p * dp, 1)[:, None]) * scale
    tl.store(dqkv + place, _product(ds, k), mask=row_mask)
    tl.store(dqkv + place + width, _product(tl.trans(ds), q), mask=row_mask)
