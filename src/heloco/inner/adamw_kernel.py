"""A Triton kernel: AdamW over all blocks of a stack in one launch.

A step of a stack has a hundred blocks, most of them small: launched one by one, the gaps between them would add up.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import triton
import triton.language as tl


@triton.jit
def _at(address, offset, ALIGNED: tl.constexpr):
    place = address.to(tl.pointer_type(tl.float32)) + offset
    return tl.multiple_of(place, 16) if ALIGNED else place


@triton.jit
def adamw_kernel(
    addresses, pieces, factors, slices, CHUNK: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """One piece of one block in one slice. addresses: p, m, v, g of each block; pieces: (block, elements of a slice, beginning);
    factors: as `adamw_factors` gives them. ALIGNED: every block has a multiple of four elements, from a multiple of 16 bytes
    on."""
    piece = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1).to(tl.int64)
    if tl.load(factors + 3 * slices + s) == 0.0:  # the slice stands still
        return
    block, size, start = tl.load(pieces + 3 * piece), tl.load(pieces + 3 * piece + 1), tl.load(pieces + 3 * piece + 2)
    if ALIGNED:  # so that the compiler loads four at a time
        size, start = tl.multiple_of(size, 4), tl.multiple_of(start, 4)
    i = tl.arange(0, CHUNK)
    mask = start + i < size
    offset = s * size + start
    p = _at(tl.load(addresses + 4 * block), offset, ALIGNED) + i
    m = _at(tl.load(addresses + 4 * block + 1), offset, ALIGNED) + i
    v = _at(tl.load(addresses + 4 * block + 2), offset, ALIGNED) + i
    g = _at(tl.load(addresses + 4 * block + 3), offset, ALIGNED) + i
    gradient, first, second = tl.load(g, mask=mask), tl.load(m, mask=mask), tl.load(v, mask=mask)
    step, root = tl.load(factors + s), tl.load(factors + slices + s)
    decay, eps = tl.load(factors + 2 * slices + s), tl.load(factors + 6 * slices + s)
    first += (gradient - first) * tl.load(factors + 4 * slices + s)
    second += (gradient * gradient - second) * tl.load(factors + 5 * slices + s)
    new_values = tl.load(p, mask=mask) * decay - step * first / (tl.sqrt(second) / root + eps)
    tl.store(m, first, mask=mask)
    tl.store(v, second, mask=mask)
    tl.store(p, new_values, mask=mask)


@triton.jit(do_not_specialize=["steps"])
def without_gradient_kernel(p, m, v, p_after, m_after, v_after, factors, steps, size, CHUNK: tl.constexpr):
    """All steps of a round for elements without a gradient, with one reading and one writing of them."""
    i = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    mask = i < size
    x, first, second = tl.load(p + i, mask=mask), tl.load(m + i, mask=mask), tl.load(v + i, mask=mask)
    for t in range(steps):
        step, root = tl.load(factors + t), tl.load(factors + steps + t)
        decay, eps = tl.load(factors + 2 * steps + t), tl.load(factors + 6 * steps + t)
        first += (0.0 - first) * tl.load(factors + 4 * steps + t)
        second += (0.0 - second) * tl.load(factors + 5 * steps + t)
        x = x * decay - step * first / (tl.sqrt(second) / root + eps)
    tl.store(p_after + i, x, mask=mask)
    tl.store(m_after + i, first, mask=mask)
    tl.store(v_after + i, second, mask=mask)
