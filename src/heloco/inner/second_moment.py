"""What workers share of AdamW's second moment, so that a worker with one language does not unlearn the others.

A worker that sees one language alone has tiny gradients in the rows of the head that belong to tokens of other languages: all
they do is lower probabilities that are almost 0 already. Its own second moment v is as tiny there, so AdamW turns these
gradients into full steps, and in 80 of them the worker unlearns what it does not see. With flexible shards v has seen all
languages. With fixed shards the workers can share it:

    rows     v ← v + max(0, r̄ − r) in each row of a table    r: the mean of a row. One number per row travels both ways
    pooled   v ← v̄                                           as many numbers as the model has travel both ways

r̄ and v̄ are means over the workers. AdamW divides v by 1 − β2^t, so each worker's is divided by that before, and the mean is
multiplied by the receiving worker's own after.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Memory = dict[str, Tensor]
"""AdamW's state as `SequentialInner` keeps it: "3.exp_avg_sq" belongs to the fourth parameter."""


@torch.no_grad()
def shared_memory(sharing: str, beta2: float, worker: int, worker_memories: Sequence[Memory | None]) -> Memory | None:
    """The state that a worker begins a round with, from what each worker kept; None before its first round."""
    worker_memory, memories = worker_memories[worker], [memory for memory in worker_memories if memory]
    if worker_memory is None or len(memories) < 2:
        return worker_memory
    step = next(name for name in worker_memory if name.endswith(".step"))
    names = [
        name
        for name, moment in worker_memory.items()
        if name.endswith(".exp_avg_sq") and (sharing == "pooled" or is_table(moment))
    ]
    if not names:
        return worker_memory
    corrections = [1 - beta2 ** memory[step].double() for memory in memories]  # on their device: the host does not wait
    ours = 1 - beta2 ** worker_memory[step].double()

    def mean(moments_of: Sequence[list[Tensor]]) -> list[Tensor]:
        total: list[Tensor] = []
        for moments, correction in zip(moments_of, corrections, strict=True):
            scaled = list(torch._foreach_mul(moments, ours / correction / len(memories)))
            total = list(torch._foreach_add(total, scaled)) if total else scaled
        return total

    if sharing == "pooled":
        return {**worker_memory, **dict(zip(names, mean([[memory[name] for name in names] for memory in memories]), strict=True))}
    means = mean([[_rows(memory[name]) for name in names] for memory in memories])
    raised = {
        name: worker_memory[name] + (row - _rows(worker_memory[name])).clamp(min=0)
        for name, row in zip(names, means, strict=True)
    }
    return {**worker_memory, **raised}


def _rows(moment: Tensor) -> Tensor:
    return moment.mean(1, keepdim=True)


def is_table(moment: Tensor) -> bool:
    """Whether a parameter has a row for each token, judged by its shape: more than four times as many rows as columns."""
    return moment.dim() == 2 and moment.shape[0] > 4 * moment.shape[1]
