"""The largest 64 of each 4,096 numbers, each as a place of 12 bits and a value of 2 bits: an experiment, after SparseLoCo.

The value is a sign and one of two sizes, which are the means of the numbers below and above the mean size. What is left out goes
into the residual. Such a block has a cosine of only .35 to .65 with what it stands for, so the correction of the outer rules,
which looks at cosines, is misled.
"""

import torch
from torch import Tensor

CHUNK, KEPT = 4096, 64
PLACE_BYTES, VALUE_BYTES = KEPT * 12 // 8, KEPT * 2 // 8
CHUNK_BYTES = PLACE_BYTES + VALUE_BYTES


def chunks_of(count: int) -> int:
    return -(-count // CHUNK)


def encode(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [chunks, bytes] and the two sizes [chunks, 2] of a flat float32 tensor."""
    x = torch.nn.functional.pad(numbers, (0, -numbers.numel() % CHUNK)).view(-1, CHUNK)
    places = torch.topk(x.abs(), KEPT, sorted=False).indices.sort().values
    values = x.gather(1, places)
    size = values.abs()
    is_large = size > size.mean(1, keepdim=True)
    sizes = torch.stack([_mean(size, ~is_large), _mean(size, is_large)], dim=1)
    sizes = torch.where(x.isfinite().all(1, keepdim=True), sizes, torch.nan)
    bits = (values < 0).to(torch.int32) << 1 | is_large.to(torch.int32)
    return torch.cat([_pack_places(places), _pack_bits(bits)], dim=1), sizes


def decode(codes: Tensor, sizes: Tensor, first: int, into: Tensor) -> None:
    """Writes the numbers of a block from its `first`-th on into a flat float32 tensor."""
    begin, end = first // CHUNK, chunks_of(first + into.numel())
    codes, sizes = codes[begin:end], sizes[begin:end]
    places, bits = _unpack_places(codes[:, :PLACE_BYTES]), _unpack_bits(codes[:, PLACE_BYTES:])
    values = sizes.gather(1, (bits & 1).long()) * torch.where(bits >= 2, -1.0, 1.0)
    numbers = torch.zeros(len(codes), CHUNK, device=codes.device).scatter_(1, places, values)
    skipped = first - begin * CHUNK
    into.copy_(numbers.view(-1)[skipped : skipped + into.numel()])


def _mean(size: Tensor, mask: Tensor) -> Tensor:
    """The mean of the marked numbers of each row; 1 if there are none, or only zeros."""
    mean = (size * mask).sum(1) / mask.sum(1).clamp(min=1)
    return torch.where(mean > 0, mean, 1.0)


def _pack_places(places: Tensor) -> Tensor:
    """Two places of 12 bits in three bytes."""
    low, high = places[:, 0::2], places[:, 1::2]
    return torch.stack([low & 255, low >> 8 | (high & 15) << 4, high >> 4], dim=2).flatten(1).to(torch.uint8)


def _unpack_places(packed: Tensor) -> Tensor:
    a, b, c = packed.view(len(packed), -1, 3).long().unbind(2)
    return torch.stack([a | (b & 15) << 8, b >> 4 | c << 4], dim=2).flatten(1)


def _pack_bits(bits: Tensor) -> Tensor:
    a, b, c, d = bits.view(len(bits), -1, 4).unbind(2)
    return (a | b << 2 | c << 4 | d << 6).to(torch.uint8)


def _unpack_bits(packed: Tensor) -> Tensor:
    wide = packed.to(torch.int32)
    return torch.stack([wide >> shift & 3 for shift in (0, 2, 4, 6)], dim=2).flatten(1)
