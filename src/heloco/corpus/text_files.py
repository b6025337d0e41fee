"""Real text from a folder: one file or one sub-folder per source, read as a stream of documents.

    NAME.txt  NAME.jsonl  NAME.parquet      one source; a part is set aside for validation
    NAME.train.txt + NAME.val.txt           one source with a validation part of its own
    NAME/anything.jsonl  NAME/val-01.txt    one source in any number of files

Each may be compressed (.gz, .xz, .zst). In .txt a blank line ends a document; in .jsonl and .parquet every row is one.
"""

import json
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

from heloco.errors import UserError

from .libraries import library
from .parts import Labelled, divide, label_documents, pick, until, val_limit
from .streams import COMPRESSIONS, Meter, open_bytes, open_text

LONGEST_CHARS = 1 << 18  # a .txt document without a blank line for so long is cut at a line end, so memory stays bounded

_BLOCK_CHARS = 1 << 18
_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
_PART = re.compile(r"(?:^|\.)(train|training|val|valid|validation|test)(?![a-z])", re.IGNORECASE)
_NOT_DATA = re.compile(
    r"\.|(readme|licen[cs]e|copying|notice|authors|changelog|citation)\b|tokenizer.*\.json$|.*\.(md|rst|tiktoken|bpe|sha256)$",
    re.IGNORECASE,
)  # what lies next to data without being data: hidden files, notes, a tokenizer


