"""A Triton kernel: the losses of rows of logits, and in their place the gradients for them."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import triton
import triton.language as tl


@triton.jit
def loss_and_gradient_kernel(logits, targets, losses, scale, vocab, row_length, BLOCK: tl.constexpr):
    """One token: l = lse − x_y, and x_v ← scale · (exp(x_v − lse) − [v = y]). The columns from `vocab` to `row_length` are
    padding and become zero.

    The target's logit is added up in the first pass: a load of its own could meet what a faster warp wrote in the second."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_length
    target = tl.load(targets + row)
    top, total, target_logit = -float("inf"), 0.0, 0.0
    for first in range(0, vocab, BLOCK):
        v = first + tl.arange(0, BLOCK)
        x = tl.load(logits + v, mask=v < vocab, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), 0)
        target_logit += tl.sum(tl.where(v == target, x, 0.0), 0)
        top = new
    level = top + tl.log(total)
    tl.store(losses + row, level - target_logit)
    for first in range(0, row_length, BLOCK):
        v = first + tl.arange(0, BLOCK)
        x = tl.load(logits + v, mask=v < vocab, other=-float("inf")).to(tl.float32)
        gradient = (tl.exp(x - level) - tl.where(v == target, 1.0, 0.0)) * scale
        tl.store(logits + v, gradient.to(logits.dtype.element_ty), mask=v < row_length)
