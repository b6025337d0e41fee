"""From "which data, which tokenizer" to memory-mapped tokens, once; after that it is a matter of opening files."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from heloco.errors import UserError
from heloco.places import cache_folder

from . import languages as builtin
from .cache import Entry, EntryWriter, Tokens, key, load, remove_unfinished
from .encoding import batches, encode_batches
from .fingerprint import fingerprint
from .hub import hub_recipes
from .parts import PARTS, Labelled, Recipe, pick, val_limit
from .progress import Progress
from .streams import Meter
from .text_files import SourceFiles, find_sources
from .tokenizer import Tokenizer, load_tokenizer, token_dtype


@dataclass(frozen=True)
class Source:
    """One source's tokens, memory-mapped, and how much text they stand for (bits per byte need it)."""

    name: str
    train: Tokens
    val: Tokens
    train_bytes: int
    val_bytes: int
    train_documents: int
    val_documents: int


@dataclass(frozen=True)
class Corpus:
    """All sources under one vocabulary. `digest` names exactly these tokens: a run resumes only with the same."""

    sources: tuple[Source, ...]
    tokenizer_name: str
    vocab_size: int
    end_of_text: int
    digest: str


def prepare(
    data: str,
    tokenizer: str = "bytes",
    *,
    languages: Sequence[str] | None = None,
    limit_bytes: int | None = None,
    field: str = "text",
    cache: Path | None = None,
    progress: Progress | None = None,
    seed: int = 0,
) -> Corpus:
    """The corpus of `data` ('builtin', a folder or 'hf:DATASET'), tokenised into the cache unless it is there already.

    `languages` picks and orders the sources; `limit_bytes` bounds each one's training text; `field` holds the text in rows;
    `seed` is for the built-in languages.
    """
    if limit_bytes is not None and limit_bytes < 1:
        raise UserError(f"A limit of {limit_bytes} bytes leaves no text: give at least 1, or no limit.")
    cache = cache_folder(cache)
    recipes = _recipes(data, languages, limit_bytes, field, cache, seed)
    coder = load_tokenizer(tokenizer, None if data == "builtin" or data.startswith("hf:") else Path(data).expanduser(), cache)
    places = [cache / key(recipe.name, recipe.identity, coder.digest) for recipe in recipes]
    entries = [load(place) for place in places]
    if None in entries:
        remove_unfinished(cache)
        for i, recipe in enumerate(recipes):
            entries[i] = entries[i] or _write(recipe, places[i], coder, progress)
    return _corpus(recipes, [entry for entry in entries if entry], coder)


def _recipes(
    data: str, languages: Sequence[str] | None, limit_bytes: int | None, field: str, cache: Path, seed: int
) -> list[Recipe]:
    if data == "builtin":
        names = pick(builtin.LANGUAGES, languages, "the built-in languages")
        return [_builtin_recipe(name, limit_bytes, seed) for name in names]
    if data.startswith("hf:"):
        return hub_recipes(data.removeprefix("hf:"), languages, limit_bytes, field)
    sources = find_sources(Path(data).expanduser(), languages)
    return [_folder_recipe(source, limit_bytes, field, cache) for source in sources]


def _builtin_recipe(name: str, limit_bytes: int | None, seed: int) -> Recipe:
    sizes = {"train": limit_bytes or builtin.TRAIN_BYTES, "val": val_limit(limit_bytes or builtin.TRAIN_BYTES)}

    def read(meter: Meter) -> Iterator[Labelled]:
        for part in PARTS:
            for text in builtin.documents(name, seed, part, sizes[part]):
                meter.bytes_read += len(text.encode())
                yield part, text

    identity = {"builtin": name, "version": builtin.VERSION, "seed": seed, "sizes": sizes}
    return Recipe(name, identity, sum(sizes.values()), read)


def _folder_recipe(source: SourceFiles, limit_bytes: int | None, field: str, cache: Path) -> Recipe:
    def read(meter: Meter) -> Iterator[Labelled]:
        return source.documents(field, limit_bytes, meter)

    files = [[part, "".join(path.suffixes[-2:]), fingerprint(path, cache)] for part in PARTS for path in getattr(source, part)]
    identity = {"files": files, "field": field, "limit": limit_bytes}
    return Recipe(source.name, identity, sum(path.stat().st_size for path in source.files), read)


def _write(recipe: Recipe, place: Path, coder: Tokenizer, progress: Progress | None) -> Entry:
    meter = Meter()
    with EntryWriter(place, token_dtype(coder.vocab_size)) as writer:
        for batch, encoded in encode_batches(coder, batches(recipe.read(meter), meter)):
            writer.write(batch.part, encoded.tokens, encoded.text_bytes, len(batch.texts))
            if progress:
                progress(recipe.name, min(batch.done_bytes, recipe.total_bytes), recipe.total_bytes)
        for part in PARTS:
            if not writer.count(part).documents:
                raise UserError(
                    f"The source {recipe.name!r} has no {part} text: its files hold no document. Add text or remove the source."
                )
        entry = writer.commit(
            {"name": recipe.name, "identity": recipe.identity, "tokenizer": coder.name, "vocabulary": coder.digest}
        )
    if progress:
        progress(recipe.name, recipe.total_bytes, recipe.total_bytes)
    return entry


def _corpus(recipes: Sequence[Recipe], entries: Sequence[Entry], coder: Tokenizer) -> Corpus:
    sources = tuple(_source(recipe.name, entry) for recipe, entry in zip(recipes, entries, strict=True))
    content = [[recipe.name, entry.train.sha256, entry.val.sha256] for recipe, entry in zip(recipes, entries, strict=True)]
    digest = hashlib.sha256(json.dumps([coder.digest, content]).encode()).hexdigest()
    return Corpus(sources, coder.name, coder.vocab_size, coder.end_of_text, digest)


def _source(name: str, entry: Entry) -> Source:
    train, val = entry.train, entry.val
    return Source(
        name, entry.tokens("train"), entry.tokens("val"), train.text_bytes, val.text_bytes, train.documents, val.documents
    )
