"""Batches of documents to tokens, in helper processes where there is enough to do, in the order they came.

The helpers are plain subprocesses fed through pipes, a thread each, not a multiprocessing pool: spawning one runs the caller's
main script again (and fails where it has no `__main__` guard), is forbidden inside daemons, and leaves the helpers behind when
the caller is killed. These end when their pipe does.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import cast

import numpy as np

from heloco.errors import UserError

from .cache import Tokens
from .parts import Labelled, Part
from .streams import Meter
from .tokenizer import Tokenizer, token_dtype

_BATCH_CHARS = 1 << 19

# A helper needs this folder and heloco.errors only. The packages above would bring torch in: a second and 200 MB in each helper.
_START_HELPER = """
import sys, types
for name, folder in {packages!r}:
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [folder]
from heloco.corpus.helper import main
main()
"""


@dataclass(frozen=True)
class Batch:
    """Documents of one part, and how much of the input had been read when it was full."""

    part: Part
    texts: list[str]
    done_bytes: int


@dataclass(frozen=True)
class Encoded:
    tokens: Tokens
    text_bytes: int


def batches(documents: Iterable[Labelled], meter: Meter) -> Iterator[Batch]:
    """Documents gathered by part; within a part their order stays."""
    waiting: dict[Part, list[str]] = {"train": [], "val": []}
    chars = {"train": 0, "val": 0}
    for part, text in documents:
        waiting[part].append(text)
        chars[part] += len(text)
        if chars[part] >= _BATCH_CHARS:
            yield Batch(part, waiting[part], meter.done)
            waiting[part], chars[part] = [], 0
    yield from (Batch(part, texts, meter.done) for part, texts in waiting.items() if texts)


def encode(tokenizer: Tokenizer, texts: list[str]) -> Encoded:
    """The tokens of all texts in a row, each followed by the end of text."""
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_text], dtype=dtype)
    pieces = [piece for ids in tokenizer.encode_batch(texts) for piece in (ids, end)]
    return Encoded(np.concatenate(pieces, dtype=dtype, casting="unsafe"), sum(len(text.encode()) for text in texts))


class Encoder:
    """Encodes batches here (`processes` of 1) or in so many helpers; a context manager, for the helpers must end."""

    def __init__(self, tokenizer: Tokenizer, processes: int) -> None:
        self._tokenizer, self._processes = tokenizer, processes
        self._helpers: list[_Helper] = []
        self._own = threading.local()
        self._threads = ThreadPoolExecutor(processes) if processes > 1 else None

    def __enter__(self) -> "Encoder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        for helper in self._helpers:
            helper.close()

    def map(self, work: Iterable[Batch]) -> Iterator[tuple[Batch, Encoded]]:
        """Each batch with its tokens, in order; only a few batches are ever in memory."""
        if self._threads is None:
            yield from ((batch, encode(self._tokenizer, batch.texts)) for batch in work)
            return
        under_way: deque[tuple[Batch, Future[Encoded]]] = deque()
        for batch in work:
            under_way.append((batch, self._threads.submit(self._in_helper, batch.texts)))
            if len(under_way) > 2 * self._processes:
                done, future = under_way.popleft()
                yield done, future.result()
        yield from ((batch, future.result()) for batch, future in under_way)

    def _in_helper(self, texts: list[str]) -> Encoded:
        if not hasattr(self._own, "helper"):
            self._own.helper = _Helper(self._tokenizer)
            self._helpers.append(self._own.helper)
        return cast(_Helper, self._own.helper).encode(texts)


class _Helper:
    """One process that encodes what it is sent."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        environment = {
            **os.environ,
            "PYTHONPATH": path,
            "TOKENIZERS_PARALLELISM": "false",
        }  # one core each: no threads of their own
        task = Path(__file__).parents[1]
        start = _START_HELPER.format(packages=[("heloco", str(task.parent)), ("heloco.task", str(task))])
        command = [sys.executable, "-c", start]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        pickle.dump(tokenizer, self._to)

    def encode(self, texts: list[str]) -> Encoded:
        try:
            pickle.dump(texts, self._to)
            self._to.flush()
            answer = pickle.load(self._from)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            code = self._process.wait()
            raise UserError(
                f"A tokenising process ended before its work was done (exit status {code}; -9 means killed, most often "
                f"for want of memory): free some memory, or prepare in a single process with processes=1."
            ) from error
        if isinstance(answer, Exception):
            raise answer
        return cast(Encoded, answer)

    def close(self) -> None:
        for pipe in (self._to, self._from):
            with contextlib.suppress(OSError):  # it ended first, and was told of
                pipe.close()
        self._process.wait()
