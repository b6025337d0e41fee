"""The formats in which a block of numbers travels, by name.

    fp32   as it is                                   32 bits a number
    bf16   rounded to bfloat16                        16
    int8   codes with a scale for each group          8.25, see codes.py
    int4   codes with a scale for each group          4.25
    e3m0   signs and exponents, likewise              4.25
    topk   64 of 4,096 numbers, in 2 bits each        .23, see sparse.py; an experiment

A format turns a block into one or two tensors that a file can hold (`parts`, `encode`), and gives it back from them (`block`).
Vectors and matrices with short rows, which are a small part of a model, travel as they are in the formats with scales.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from heloco.errors import UserError, nearest
from heloco.outer.kernels.windows import CodedBlock
from heloco.wire import blocks, codes, compiled_codes, sparse
from heloco.wire.layout import Layout

PartShape = tuple[torch.dtype, tuple[int, ...]]
FormatName = Literal["fp32", "bf16", "int8", "int4", "e3m0", "topk"]
SHORT_ROW = 16
"""A matrix with shorter rows travels as it is: it would have too many scales."""


@dataclass(frozen=True)
class Rounding:
    """How a block is encoded beyond its numbers."""

    residual: Tensor | None = None
    """What earlier codes of this block left out, of the block's shape; it is brought up to date. None: without error feedback."""
    decay: float = 1.0
    """The factor β that multiplies the residual before the next block is added; 1 keeps all of it."""
    noise: codes.Noise | None = None
    """The random numbers for stochastic rounding; None: numbers are rounded to the nearest code."""


TO_NEAREST = Rounding()


