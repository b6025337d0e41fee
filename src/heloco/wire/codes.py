"""Numbers as codes of 8 or 4 bits, with a scale for each group of 128.

A block is seen as a matrix: its first dimension counts the rows, and a row is cut into groups of 128 numbers, the last of which
may be shorter. So a group never crosses a row, and a machine that has some rows of a block can encode them by itself.

    int8   scale = max|x| / 127    code = round(x / scale), −127 … 127                    a byte each
    int4   scale = max|x| / 7      code = round(x / scale), −7 … 7                        two in a byte
    e3m0   scale = max|x|          code = sign and exponent of the nearest of 0, ±2⁻⁶ … ±1   two in a byte

Rounding is to the nearest, or stochastic: up with a probability that makes the mean right. A number below 2⁻¹⁰⁰ counts as 0, and
a group of zeros has the scale 1. A group with NaN or Inf has the scale NaN, so the whole block is refused where it arrives.

The functions here use torch operations, for every device. `compiled_codes.py` gives the same bits faster.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Kind = Literal["int8", "int4", "e3m0"]
KINDS: tuple[Kind, ...] = ("int8", "int4", "e3m0")
"""The kinds of codes, in the order of codes.c."""
GROUP = 128
TINY = 2.0**-100
LIMITS = {"int8": 127.0, "int4": 7.0}
CHUNK = 1 << 18
"""About this number of elements is worked on at a time, so that temporaries stay small."""


@dataclass(frozen=True)
class Noise:
    """Stochastic rounding: the random numbers of a block follow from the seed and each number's place in the block."""

    seed: int
    """32 bits."""
    first_row: int = 0
    """Of the rows that are encoded, in the whole block."""


def row_bytes(kind: Kind, length: int) -> int:
    """Bytes of the codes of a row with this many numbers."""
    return length if kind == "int8" else (length + 1) // 2


def groups_of(length: int) -> int:
    """Groups of a row with this many numbers."""
    return -(-length // GROUP)


def empty(x: Tensor, kind: Kind) -> tuple[Tensor, Tensor]:
    """Room for the codes and scales of a matrix."""
    rows, length = x.shape
    codes = torch.empty(rows, row_bytes(kind, length), dtype=torch.uint8, device=x.device)
    return codes, torch.empty(rows, groups_of(length), device=x.device)


def encode(
    x: Tensor, kind: Kind, *, residual: Tensor | None = None, decay: float = 1.0, noise: Noise | None = None
) -> tuple[Tensor, Tensor]:
    """Codes [rows, bytes] and scales [rows, groups] of a float32 matrix.

    With a `residual` e of the same shape the codes are those of decay·e + x, and e becomes what they leave out (error feedback).
    """
    rows, length = x.shape
    codes, scales = empty(x, kind)
    for first, last in _row_chunks(rows, length):
        part = x[first:last]
        if residual is not None:
            part = residual[first:last] * decay + part
        place = None if noise is None else (noise.seed, (noise.first_row + first) * length)
        codes[first:last], scales[first:last] = _encode_rows(part, kind, place)
        if residual is not None:
            residual[first:last] = part - _decode_rows(codes[first:last], scales[first:last], kind, length)
    return codes, scales


def decode(codes: Tensor, scales: Tensor, kind: Kind, length: int, first: int, into: Tensor) -> None:
    """Writes the numbers of a block from its `first`-th on, counted row by row, into a flat float32 tensor."""
    at = first
    while at < first + into.numel():  # whole rows, or within a row whole groups
        row, column = divmod(at, length)
        left = first + into.numel() - at
        if column or left < length:
            begin, end = column // GROUP * GROUP, min(length, column + left)
            last_group, byte = groups_of(end), 1 if kind == "int8" else 2
            row_codes = codes[row : row + 1, begin // byte : -(-end // byte)]
            part = _decode_rows(row_codes, scales[row : row + 1, begin // GROUP : last_group], kind, end - begin)
            part = part.view(-1)[column - begin :]
        else:
            last = row + max(1, min(left, CHUNK) // length)
            part = _decode_rows(codes[row:last], scales[row:last], kind, length).view(-1)
        into[at - first : at - first + part.numel()] = part
        at += part.numel()


def _row_chunks(rows: int, length: int) -> Iterator[tuple[int, int]]:
    step = max(1, CHUNK // max(1, length))
    for first in range(0, rows, step):
        yield first, min(rows, first + step)


def _encode_rows(x: Tensor, kind: Kind, place: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    """`place`: seed and the place of the first number in its block."""
    rows, length = x.shape
    groups = torch.nn.functional.pad(x, (0, groups_of(length) * GROUP - length)).view(rows, -1, GROUP)
    largest = groups.abs().amax(-1)
    scales = largest if kind == "e3m0" else largest / LIMITS[kind]
    scales = torch.where(largest < TINY, 1.0, scales)
    is_finite = groups.isfinite().all(-1)
    scales = torch.where(is_finite, scales, torch.nan)
    quotients = torch.where(is_finite[..., None] & (groups.abs() >= TINY), groups / scales[..., None], 0.0)
    quotients = quotients.view(rows, -1)[:, :length]
    random = None if place is None else _noise(place[0], place[1], quotients)
    codes = _power_codes(quotients, random) if kind == "e3m0" else _integer_codes(quotients, LIMITS[kind], random)
    if kind == "int8":
        return codes.to(torch.int8).view(torch.uint8), scales
    nibbles = torch.nn.functional.pad(codes & 15, (0, length % 2)).to(torch.uint8)
    return nibbles[:, 0::2] | nibbles[:, 1::2] << 4, scales


def _integer_codes(quotients: Tensor, limit: float, random: Tensor | None) -> Tensor:
    rounded = quotients.round() if random is None else (quotients + random).floor()
    return rounded.clamp(-limit, limit).to(torch.int32)


def _power_codes(quotients: Tensor, random: Tensor | None) -> Tensor:
    size = quotients.abs()
    up = 0x400000 if random is None else (random * 2.0**23).to(torch.int32)
    powers = ((size.view(torch.int32) + up) >> 23) - 120
    small = size * 64.0 + (0.5 if random is None else random) >= 1.0
    codes = torch.where(size < 2.0**-6, small.to(torch.int32), powers.clamp(max=7))
    return codes | torch.where((quotients < 0) & (codes > 0), 8, 0)


def _noise(seed: int, first: int, values: Tensor) -> Tensor:
    """A number in [0, 1) of 24 random bits for each element, which follows from the seed and the element's place."""
    places = torch.arange(first, first + values.numel(), device=values.device)
    high = _mix_bits((places >> 32) ^ seed)
    return ((_mix_bits((places & 0xFFFFFFFF) ^ high) >> 8).float() * 2.0**-24).view(values.shape)


def _mix_bits(x: Tensor) -> Tensor:
    """A hash of 32 bits, in int64 because torch has few operations for uint32."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


def _decode_rows(codes: Tensor, scales: Tensor, kind: Kind, length: int) -> Tensor:
    """[rows, length] from whole groups: the first code is the first of a group."""
    if kind == "int8":
        values = codes.view(torch.int8).float()
    else:
        nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).view(len(codes), -1)[:, :length].to(torch.int32)
        values = ((nibbles ^ 8) - 8).float() if kind == "int4" else _powers(nibbles)
    return values * scales.repeat_interleave(GROUP, dim=1)[:, :length]


def _powers(nibbles: Tensor) -> Tensor:
    exponents = torch.where((nibbles & 7) > 0, ((nibbles & 7) + 120) << 23, 0)
    return torch.where(nibbles >= 8, -exponents.view(torch.float32), exponents.view(torch.float32))
