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
    addresses, pieces, factors, slices, rise1, rise2, eps, CHUNK: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """One piece of one block in one slice. addresses: p, m, v, g of each block; pieces: (block, elements of a slice, beginning);
    factors: as `adamw_factors` gives them, and whether the slice is active. ALIGNED: every block has a multiple of four elements,
    from a multiple of 16 bytes on."""
    piece = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1).to(tl.int64)
    block, size, start = tl.load(pieces + 3 * piece), tl.load(pieces + 3 * piece + 1), tl.load(pieces + 3 * piece + 2)
    if ALIGNED:  # so that the compiler loads four at a time
        size, start = tl.multiple_of(size, 4), tl.multiple_of(start, 4)
    i = tl.arange(0, CHUNK)
    here = start + i < size
    offset = s * size + start
    p = _at(tl.load(addresses + 4 * block), offset, ALIGNED) + i
    m = _at(tl.load(addresses + 4 * block + 1), offset, ALIGNED) + i
    v = _at(tl.load(addresses + 4 * block + 2), offset, ALIGNED) + i
    g = _at(tl.load(addresses + 4 * block + 3), offset, ALIGNED) + i
    gradient, first, second = tl.load(g, mask=here), tl.load(m, mask=here), tl.load(v, mask=here)
    step, root = tl.load(factors + s), tl.load(factors + slices + s)
    decay, active = tl.load(factors + 2 * slices + s), tl.load(factors + 3 * slices + s)
    first += (gradient - first) * (rise1 * active)
    second += (gradient * gradient - second) * (rise2 * active)
    moved = tl.load(p, mask=here) * decay - step * first / (tl.sqrt(second) / root + eps)
    tl.store(m, first, mask=here)
    tl.store(v, second, mask=here)
    tl.store(p, moved, mask=here)
