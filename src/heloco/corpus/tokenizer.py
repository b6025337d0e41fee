"""Text to token ids and back: bytes, GPT-2's vocabulary, or any tokenizer.json.

A tokenizer is known by its digest, made from what it does and not from where it was found: GPT-2's vocabulary has one digest,
whether it comes as a rank file or as a tokenizer.json, and whether tiktoken or tokenizers does the work.
"""

import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from heloco.errors import UserError, nearest
from heloco.places import cache_folder

from . import gpt2
from .libraries import library

Ids = npt.NDArray[np.unsignedinteger[Any]]

END_OF_TEXT = "<|endoftext|>"
_ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<end_of_text>", "<|im_end|>", "[SEP]")
_LONG_CHARS = 1 << 16  # longer strings are encoded in pieces: the libraries' time grows faster than the length
_LONE_SPACE = re.compile(r"(?<=\S) (?=\S)")


class Tokenizer(Protocol):
    """What the corpus needs of a tokenizer."""

    name: str

    @property
    def digest(self) -> str:
        """A hash of the vocabulary. Tokenizers with one digest give the same ids."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def end_of_text(self) -> int:
        """The id that ends each document."""

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, without an end of text."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these ids, an end of text written out."""


class ByteTokenizer:
    """The UTF-8 bytes themselves, and one id for the end of a text."""

    name = "bytes"
    digest = sha256(b"heloco bytes 1").hexdigest()
    vocab_size = 257
    end_of_text = 256

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        text_bytes = b"".join(bytes([i]) if i < 256 else END_OF_TEXT.encode() for i in ids)
        return text_bytes.decode(errors="replace")


class RankTokenizer:
    """GPT-2's vocabulary, from either kind of file, through tiktoken: about four times as fast as tokenizers."""

    vocab_size = gpt2.VOCAB_SIZE
    end_of_text = gpt2.END_OF_TEXT

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path

    @cached_property
    def _ranks(self) -> dict[bytes, int]:
        return gpt2.read_ranks(self.path)

    @cached_property
    def digest(self) -> str:
        return gpt2.digest(self._ranks)

    @cached_property
    def _encoding(self) -> Any:
        tiktoken = library("tiktoken", "A .tiktoken rank file")
        special = {END_OF_TEXT: self.end_of_text}
        return tiktoken.Encoding(self.name, pat_str=gpt2.PATTERN, mergeable_ranks=self._ranks, special_tokens=special)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """On all cores: tiktoken lets other threads run while it encodes. (Its own `encode_batch` gives lists, not arrays.)"""
        return [ids for group in self._threads.map(self._encode_group, _groups(texts)) for ids in group]

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        """The threads that encode, which are kept from batch to batch."""
        return ThreadPoolExecutor(_cores())

    def _encode_group(self, texts: list[str]) -> list[Ids]:
        """Texts of a group are encoded in one call, with the end of text between them, at which tiktoken cuts first."""
        if len(texts) == 1:
            pieces = _pieces(texts[0], keep_space=True)
            return [np.concatenate([self._encoding.encode_to_numpy(piece, disallowed_special=()) for piece in pieces])]
        ids = self._encoding.encode_to_numpy(END_OF_TEXT.join(texts), allowed_special={END_OF_TEXT})
        first, *others = np.split(ids, np.flatnonzero(ids == self.end_of_text))
        return [first, *(part[1:] for part in others)]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._encoding.decode([int(i) for i in ids]))


