"""A Triton kernel: a step of Muon for all matrices of one shape in a stack, in one launch.

With torch's operations a step reads and writes each matrix some forty times, and most products are of 128 × 128 numbers. Here one
program does everything for one matrix of one slice, and what it writes in between stays in the cache.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
import triton
import triton.language as tl


@triton.jit
def _product(left, right, WIDE: tl.constexpr):
    """Of bfloat16, added up in float32. WIDE: for Triton's interpreter, which has no products of bfloat16."""
    if WIDE:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
    return tl.dot(left, right)


@triton.jit
def _matrix(address, begin):
    return tl.load(address).to(tl.pointer_type(tl.float32)) + begin


@triton.jit
def muon_kernel(
    addresses, scratch, numbers, slices, mu, eps, a, b, c,
    SHORT: tl.constexpr, LONG: tl.constexpr, STEP: tl.constexpr, TALL: tl.constexpr, ITERATIONS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """addresses: p, momentum, gradient of each block; scratch: room for a matrix in bfloat16 per program; numbers: decay, size of
    the step, 1 − μ (0 where a slice stands still) of each slice. The matrix is seen as [SHORT, LONG], TALL ones transposed."""
    block, s = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    decay, size, rise = tl.load(numbers + s), tl.load(numbers + slices + s), tl.load(numbers + 2 * slices + s)
    if rise == 0.0:
        return
    row_stride: tl.constexpr = 1 if TALL else LONG
    column_stride: tl.constexpr = SHORT if TALL else 1
    offsets = tl.arange(0, SHORT)[:, None] * row_stride + tl.arange(0, STEP)[None, :] * column_stride
    row, begin = addresses + 3 * block, s * (SHORT * LONG)
    p, m, g = _matrix(row, begin), _matrix(row + 1, begin), _matrix(row + 2, begin)
    x = scratch + (block * slices + s) * (SHORT * LONG)
    squares = tl.zeros([SHORT, STEP], dtype=tl.float32)
    for start in range(0, LONG, STEP):
        place = offsets + start * column_stride
        gradient, momentum = tl.load(g + place), tl.load(m + place)
        momentum += (gradient - momentum) * rise
        tl.store(m + place, momentum)
        direction = (gradient + mu * (momentum - gradient)).to(tl.bfloat16)
        tl.store(x + place, direction)
        squares += direction.to(tl.float32) * direction.to(tl.float32)
    norm = tl.sqrt(tl.sum(tl.sum(squares, 1), 0)).to(tl.bfloat16).to(tl.float32)  # torch's has the precision of the matrix
    norm = tl.maximum(norm, eps)
    tl.debug_barrier()
    for iteration in range(ITERATIONS):
        gram = tl.zeros([SHORT, SHORT], dtype=tl.float32)
        for start in range(0, LONG, STEP):
            place = offsets + start * column_stride
            part = tl.load(x + place)
            if iteration == 0:
                part = (part.to(tl.float32) / norm).to(tl.bfloat16)
                tl.store(x + place, part)
            gram += _product(part, tl.trans(part), WIDE)
        rounded = gram.to(tl.bfloat16)
        polynomial = (b * rounded.to(tl.float32) + c * _product(rounded, rounded, WIDE)).to(tl.bfloat16)
        tl.debug_barrier()
        for start in range(0, LONG, STEP):
            place = offsets + start * column_stride
            part = tl.load(x + place)
            part = (a * part.to(tl.float32) + _product(polynomial, part, WIDE)).to(tl.bfloat16)
            if iteration == ITERATIONS - 1:
                tl.store(p + place, tl.load(p + place) * decay - size * part.to(tl.float32))
            else:
                tl.store(x + place, part)
        tl.debug_barrier()
