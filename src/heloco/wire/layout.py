"""Tensors as safetensors files, one block at a time, for the wire, the journal and checkpoints.

A layout knows its file's header to the byte. A file from outside is accepted only if it begins with exactly that header and has
exactly that size, so nothing from outside is ever parsed. Its tensors are then views of the file, without a copy in memory.
"""

import contextlib
import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from heloco.disk import write_all
from heloco.dtypes import CAN_BE_TRAINED, TRAINABLE
from heloco.wire.blocks import PARAMETER, is_of_kind

DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
ELEMENT_LIMIT = 1 << 62
"""A shape may have fewer elements than this, not counting dimensions of 0. Above it torch's own arithmetic overflows."""
PIECE_BYTES = 1 << 24
"""A tensor is handed on in pieces of at most this many bytes."""


@dataclass(frozen=True)
class Layout:
    """Names, dtypes and shapes of a file's tensors, in file order. Wide dtypes come first, for alignment."""

    entries: tuple[tuple[str, str, tuple[int, ...]], ...]

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> "Layout":
        """The layout of a file with these tensors. Raises ValueError for a dtype that safetensors files cannot hold."""
        for name, tensor in tensors.items():
            if tensor.dtype not in DTYPES:
                raise ValueError(f"{name} is of {tensor.dtype}, which safetensors files cannot hold.")
        ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # stable: otherwise the given order
        return cls(tuple((name, DTYPES[t.dtype], tuple(t.shape)) for name, t in ordered))

    @classmethod
    def in_file(cls, path: Path) -> "Layout":
        """The layout of a file that this package wrote."""
        with path.open("rb") as file:
            table = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        table.pop("__metadata__", None)
        ordered = sorted(table.items(), key=lambda item: item[1]["data_offsets"])
        return cls(tuple((name, entry["dtype"], tuple(entry["shape"])) for name, entry in ordered))

    @classmethod
    def from_json(cls, entries: Any) -> "Layout":
        """The layout with these entries, each a list of name, dtype and shape. Raises ValueError for anything else."""
        try:
            layout = cls(tuple((str(name), str(dtype), tuple(int(n) for n in shape)) for name, dtype, shape in entries))
            if any(n < 0 for _, _, shape in layout.entries for n in shape) or len(layout.names) != len(set(layout.names)):
                raise ValueError
            if any(math.prod(n or 1 for n in shape) >= ELEMENT_LIMIT for _, _, shape in layout.entries):
                raise ValueError
            layout.header  # noqa: B018 - refuses an unknown dtype
            return layout
        except (TypeError, ValueError, KeyError, OverflowError):
            raise ValueError("it is not a list of names, dtypes and shapes.") from None

    @property
    def names(self) -> list[str]:
        """The names of the tensors, in file order."""
        return [name for name, _, _ in self.entries]

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """(first byte, size in bytes) of each tensor, counted from the end of the header."""
        spans, at = [], 0
        for _, dtype, shape in self.entries:
            count = 1
            for n in shape:
                count *= n
            spans.append((at, count * _BY_NAME[dtype].itemsize))
            at += spans[-1][1]
        return spans

    @cached_property
    def header(self) -> bytes:
        """The first bytes of the file, up to the first tensor's: the header's length and its JSON, padded to a multiple of 8
        bytes."""
        table = {
            name: {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
            for (name, dtype, shape), (at, size) in zip(self.entries, self.spans, strict=True)
        }
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @cached_property
    def size(self) -> int:
        """Size of the whole file in bytes."""
        return len(self.header) + (sum(self.spans[-1]) if self.spans else 0)

    @cached_property
    def digest(self) -> str:
        """Equal for two models if and only if their blocks have the same names, dtypes and shapes."""
        return hashlib.sha256(self.header).hexdigest()[:16]

    def untrainable(self) -> str | None:
        """A sentence about the first parameter whose dtype no outer rule can train; None if there is none."""
        for name, dtype, _ in self.entries:
            if is_of_kind(PARAMETER, name) and _BY_NAME[dtype] not in TRAINABLE:
                return f"{name} is {_BY_NAME[dtype]}: {CAN_BE_TRAINED}"
        return None

    def difference(self, other: "Layout") -> str | None:
        """A sentence about the first difference from the other layout; None if they are equal."""
        ours, theirs = {n: (d, s) for n, d, s in self.entries}, {n: (d, s) for n, d, s in other.entries}
        for name, (dtype, shape) in ours.items():
            if name not in theirs:
                return f"{name} is missing"
            if theirs[name] != (dtype, shape):
                return f"{name} is {theirs[name][0]} {list(theirs[name][1])} and not {dtype} {list(shape)}"
        return next((f"{name} is not in the model" for name in theirs if name not in ours), None)


def pieces(layout: Layout, tensors: Mapping[str, Tensor] | Iterable[Tensor]) -> Iterator[memoryview]:
    """The bytes of the file with these tensors, piece by piece. Tensors without names must come in the
    layout's order, each whole or in several flat parts."""
    yield memoryview(layout.header)
    ordered = (tensors[name] for name in layout.names) if isinstance(tensors, Mapping) else iter(tensors)
    for (name, dtype, _), (_, size) in zip(layout.entries, layout.spans, strict=True):
        remaining = size
        while remaining or size == 0:
            tensor = next(ordered)
            remaining -= tensor.numel() * tensor.element_size()
            assert DTYPES[tensor.dtype] == dtype and remaining >= 0, f"{name} is not as the layout has it"
            if size == 0:
                break
            raw: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            for at in range(0, len(raw), PIECE_BYTES):
                yield raw[at : at + PIECE_BYTES]


def pieces_after(offset: int, layout: Layout, tensors: Mapping[str, Tensor], hashed: Any = None) -> Iterator[memoryview]:
    """The bytes of the file with these tensors, from `offset` on. `hashed` is a digest that is updated with the whole file."""
    at = 0
    for piece in pieces(layout, tensors):
        if hashed is not None:
            hashed.update(piece)
        if at + len(piece) > offset:
            yield piece[max(0, offset - at) :]
        at += len(piece)


def write(
    file: BinaryIO,
    layout: Layout,
    tensors: Mapping[str, Tensor] | Iterable[Tensor],
    hashed: Any = None,
    before_piece: Callable[[], None] = lambda: None,
) -> None:
    """Writes the tensors to an unbuffered file. `hashed` is a digest that is updated with every piece. `before_piece` is called
    before each of the small pieces; what it raises ends the writing."""
    for piece in pieces(layout, tensors):
        write_all(file, piece, before_piece)
        if hashed is not None:
            hashed.update(piece)


def view(layout: Layout, content: Any) -> dict[str, Tensor]:
    """The tensors of a file in a writable buffer, as views of it. The caller has compared the header."""
    begin = len(layout.header)
    return {
        name: (
            torch.frombuffer(content, dtype=_BY_NAME[dtype], offset=begin + at, count=size // _BY_NAME[dtype].itemsize)
            if size
            else torch.empty(0, dtype=_BY_NAME[dtype])
        ).view(shape)
        for (name, dtype, shape), (at, size) in zip(layout.entries, layout.spans, strict=True)
    }


class Stored(Mapping[str, Tensor]):
    """The tensors of a file that this package wrote. Each is read on access, so a model is never in memory twice."""

    def __init__(self, path: Path) -> None:
        self.layout = Layout.in_file(path)
        rows = zip(self.layout.names, self.layout.entries, self.layout.spans, strict=True)
        self._at = {name: (entry, span) for name, entry, span in rows}
        with path.open("rb") as file:
            self._begin = 8 + int.from_bytes(file.read(8), "little")
            self._file = os.dup(file.fileno())

    def __getitem__(self, name: str) -> Tensor:
        (_, dtype, shape), (at, size) = self._at[name]
        if not size:
            return torch.empty(shape, dtype=_BY_NAME[dtype])
        tensor = torch.empty(shape, dtype=_BY_NAME[dtype])
        room: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
        bytes_read = 0
        while bytes_read < size:
            if not (count := os.preadv(self._file, [room[bytes_read:]], self._begin + at + bytes_read)):
                raise OSError(f"{name} is cut short")
            bytes_read += count
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._at)

    def __len__(self) -> int:
        return len(self._at)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.close(self._file)


def map_tensors(file: Path | int, layout: Layout) -> dict[str, Tensor]:
    """The tensors of a file or an open descriptor, as views of it. Writes to them stay in this process."""
    if isinstance(file, Path):
        with file.open("rb") as handle:
            return map_tensors(handle.fileno(), layout)
    content = mmap.mmap(file, 0, access=mmap.ACCESS_COPY)
    if len(content) != layout.size or content[: len(layout.header)] != layout.header:
        raise ValueError("the file does not hold the tensors it should")
    return view(layout, content)