class JsonTokenizer:
    """Any tokenizer.json, through tokenizers, which encodes a batch on all cores by itself.

    Special tokens written out in a text are taken for ordinary text."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path

    @cached_property
    def digest(self) -> str:
        content = self.path.read_bytes()
        return gpt2.DIGEST if gpt2.is_gpt2(content) else sha256(content).hexdigest()

    @cached_property
    def _tokenizer(self) -> Any:
        try:
            tokenizer = library("tokenizers", "A tokenizer.json").Tokenizer.from_file(str(self.path))
        except UserError:
            raise
        except Exception as error:  # tokenizers raises bare Exception
            raise UserError(
                f"{self.path} is not a tokenizer.json that tokenizers can read ({error}): download it again."
            ) from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def vocab_size(self) -> int:
        return 1 + int(max(self._tokenizer.get_vocab(with_added_tokens=True).values()))

    @cached_property
    def end_of_text(self) -> int:
        special = {token.content: id_ for id_, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        for token in _ENDS_OF_TEXT:
            if token in special:
                return int(special[token])
        raise UserError(
            f"{self.path} has no special token that ends a text, only {', '.join(special) or 'none'}: "
            f"add one of {', '.join(_ENDS_OF_TEXT)} to its added_tokens with 'special': true."
        )

    @cached_property
    def _keeps_space(self) -> bool | None:
        """Where a long text may be cut: before a space, at a space that the tokenizer puts back itself, or nowhere (None)."""
        whole, head, tail, bare = (self._ids([text])[0].tolist() for text in ("one two", "one", " two", "two"))
        return True if whole == head + tail else False if whole == head + bare else None

    def _ids(self, texts: Sequence[str]) -> list[Ids]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.uint32) for one in encoded]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        if self._keeps_space is None or max(map(len, texts), default=0) <= _LONG_CHARS:
            return self._ids(texts)
        pieces = [list(_pieces(text, self._keeps_space)) for text in texts]
        ids = iter(self._ids([piece for text in pieces for piece in text]))
        return [np.concatenate([next(ids) for _ in text]) for text in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False))


def load_tokenizer(spec: str, data_folder: Path | None = None, cache: Path | None = None) -> Tokenizer:
    """`bytes`, `gpt2` (looked for in `data_folder`, next to it, in the cache, then downloaded), or a file's path."""
    if spec == "bytes":
        return ByteTokenizer()
    if spec == "gpt2":
        path = gpt2.find(data_folder, cache_folder(cache))
    else:
        path = Path(spec).expanduser().resolve()
        path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        hint = nearest(spec, ["bytes", "gpt2"])
        raise UserError(f"There is no tokenizer {spec!r}: name 'bytes', 'gpt2' or the path of a tokenizer.json; {hint}")
    tokenizer = _from_file(spec, path)
    _ = tokenizer.digest, tokenizer.end_of_text  # a broken file is found out here, not in the middle of a corpus
    if spec == "gpt2" and tokenizer.digest != gpt2.DIGEST:
        raise UserError(f"{path} is not GPT-2's vocabulary: replace it, or pass --tokenizer {path} to use it for what it is.")
    return tokenizer


def _from_file(name: str, path: Path) -> Tokenizer:
    if path.suffix == ".tiktoken" or (gpt2.has_tiktoken() and gpt2.is_gpt2(path.read_bytes())):
        return RankTokenizer(name, path)
    return JsonTokenizer(name, path)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def token_dtype(vocab_size: int) -> "np.dtype[np.unsignedinteger[Any]]":
    """The smallest type of integers that holds every id of a vocabulary: 2 bytes, or 4."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """Neighbours of together about _LONG_CHARS; a text that has the end of text written out in it stays alone."""
    group, chars = list[str](), 0
    for text in texts:
        if group and (chars + len(text) > _LONG_CHARS or END_OF_TEXT in text or END_OF_TEXT in group[0]):
            yield group
            group, chars = [], 0
        group.append(text)
        chars += len(text)
    if group:
        yield group


def _pieces(text: str, keep_space: bool) -> Iterator[str]:
    """The text in pieces of about _LONG_CHARS, cut at a lone space: there GPT-2's pattern starts a new word anyway."""
    start = 0
    while len(text) - start > _LONG_CHARS:
        gap = _LONE_SPACE.search(text, start + _LONG_CHARS)
        if gap is None:
            break
        yield text[start : gap.start()]
        start = gap.start() if keep_space else gap.end()
    yield text[start:]
