"""The batches of a round in their order: on a GPU the next one is made by a thread while a step is computed."""

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from heloco.task import Task
from heloco.task.base import Positions

AHEAD = {"cuda": 2}  # steps, by the kind of device; 0: each batch is made when it is needed


def batches_of(task: Task, shard: int, steps: Sequence[Positions], *, ahead: int) -> Generator[list[Any]]:
    """The micro-batches of each step, on the host. `steps`: positions, [micro-batches, windows] for each step.

    With `ahead` a thread makes the batches of that many steps beforehand: one batch after the other, in their order. Where there
    is a GPU it puts them into pinned memory, from where they are copied while the host goes on."""
    if not ahead:
        for micro_batches in steps:
            yield [task.batch(shard, part) for part in micro_batches]
        return

    def make(micro_batches: Positions) -> list[Any]:
        batches = [task.batch(shard, part) for part in micro_batches]
        return [_pinned(batch) for batch in batches] if torch.cuda.is_available() else batches

    with ThreadPoolExecutor(1, thread_name_prefix="batches") as thread:
        pending = deque(thread.submit(make, step) for step in steps[:ahead])
        try:
            for h in range(len(steps)):
                batches = pending.popleft().result()
                if h + ahead < len(steps):
                    pending.append(thread.submit(make, steps[h + ahead]))
                yield batches
        finally:
            for future in pending:
                future.cancel()


def _pinned(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.pin_memory()
    if isinstance(batch, dict):
        return {key: _pinned(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [_pinned(value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch
