"""The outer step on a GPU: three launches for a whole HeLoCo step, whatever the number of blocks, and one transfer at its end.

    statistics   u·u, m·m and u·m of each chunk of at most CHUNK elements
    decide       their sums of each block in double, in a fixed order, and from these the block's rule (a, b, lr, μ, gain)
    update       g = a·u + b·m, m = μm + gain·g, p −= lr(g + μm), or nothing if any pseudo-gradient is not finite

The kernels find the blocks through a table of addresses, and each chunk's block through a table of chunks. The host learns the
sums when all is done: 7 passes over memory, and nothing waits for the host in between.

This module needs Triton, and is imported when the first block on a GPU appears.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, import-untyped, import-not-found"
# What a kernel is made of are Triton's types, which Triton finds out for itself.

import warnings
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from .coefficients import NAMES, Coefficients, coefficients, place
from .native import PLAIN
from .windows import Release

CHUNK = 4096  # elements a program takes at once: 16 for each of its threads, in loads of 16 bytes
WARPS = 8
TAIL = 1024  # elements at once where a chunk is shorter or its tensors are not aligned
PARTS = 1024  # chunks whose sums `decide` adds at once
KINDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
COEFFICIENTS = tl.constexpr(len(NAMES))
LR, MU, GAIN = (tl.constexpr(place(name)) for name in ("lr", "mu", "gain"))
WEIGHT, BEFORE, AFTER = (tl.constexpr(place(name)) for name in ("weight", "before", "after"))
C_OK, K_S, K_D, KAPPA = (tl.constexpr(place(name)) for name in ("c_ok", "k_s", "k_d", "kappa"))
BETA_MAX, EPS, C_BAD, RAMP = (tl.constexpr(place(name)) for name in ("beta_max", "eps", "c_bad", "ramp"))
RULE = tl.constexpr(5)  # a, b, lr, μ, gain
LARGEST = tl.constexpr(torch.finfo(torch.float32).max)  # of Δ·Δ: see `OuterOptimizer.step`


def serves(parameter: Tensor, momentum: Tensor, pseudo_gradient: Tensor) -> bool:
    """Whether a block on this GPU can go through these kernels."""
    if parameter.dtype is not torch.float32 or momentum.dtype is not torch.float32 or pseudo_gradient.dtype not in KINDS:
        return False
    for t in (parameter, momentum, pseudo_gradient):  # noqa: SIM110 (asked of every block in every step)
        if type(t) not in PLAIN or not t.is_contiguous():
            return False
    return True


# ---- the kernels


@triton.jit
def _read(address, offset, length, KIND: tl.constexpr, WHOLE: tl.constexpr, SIZE: tl.constexpr, EVICT: tl.constexpr):
    """SIZE elements as float32, zeros from `length` on. WHOLE: all of them are there, from a multiple of 16 bytes on."""
    at = tl.arange(0, SIZE)
    start = address.to(tl.pointer_type(KIND)) + offset
    if WHOLE:
        x = tl.load(tl.multiple_of(start, 16) + at, eviction_policy=EVICT)
    else:
        x = tl.load(start + at, mask=at < length, other=0.0, eviction_policy=EVICT)
    return x.to(tl.float32)


@triton.jit
def _write(address, offset, length, x, WHOLE: tl.constexpr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    start = address.to(tl.pointer_type(tl.float32)) + offset
    if WHOLE:
        tl.store(tl.multiple_of(start, 16) + at, x, eviction_policy="evict_first")
    else:
        tl.store(start + at, x, mask=at < length, eviction_policy="evict_first")


@triton.jit
def _products(u, m, offset, length, U: tl.constexpr, WHOLE: tl.constexpr, SIZE: tl.constexpr):
    """u·u, m·m and u·m of SIZE elements."""
    x = _read(u, offset, length, U, WHOLE, SIZE, "")
    y = _read(m, offset, length, tl.float32, WHOLE, SIZE, "")
    return tl.sum(x * x, 0), tl.sum(y * y, 0), tl.sum(x * y, 0)


@triton.jit(do_not_specialize=["blocks"])
def statistics_kernel(table, blocks, chunks, parts, rules, U: tl.constexpr, CHUNK: tl.constexpr, TAIL: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)
    block = tl.load(chunks + 3 * chunk)
    offset = tl.load(chunks + 3 * chunk + 1)
    length = tl.load(chunks + 3 * chunk + 2)
    m = tl.load(table + blocks + block)
    u = tl.load(table + 2 * blocks + block)
    if (length == CHUNK) & ((m | u) % 16 == 0):
        uu, mm, um = _products(u, m, offset, length, U, True, CHUNK)
    else:
        uu, mm, um = 0.0, 0.0, 0.0
        for start in range(0, length, TAIL):
            part_uu, part_mm, part_um = _products(u, m, offset + start, length - start, U, False, TAIL)
            uu += part_uu
            mm += part_mm
            um += part_um
    tl.store(parts + 3 * chunk, uu)
    tl.store(parts + 3 * chunk + 1, mm)
    tl.store(parts + 3 * chunk + 2, um)
    tl.store(rules, 1.0, mask=chunk == 0)  # finite, until `decide` finds otherwise


@triton.jit
def _combine(uu, mm, um, row):
    """(a, b) of G = a·Δ + b·m: `combine_all` of correction.py, with all of its cases computed and one of them chosen."""
    weight, before, after = tl.load(row + WEIGHT), tl.load(row + BEFORE), tl.load(row + AFTER)
    c_ok, k_s, k_d, kappa = tl.load(row + C_OK), tl.load(row + K_S), tl.load(row + K_D), tl.load(row + KAPPA)
    beta_max, eps, c_bad, ramp = tl.load(row + BETA_MAX), tl.load(row + EPS), tl.load(row + C_BAD), tl.load(row + RAMP)
    u, v = before * tl.sqrt(uu), tl.sqrt(mm)
    c = before * um / (u * v)
    c = tl.where(c < 1.0, c, 1.0)
    c = tl.where(c > -1.0, c, -1.0)
    conf = u / (u + kappa * v + eps)

    beta = k_s * -c * conf
    beta = tl.where(beta < beta_max, beta, beta_max)
    slope = tl.where(ramp != 0.0, (c_ok - c) / (c_ok - c_bad), 1.0 - c)
    lam = k_d * slope * conf
    lam = tl.where(lam < 1.0, lam, 1.0)
    length = tl.sqrt((1.0 - lam) * (1.0 - lam) + lam * lam + 2.0 * lam * (1.0 - lam) * c)
    length = tl.where(length > eps, length, eps)

    as_it_is = (u < eps) | (v < eps) | (u * v == 0.0) | (c >= c_ok)  # skipped or kept
    damped = c < 0.0
    a = tl.where(as_it_is | damped, weight, weight * (1.0 - lam) / length)
    b = tl.where(damped, after * (-beta * c * u / v), after * (lam * u / (v * length)))
    return a, tl.where(as_it_is, 0.0, b)


@triton.jit(do_not_specialize=["blocks"])
def _decide(table, blocks, firsts, parts, sums, rules, PARTS: tl.constexpr):
    block = tl.program_id(0)
    first, end = tl.load(firsts + block), tl.load(firsts + block + 1)
    uu = tl.zeros([PARTS], tl.float64)
    mm = tl.zeros([PARTS], tl.float64)
    um = tl.zeros([PARTS], tl.float64)
    for start in range(first, end, PARTS):
        chunk = start + tl.arange(0, PARTS)
        uu += tl.load(parts + 3 * chunk, mask=chunk < end, other=0.0)
        mm += tl.load(parts + 3 * chunk + 1, mask=chunk < end, other=0.0)
        um += tl.load(parts + 3 * chunk + 2, mask=chunk < end, other=0.0)
    uu, mm, um = tl.sum(uu, 0), tl.sum(mm, 0), tl.sum(um, 0)
    tl.store(sums + 3 * block, uu)
    tl.store(sums + 3 * block + 1, mm)
    tl.store(sums + 3 * block + 2, um)
    tl.store(rules, 0.0, mask=(uu <= LARGEST) == 0)  # NaN is not below anything; whichever block writes, it writes the same

    row = (table + 4 * blocks).to(tl.pointer_type(tl.float64)) + COEFFICIENTS * tl.load(table + 3 * blocks + block)
    a, b = _combine(uu, mm, um, row)
    rule = rules + 1 + RULE * block
    tl.store(rule, a)
    tl.store(rule + 1, b)
    tl.store(rule + 2, tl.load(row + LR))
    tl.store(rule + 3, tl.load(row + MU))
    tl.store(rule + 4, tl.load(row + GAIN))


@triton.jit
def _move(p, m, u, offset, length, rule, U: tl.constexpr, WHOLE: tl.constexpr, SIZE: tl.constexpr):
    """Everything here is used for the last time: it need not stay in the cache, where u and m of other chunks may still lie."""
    a, b, lr = tl.load(rule).to(tl.float32), tl.load(rule + 1).to(tl.float32), tl.load(rule + 2).to(tl.float32)
    mu, gain = tl.load(rule + 3).to(tl.float32), tl.load(rule + 4).to(tl.float32)
    x = _read(p, offset, length, tl.float32, WHOLE, SIZE, "evict_first")
    y = _read(m, offset, length, tl.float32, WHOLE, SIZE, "evict_first")
    g = a * _read(u, offset, length, U, WHOLE, SIZE, "evict_first") + b * y
    y = mu * y + gain * g
    _write(m, offset, length, y, WHOLE, SIZE)
    _write(p, offset, length, x - lr * (g + mu * y), WHOLE, SIZE)


@triton.jit(do_not_specialize=["blocks"])
def _update(table, blocks, chunks, rules, U: tl.constexpr, CHUNK: tl.constexpr, TAIL: tl.constexpr):
    chunk = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)  # what was read last comes first: it may lie in the cache
    finite = tl.load(rules)
    block = tl.load(chunks + 3 * chunk)
    offset = tl.load(chunks + 3 * chunk + 1)
    length = tl.load(chunks + 3 * chunk + 2)
    p = tl.load(table + block)
    m = tl.load(table + blocks + block)
    u = tl.load(table + 2 * blocks + block)
    rule = rules + 1 + RULE * block
    if finite != 0.0:
        if (length == CHUNK) & ((p | m | u) % 16 == 0):
            _move(p, m, u, offset, length, rule, U, True, CHUNK)
        else:
            for start in range(0, length, TAIL):
                _move(p, m, u, offset + start, length - start, rule, U, False, TAIL)


# ---- their launches


@lru_cache(maxsize=8)
def _cut(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """(block, offset, length) of each chunk, and where the chunks of each block begin; an empty block has one empty chunk."""
    elements = np.array(sizes, dtype=np.int64)
    firsts = np.concatenate(([0], np.cumsum(np.maximum(1, -(-elements // CHUNK)))))
    block = np.repeat(np.arange(len(sizes)), np.diff(firsts))
    offset = (np.arange(len(block)) - firsts[block]) * CHUNK
    chunks = np.stack([block, offset, np.minimum(CHUNK, elements[block] - offset)], axis=1)
    return torch.from_numpy(chunks).to(device), torch.from_numpy(firsts).to(device)


def _upload(values: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Copies numbers to the GPU without waiting. torch does not reuse the pinned memory before it has been read."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class BlockKernels:
    """Both passes, or the whole step at once, over blocks on one GPU whose pseudo-gradients are of one dtype."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        momenta: Sequence[Tensor],
        pseudo_gradients: Sequence[Tensor],
        release: Release | None = None,  # noqa: ARG002 - what is on a GPU lies in no file
    ) -> None:
        self._tensors = (parameters, momenta, pseudo_gradients)  # which must live as long as the pointers to them
        self._blocks = len(momenta)
        self._device = momenta[0].device
        self._u = KINDS[pseudo_gradients[0].dtype]
        self._chunks, self._firsts = _cut(tuple(map(Tensor.numel, momenta)), self._device)

    def statistics(self) -> npt.NDArray[np.float64]:
        """u·u, m·m and u·m of each block, a row each, with one transfer to the host for all of them."""
        sums, _ = self.decide(self.table([coefficients()], [0] * self._blocks))
        return sums.cpu().numpy()

    def update(self, rules: npt.ArrayLike) -> None:
        """g = a·u + b·m, m = μm + gain·g, p −= lr(g + μm) for each block's rule (a, b, lr, μ, gain)."""
        self._update(self.table([], []), _upload(np.append(1.0, np.asarray(rules, dtype=np.float64)), self._device))

    def step(self, group_coefficients: Sequence[Coefficients], group_of: Sequence[int]) -> npt.NDArray[np.float64]:
        """The whole step: the sums it was decided by. Nothing has changed if a pseudo-gradient's is not finite."""
        return self.launch(self.table(group_coefficients, group_of)).cpu().numpy()

    def table(self, group_coefficients: Sequence[Coefficients], group_of: Sequence[int]) -> Tensor:
        """What the kernels read, in one transfer: the addresses of all p, m and u, each block's group, each group's numbers."""
        addresses = [address for tensors in self._tensors for address in map(Tensor.data_ptr, tensors)]
        numbers = np.array(group_coefficients, dtype=np.float64).reshape(-1)
        return _upload(np.append(np.array([*addresses, *group_of], dtype=np.int64), numbers.view(np.int64)), self._device)

    def launch(self, table: Tensor) -> Tensor:
        """The three launches; the sums, still on the GPU."""
        sums, rules = self.decide(table)
        self._update(table, rules)
        return sums

    def decide(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of each block; then 1 if all pseudo-gradients are finite, followed by the rule of each block."""
        count = len(self._chunks)
        parts = torch.empty(3 * count, dtype=torch.float32, device=self._device)
        sums = torch.empty(self._blocks, 3, dtype=torch.float64, device=self._device)
        rules = torch.empty(1 + 5 * self._blocks, dtype=torch.float64, device=self._device)
        with torch.cuda.device_of(table):
            statistics_kernel[(count,)](
                table, self._blocks, self._chunks, parts, rules, self._u, CHUNK, TAIL, num_warps=WARPS, enable_fp_fusion=True
            )
            # without fused multiplications and additions, so that the host comes to the same decisions from the same sums
            _decide[(self._blocks,)](
                table, self._blocks, self._firsts, parts, sums, rules, PARTS, num_warps=4, enable_fp_fusion=False
            )
        return sums, rules

    def _update(self, table: Tensor, rules: Tensor) -> None:
        with torch.cuda.device_of(table):
            _update[(len(self._chunks),)](
                table, self._blocks, self._chunks, rules, self._u, CHUNK, TAIL, num_warps=WARPS, enable_fp_fusion=True
            )


def works(device: int) -> bool:
    """Whether the kernels can be compiled for the GPU of this number: Triton needs a C compiler, and a GPU it knows."""
    try:
        one = [torch.ones(1, device="cpu" if device < 0 else f"cuda:{device}")]
        return bool((BlockKernels(one, one, one).statistics() == 1).all())
    except Exception as problem:  # of many kinds, from the compiler to the driver
        warnings.warn(
            f"Outer steps on this GPU take torch's operations, which are slower: Triton says {problem!r}.", stacklevel=2
        )
        return False
