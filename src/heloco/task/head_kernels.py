"""Triton kernels: cross-entropy of a linear head over a large vocabulary, without its logits ever lying in memory.

The logits of a step are the largest thing of a small model (256 tokens × 50,257 words: 51 MB, read and written some six times).
Here a tile of them is computed, used and forgotten, once for the losses and ∂x and once more for ∂w:

    p_tv = exp(x_t·w_v − lse_t),   lse_t = log Σ_v exp(x_t·w_v)
    l_t  = lse_t − x_t·w_{y_t}
    ∂x_t = g_t (Σ_v p_tv w_v − w_{y_t})            attention of x over the words, in its running form
    ∂w_v = Σ_t g_t (p_tv − [v = y_t]) x_t

Operands are rounded to fp16, which keeps as many bits as TF32 does, p and g scaled into its range; sums are in float32.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import triton
import triton.language as tl


@triton.jit
def losses_kernel(
    x, weight, targets, high, total, target_logit, means, tokens, vocab, blocks, chunk,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr, MEANS: tl.constexpr,
):  # fmt: skip
    """Of each token over one chunk of the vocabulary, with h the largest logit there: h, Σ exp(logit − h), the target's logit if
    it is among these, and where MEANS, Σ exp(logit − h) w."""
    slice_ = (tl.program_id(0) // blocks).to(tl.int64)
    c, chunks = tl.program_id(1), tl.num_programs(1)
    t = (tl.program_id(0) % blocks) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, WIDTH)
    token_mask = t < tokens
    row = slice_ * tokens + t
    xs = tl.load(x + row[:, None] * WIDTH + d[None, :], mask=token_mask[:, None], other=0.0).to(tl.float16)
    target = tl.load(targets + row, mask=token_mask, other=-1)
    top = tl.full([TOKENS], -1e30, tl.float32)
    sums = tl.zeros([TOKENS], tl.float32)
    target_sum = tl.zeros([TOKENS], tl.float32)
    mean = tl.zeros([TOKENS, WIDTH], tl.float32)
    weight += slice_ * vocab * WIDTH
    for first in range(c * chunk, tl.minimum((c + 1) * chunk, vocab), WORDS):
        v = first + tl.arange(0, WORDS)
        w = tl.load(weight + v[:, None] * WIDTH + d[None, :], mask=(v < vocab)[:, None], other=0.0).to(tl.float16)
        logits = tl.where((v < vocab)[None, :], tl.dot(xs, tl.trans(w)), float("-inf"))
        target_sum += tl.sum(tl.where(v[None, :] == target[:, None], logits, 0.0), 1)
        new = tl.maximum(top, tl.max(logits, 1))
        p = tl.exp(logits - new[:, None])
        shrink = tl.exp(top - new)
        sums = sums * shrink + tl.sum(p, 1)
        if MEANS:
            mean = tl.dot((p * 16384.0).to(tl.float16), w, mean * shrink[:, None])
        top = new
    at = row * chunks + c
    tl.store(high + at, top, mask=token_mask)
    tl.store(total + at, sums, mask=token_mask)
    tl.store(target_logit + at, target_sum, mask=token_mask)
    if MEANS:
        tl.store(means + at[:, None] * WIDTH + d[None, :], mean * (1 / 16384.0), mask=token_mask[:, None])


@triton.jit
def weight_gradient_kernel(
    x, weight, targets, lse, scale, unscale, gradient, tokens, vocab, chunk,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """∂w of one chunk of the vocabulary. All tokens of a slice are one tile; `scale` brings g into fp16's range."""
    slice_, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t, d = tl.arange(0, TOKENS), tl.arange(0, WIDTH)
    token_mask = t < tokens
    row = slice_ * tokens + t
    xs = tl.load(x + row[:, None] * WIDTH + d[None, :], mask=token_mask[:, None], other=0.0).to(tl.float16)
    target = tl.load(targets + row, mask=token_mask, other=-1)
    level = tl.load(lse + row, mask=token_mask, other=0.0)
    g = tl.load(scale + row, mask=token_mask, other=0.0)  # 0 for what is beyond the tokens
    back = tl.load(unscale)
    weight += slice_ * vocab * WIDTH
    gradient += slice_ * vocab * WIDTH
    for first in range(c * chunk, tl.minimum((c + 1) * chunk, vocab), WORDS):
        v = first + tl.arange(0, WORDS)
        at = v[:, None] * WIDTH + d[None, :]
        w = tl.load(weight + at, mask=(v < vocab)[:, None], other=0.0).to(tl.float16)
        p = tl.exp(tl.dot(xs, tl.trans(w)) - level[:, None])
        delta = (p - tl.where(v[None, :] == target[:, None], 1.0, 0.0)) * g[:, None]
        tl.store(gradient + at, tl.dot(tl.trans(delta.to(tl.float16)), xs) * back, mask=(v < vocab)[:, None])
