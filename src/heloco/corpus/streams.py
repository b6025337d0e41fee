"""Files as streams of bytes, decompressed on the way; errors name the file and the place in it."""

import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TextIO, cast

from heloco.errors import UserError

from .libraries import library

COMPRESSIONS = (".gz", ".xz", ".zst")
_BLOCK = 1 << 18


class Meter:
    """How many bytes of the input have been read so far."""

    def __init__(self) -> None:
        self.bytes_read = 0


class _MeteredFile(io.FileIO):
    """A raw file that counts what is read from it: with compressed files the only measure whose total is known."""

    def __init__(self, path: Path, meter: Meter) -> None:
        super().__init__(path, "rb")
        self._meter = meter

    def readinto(self, buffer: "bytearray | memoryview", /) -> int:  # type: ignore[override]
        count = super().readinto(buffer) or 0
        self._meter.bytes_read += count
        return count


class _ZstdReader(io.RawIOBase):
    """Decompresses zstd frames one after another. zstandard's own reader takes a file that was cut short for a whole one."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._library = library("zstandard", "Reading .zst files")
        self._frame = None
        self._input = self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "bytearray | memoryview", /) -> int:  # type: ignore[override]
        while not self._output:
            self._input = self._input or self._raw.read(_BLOCK)
            if not self._input:
                if self._frame is not None:
                    raise EOFError("the last frame has no end")
                return 0
            frame = self._frame or self._library.ZstdDecompressor().decompressobj()
            self._output = frame.decompress(self._input)
            self._input, self._frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        count = min(len(buffer), len(self._output))
        buffer[:count], self._output = self._output[:count], self._output[count:]
        return count


@contextmanager
def open_bytes(path: Path, meter: Meter) -> Iterator[BinaryIO]:
    """The file's bytes, decompressed by its suffix. A damaged or unreadable file is a UserError."""
    damage_errors: tuple[type[Exception], ...] = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError)
    if path.suffix == ".zst":
        damage_errors = (*damage_errors, library("zstandard", "Reading .zst files").ZstdError)
    try:
        with io.BufferedReader(_MeteredFile(path, meter), _BLOCK) as raw:
            yield _decompress(raw, path.suffix)
    except damage_errors as error:
        raise UserError(
            f"{path} is cut short or damaged as a {path.suffix} file ({error}): copy or download it again."
        ) from error
    except OSError as error:
        if error.filename is None:
            raise
        raise UserError(f"{path} cannot be read ({error.strerror}): check that it exists and that you may read it.") from error


def _decompress(raw: BinaryIO, suffix: str) -> BinaryIO:
    match suffix:
        case ".gz":
            return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
        case ".xz":
            return cast(BinaryIO, lzma.LZMAFile(raw))
        case ".zst":
            return cast(BinaryIO, io.BufferedReader(_ZstdReader(raw), _BLOCK))
        case _:
            return raw


@contextmanager
def open_text(path: Path, meter: Meter) -> Iterator[TextIO]:
    """The file as UTF-8 text with \\n line ends. Bytes that are not UTF-8 are a UserError that says where they are."""
    try:
        with open_bytes(path, meter) as stream:
            yield io.TextIOWrapper(stream, encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        offset, line = _first_invalid(path)
        raise UserError(
            f"{path} is not valid UTF-8 at byte {offset} (line {line}): convert it, for example with "
            f"`iconv -f ISO-8859-1 -t UTF-8`, or remove those bytes with `iconv -c -t UTF-8`."
        ) from error


def _first_invalid(path: Path) -> tuple[int, int]:
    """Byte offset (in the decompressed text) and line of the first bytes that are not UTF-8: a second, slower look."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, line = 0, 1
    with open_bytes(path, Meter()) as stream:
        while True:
            block = stream.read(_BLOCK)
            pending = len(decoder.getstate()[0])
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return offset - pending + error.start, line + error.object[: error.start].count(b"\n")
            if not block:
                return offset, line
            offset, line = offset + len(block), line + block.count(b"\n")
