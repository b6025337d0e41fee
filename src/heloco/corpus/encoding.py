"""Batches of documents to tokens, in the order they came."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from .cache import Tokens
from .parts import Labelled, PartName
from .streams import Meter
from .tokenizer import Tokenizer, token_dtype

_BATCH_CHARS = 1 << 19
_BATCHES_AHEAD = 2


@dataclass(frozen=True)
class Batch:
    """Documents of one part, and how much of the input had been read when it was full."""

    part: PartName
    texts: list[str]
    done_bytes: int


@dataclass(frozen=True)
class Encoded:
    """The tokens of a batch of documents, and how many bytes of text they came from."""

    tokens: Tokens
    text_bytes: int


def batches(documents: Iterable[Labelled], meter: Meter) -> Iterator[Batch]:
    """Documents gathered by part; within a part their order stays."""
    waiting: dict[PartName, list[str]] = {"train": [], "val": []}
    chars = {"train": 0, "val": 0}
    for part, text in documents:
        waiting[part].append(text)
        chars[part] += len(text)
        if chars[part] >= _BATCH_CHARS:
            yield Batch(part, waiting[part], meter.bytes_read)
            waiting[part], chars[part] = [], 0
    yield from (Batch(part, texts, meter.bytes_read) for part, texts in waiting.items() if texts)


def encode(tokenizer: Tokenizer, texts: list[str]) -> Encoded:
    """The tokens of all texts in a row, each followed by the end of text."""
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_text], dtype=dtype)
    pieces = [piece for ids in tokenizer.encode_batch(texts) for piece in (ids, end)]
    return Encoded(np.concatenate(pieces, dtype=dtype, casting="unsafe"), sum(len(text.encode()) for text in texts))


def encode_batches(tokenizer: Tokenizer, work: Iterable[Batch]) -> Iterator[tuple[Batch, Encoded]]:
    """Each batch with its tokens. While one is encoded the next ones are read; only a few are in memory."""
    with ThreadPoolExecutor(1) as background:
        pending: deque[tuple[Batch, Future[Encoded]]] = deque()
        for batch in work:
            pending.append((batch, background.submit(encode, tokenizer, batch.texts)))
            if len(pending) > _BATCHES_AHEAD:
                first, future = pending.popleft()
                yield first, future.result()
        yield from ((batch, future.result()) for batch, future in pending)