class Format(Protocol):
    """How a block of numbers travels."""

    @property
    def name(self) -> str: ...

    @property
    def bits(self) -> float:
        """Bits per number of a large matrix, its scales included."""

    @property
    def has_feedback(self) -> bool:
        """Whether what the format leaves out is worth sending with the next block."""

    def parts(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[PartShape, ...]:
        """Dtype and shape of the tensors that stand for a block: its numbers, or codes and scales."""

    def encode(self, block: Tensor, rounding: Rounding = TO_NEAREST) -> tuple[Tensor, ...]:
        """The tensors that stand for the block, with the dtypes and shapes that `parts` gives. Brings the residual up to date."""

    def block(self, tensors: Sequence[Tensor], shape: Sequence[int]) -> "Tensor | CodedBlock":
        """The block from these tensors."""


@dataclass(frozen=True)
class PlainFormat:
    """Numbers as they are, or rounded to a dtype."""

    name: str
    bits: float
    dtype: torch.dtype | None
    """The dtype of all blocks; None: float32, or the block's own dtype where that is wider."""
    has_feedback: bool = False

    def parts(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[PartShape, ...]:
        return ((self.dtype or wide(dtype), tuple(shape)),)

    def encode(self, block: Tensor, rounding: Rounding = TO_NEAREST) -> tuple[Tensor, ...]:  # noqa: ARG002
        return (block.to(self.dtype or wide(block.dtype)),)

    def block(self, tensors: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        return tensors[0].view(tuple(shape))


@dataclass(frozen=True)
class ScaledFormat:
    """Codes of 8 or 4 bits with a scale for each group."""

    name: codes.Kind
    bits: float
    has_feedback: bool = True

    @property
    def code_dtype(self) -> torch.dtype:
        """The dtype of the bytes in a file. It tells the formats of 4 bits apart, whose codes have the same shapes."""
        return torch.int8 if self.name == "e3m0" else torch.uint8

    def parts(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[PartShape, ...]:
        if not has_long_rows(shape):
            return FULL.parts(shape, dtype)
        rows, length = matrix_shape(shape)
        return (
            (self.code_dtype, (rows, codes.row_bytes(self.name, length))),
            (torch.float32, (rows, codes.groups_of(length))),
        )

    def encode(self, block: Tensor, rounding: Rounding = TO_NEAREST) -> tuple[Tensor, ...]:
        if not has_long_rows(block.shape):
            return FULL.encode(block)
        matrix, residual = block.float().reshape(len(block), -1), rounding.residual
        residual = None if residual is None else residual.view(len(block), -1)
        code_bytes, scales = compiled_codes.encode(
            matrix, self.name, residual=residual, decay=rounding.decay, noise=rounding.noise
        )
        return code_bytes.view(self.code_dtype), scales

    def block(self, tensors: Sequence[Tensor], shape: Sequence[int]) -> "Tensor | ScaledBlock":
        if len(tensors) == 1:
            return tensors[0].view(tuple(shape))
        return ScaledBlock(self.name, tensors[0].view(torch.uint8), tensors[1], torch.Size(shape))


@dataclass(frozen=True)
class SparseFormat:
    """The largest numbers of each chunk, two bits each."""

    name: str = "topk"
    bits: float = 8 * (sparse.CHUNK_BYTES + 8) / sparse.CHUNK
    has_feedback: bool = True

    def parts(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[PartShape, ...]:
        if not has_chunks(shape):
            return FULL.parts(shape, dtype)
        chunks = sparse.chunks_of(torch.Size(shape).numel())
        return (torch.uint8, (chunks, sparse.CHUNK_BYTES)), (torch.float32, (chunks, 2))

    def encode(self, block: Tensor, rounding: Rounding = TO_NEAREST) -> tuple[Tensor, ...]:
        if not has_chunks(block.shape):
            return FULL.encode(block)
        residual = rounding.residual
        numbers = block.float() if residual is None else residual * rounding.decay + block.float()
        codes, sizes = sparse.encode(numbers.reshape(-1))
        if residual is not None:
            whole = torch.empty(numbers.numel(), device=numbers.device)
            sparse.decode(codes, sizes, 0, whole)
            residual.copy_(numbers - whole.view(numbers.shape))
        return codes, sizes

    def block(self, tensors: Sequence[Tensor], shape: Sequence[int]) -> "Tensor | SparseBlock":
        return tensors[0].view(tuple(shape)) if len(tensors) == 1 else SparseBlock(tensors[0], tensors[1], torch.Size(shape))


@dataclass(frozen=True)
class ScaledBlock:
    """A block of codes. Its numbers are decoded as they are read."""

    kind: codes.Kind
    codes: Tensor
    scales: Tensor
    shape: torch.Size

    def read(self, first: int, into: Tensor) -> None:
        compiled_codes.decode(self.codes, self.scales, self.kind, matrix_shape(self.shape)[1], first, into)


@dataclass(frozen=True)
class SparseBlock:
    """A block of which the largest numbers are known. They are decoded as they are read."""

    codes: Tensor
    scales: Tensor
    shape: torch.Size

    def read(self, first: int, into: Tensor) -> None:
        sparse.decode(self.codes, self.scales, first, into)


FULL = PlainFormat("fp32", 32, None)
_ALL: tuple[Format, ...] = (
    FULL, PlainFormat("bf16", 16, torch.bfloat16), ScaledFormat("int8", 8.25), ScaledFormat("int4", 4.25),
    ScaledFormat("e3m0", 4.25), SparseFormat(),
)  # fmt: skip
FORMATS: Mapping[str, Format] = dict(zip(get_args(FormatName), _ALL, strict=True))


def find_format(name: str) -> Format:
    """The format of this name."""
    if name not in FORMATS:
        raise UserError(f"There is no wire format {name!r}; {nearest(name, list(FORMATS))}")
    return FORMATS[name]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a difference of such numbers is exact enough: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """A block as a matrix: its first dimension counts the rows."""
    return shape[0], torch.Size(shape[1:]).numel()


def has_long_rows(shape: Sequence[int]) -> bool:
    """Whether codes with scales pay for a block of this shape."""
    return len(shape) > 1 and shape[0] > 0 and matrix_shape(shape)[1] >= SHORT_ROW


def has_chunks(shape: Sequence[int]) -> bool:
    """Whether a block of this shape is large enough for the sparse format."""
    return len(shape) > 1 and torch.Size(shape).numel() >= sparse.CHUNK


def layout_of(format: Format, kind: str, parameters: Iterable[Tensor], buffers: Iterable[Tensor] = ()) -> Layout:
    """The layout of a file with a block for each parameter in this format, named by this kind, and the buffers as they are."""
    tensors: dict[str, Tensor] = {}
    for index, block in enumerate(parameters):
        for part_kind, (dtype, shape) in zip((kind, blocks.SCALE), format.parts(block.shape, block.dtype), strict=False):
            tensors[blocks.block_name(part_kind, index)] = torch.empty(shape, dtype=dtype, device="meta")
    return Layout.from_tensors(tensors | blocks.name_blocks(blocks.BUFFER, buffers))


def name_parts(kind: str, index: int, parts: Iterable[Tensor]) -> dict[str, Tensor]:
    """The tensors that stand for a block, by name."""
    return {blocks.block_name(part_kind, index): part for part_kind, part in zip((kind, blocks.SCALE), parts, strict=False)}


def read_block(format: Format, kind: str, index: int, tensors: Mapping[str, Tensor], shape: Sequence[int]) -> Tensor | CodedBlock:
    """A block from the tensors of a file."""
    return format.block(blocks.parts_of(kind, index, tensors), shape)


def decode_block(block: Tensor | CodedBlock, device: torch.device) -> Tensor:
    """A block as a tensor on the device where its codes are."""
    if isinstance(block, Tensor):
        return block
    numbers = torch.empty(block.shape, device=device)
    block.read(0, numbers.view(-1))
    return numbers
