"""What every origin of text gives: a recipe per source, whose documents come labelled train or val."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from heloco.errors import UserError, nearest

from .streams import Meter

PartName = Literal["train", "val"]
PARTS: tuple[PartName, PartName] = ("train", "val")
Labelled = tuple[PartName, str]

VAL_PER_THOUSAND = 10  # of the documents, where a source has no validation part of its own


@dataclass(frozen=True)
class Recipe:
    """One source, not yet read. `identity` (JSON) says all that its tokens depend on besides the tokenizer."""

    name: str
    identity: Mapping[str, object]
    total_bytes: int
    read: Callable[[Meter], Iterator[Labelled]]


def pick(names: Sequence[str], languages: Sequence[str] | None, where: str) -> Sequence[str]:
    """The source names asked for, in that order; all of them where none are."""
    if languages is None:
        return names
    for position, language in enumerate(languages):
        if language not in names:
            raise UserError(
                f"There is no source {language!r} in {where}, which has {', '.join(names)}: {nearest(language, list(names))}"
            )
        if language in languages[:position]:
            raise UserError(f"The source {language!r} is named twice: name each one once.")
    if not languages:
        raise UserError(f"No source is named: leave the list out to take all of {where} ({', '.join(names)}).")
    return languages


def val_limit(limit_bytes: int) -> int:
    """How much validation text goes with so much training text."""
    return max(1, limit_bytes * 6 // 100)


def until(documents: Iterable[str], limit_bytes: int | None) -> Iterator[str]:
    """Documents up to and including the one that reaches the limit."""
    bytes_yielded = 0
    for document in documents:
        yield document
        bytes_yielded += len(document.encode())
        if limit_bytes is not None and bytes_yielded >= limit_bytes:
            return


def label_documents(part: PartName, documents: Iterable[str]) -> Iterator[Labelled]:
    return ((part, document) for document in documents)


def divide(documents: Iterable[str], name: str) -> Iterator[Labelled]:
    """One in a hundred documents is for validation, chosen by a hash of its text, so the same document is never on both sides.

    Neither side is ever empty: one document is held back for the side that ends up with none, and a lone document is cut in two.
    """
    pending_document: str | None = None
    filled_parts: set[PartName] = set()
    for document in documents:
        if pending_document is not None and _for_validation(document):
            filled_parts.add("val")
            yield "val", document
            continue
        if pending_document is not None:
            filled_parts.add("train")
            yield "train", pending_document
        pending_document = document
    if pending_document is None:
        return  # an empty source: the caller reports it
    if "val" in filled_parts:
        yield "train", pending_document
    elif "train" in filled_parts:
        yield "val", pending_document
    else:
        head, tail = _in_two(pending_document, name)
        yield "train", head
        yield "val", tail


def _for_validation(document: str) -> bool:
    digest = hashlib.blake2b(document.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % 1000 < VAL_PER_THOUSAND


def _in_two(document: str, name: str) -> tuple[str, str]:
    """Most of a lone document and its last lines (or words)."""
    latest = len(document) * (1000 - VAL_PER_THOUSAND) // 1000
    for gap in ("\n", " "):
        cut = document.rfind(gap, 0, latest + 1)
        if cut > 0 and document[:cut].strip() and document[cut:].strip():
            return document[:cut], document[cut + 1 :]
    raise UserError(
        f"The source {name!r} is a single document too short to set a part aside for validation: "
        f"add text (a blank line separates documents in .txt) or give {name}.train and {name}.val files."
    )