@dataclass(frozen=True)
class SourceFiles:
    """The files of one source. No `val` files: a part is set aside from `train`."""

    name: str
    train: tuple[Path, ...]
    val: tuple[Path, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        return self.train + self.val

    def documents(self, field: str, limit_bytes: int | None, meter: Meter) -> Iterator[Labelled]:
        """Every document with its part; with a limit, the first `limit_bytes` of training text and val to match."""
        train = until(_read(self.train, field, meter), limit_bytes)
        if not self.val:
            yield from divide(train, self.name)
            return
        yield from label_documents("train", train)
        yield from label_documents("val", until(_read(self.val, field, meter), limit_bytes and val_limit(limit_bytes)))


def find_sources(folder: Path, languages: Sequence[str] | None = None) -> list[SourceFiles]:
    """The sources in `folder` sorted by name, or those in `languages` in that order."""
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        raise UserError(
            f"The data folder {folder} {problem}: --data takes 'builtin', a folder with one text file per source, or hf:DATASET."
        )
    files: dict[str, dict[str, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for path in sorted(folder.iterdir()):
        if _NOT_DATA.match(path.name):
            continue
        if path.is_dir():
            _add_folder(path, files)
        else:
            stem = _stem(path)
            part = _PART.search(stem)
            name = stem[: part.start()] if part else stem
            files[name or folder.resolve().name][_part_name(part)].append(
                path
            )  # a bare train.txt and val.txt: the folder is the source
    sources = {name: _source(name, parts, folder) for name, parts in sorted(files.items()) if set(parts) != {"test"}}
    if not sources:
        raise UserError(
            f"The data folder {folder} holds no training text: put one file per source there, such as en.txt or en.jsonl."
        )
    return [sources[name] for name in pick(list(sources), languages, f"the folder {folder}")]


def _add_folder(folder: Path, files: dict[str, dict[str, list[Path]]]) -> None:
    inside = sorted(path for path in folder.rglob("*") if path.is_file())
    if not inside:
        raise UserError(f"The source folder {folder} is empty: put text files there or remove it.")
    for path in inside:
        below = path.relative_to(folder).parts
        if not any(_NOT_DATA.match(name) for name in below):
            stem = _stem(path)
            files[folder.name][_part_name(_PART.search(below[0] if len(below) > 1 else stem))].append(path)


def _part_name(match: "re.Match[str] | None") -> str:
    return {"trai": "train", "val": "val", "vali": "val", "test": "test"}[match[1].lower()[:4]] if match else "train"


def _stem(path: Path) -> str:
    """The file's name without its compression and kind; an unknown kind is a UserError."""
    plain = path.with_suffix("") if path.suffix in COMPRESSIONS else path
    if plain.suffix not in _READERS:
        raise UserError(
            f"{path} is of a type that is not known here ({path.suffix or 'no suffix'}): use {', '.join(_READERS)}, "
            f"plain or compressed ({', '.join(COMPRESSIONS)}), or move it out of the data folder."
        )
    return plain.stem


def _source(name: str, parts: dict[str, list[Path]], folder: Path) -> SourceFiles:
    if not parts.get("train"):
        raise UserError(
            f"{folder} has validation text for {name!r} ({parts['val'][0].name}) but no {name}.train: add the training file."
        )
    return SourceFiles(name, tuple(parts["train"]), tuple(parts.get("val", ())))


def _read(paths: Sequence[Path], field: str, meter: Meter) -> Iterator[str]:
    for path in paths:
        kind = (path.with_suffix("") if path.suffix in COMPRESSIONS else path).suffix
        for document in _READERS[kind](path, field, meter):
            if document.strip():
                yield document


def _read_text(path: Path, _field: str, meter: Meter) -> Iterator[str]:
    with open_text(path, meter) as text:
        yield from _paragraphs(text)


def _paragraphs(text: TextIO) -> Iterator[str]:
    """Documents between blank lines. Where they are cut depends on the text alone, never on how it came in blocks."""
    rest = ""
    while block := text.read(_BLOCK_CHARS):
        *whole, rest = _BLANK_LINES.split(rest + block)
        for document in whole:
            yield from _cut(document.strip("\n"))
        *pieces, rest = _cut(rest.lstrip("\n"))
        yield from pieces
    yield rest.rstrip("\n")


def _cut(document: str) -> list[str]:
    pieces = []
    while len(document.rstrip()) > LONGEST_CHARS:  # what may yet prove to be a blank line does not count
        end = max(document.rfind("\n", 1, LONGEST_CHARS), 0) or max(document.rfind(" ", 1, LONGEST_CHARS), 0) or LONGEST_CHARS
        pieces.append(document[:end])
        document = document[end:].lstrip("\n")
    return [*pieces, document]


def _read_lines(path: Path, field: str, meter: Meter) -> Iterator[str]:
    with open_text(path, meter) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _field_of(line, field, f"{path}:{number}")


def _field_of(line: str, field: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(
            f"{where} is not valid JSON ({error}): fix or remove that line; every line must be one JSON object."
        ) from error
    if not isinstance(row, dict):
        raise UserError(
            f"{where} is a JSON {type(row).__name__}, not an object with a {field!r} field: write one object per line."
        )
    if field not in row:
        raise UserError(f"{where} has no field {field!r}, only {', '.join(row) or 'none'}: name the field that holds the text.")
    return _text(row[field], field, where)


def _text(value: object, field: str, where: str) -> str:
    """The value as text: a null is an empty document, anything else but a valid string is refused."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(
            f"{where}: the field {field!r} holds {type(value).__name__}, not text: name the field that holds the text."
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: the text has half a surrogate pair at character {error.start}: fix or remove that row."
        ) from error
    return value


def _read_parquet(path: Path, field: str, meter: Meter) -> Iterator[str]:
    parquet = library("pyarrow.parquet", "Reading .parquet files")
    ParquetError = library("pyarrow", "Reading .parquet files").ArrowInvalid
    with open_bytes(path, meter) as stream, _seekable(path, stream) as file:
        try:
            table = parquet.ParquetFile(file)
            if field not in table.schema_arrow.names:
                names = ", ".join(table.schema_arrow.names)
                raise UserError(f"{path} has no column {field!r}, only {names}: name the column that holds the text.")
            for batch in table.iter_batches(batch_size=1024, columns=[field]):
                yield from (_text(value, field, str(path)) for value in batch.column(0).to_pylist())
        except ParquetError as error:
            raise UserError(f"{path} is cut short or damaged as a .parquet file ({error}): copy or download it again.") from error


@contextmanager
def _seekable(path: Path, stream: BinaryIO) -> Iterator[BinaryIO]:
    """Parquet is read from its end: a compressed one is unpacked into a temporary file first."""
    if path.suffix not in COMPRESSIONS:
        yield stream
        return
    with tempfile.TemporaryFile() as unpacked_file:
        shutil.copyfileobj(stream, unpacked_file)
        yield unpacked_file


_READERS: dict[str, Callable[[Path, str, Meter], Iterator[str]]] = {
    ".txt": _read_text,
    ".jsonl": _read_lines,
    ".parquet": _read_parquet,
}
