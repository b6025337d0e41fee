"""AdamW's second moment with something of all workers in it: an experiment with what fixed shards lack.

A worker that sees one language alone has a tiny second moment where only other languages have gradients (rows of the head for
their tokens), so AdamW makes full steps of what is almost nothing there. The mean over all workers knows better.

    pooled   v_i ← v̄                                       as many numbers as the model has travel both ways
    rows     v_i ← v_i + max(0, r̄ − r_i) in each row        r the mean of a row: a number for each row travels

v̄ and r̄ are means over the workers, each v_j divided by 1 − β2^t_j before and multiplied by the worker's own 1 − β2^t_i after.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

Memory = dict[str, Tensor]


@torch.no_grad()
def pooled(how: str, beta2: float, worker: int, kept: Sequence[Memory | None]) -> Memory | None:
    """What a worker starts with; None before its first round."""
    own, there = kept[worker], [memory for memory in kept if memory]
    if own is None or len(there) < 2:
        return own
    names = [name for name, moment in own.items() if name.endswith(".exp_avg_sq") and (how == "pooled" or is_table(moment))]
    corrections = [1 - beta2 ** memory["0.step"].double() for memory in there]  # on their device: nobody waits for them
    ours = 1 - beta2 ** own["0.step"].double()

    def mean(of: Sequence[list[Tensor]]) -> list[Tensor]:
        total: list[Tensor] = []
        for moments, correction in zip(of, corrections, strict=True):
            scaled = list(torch._foreach_mul(moments, ours / correction / len(there)))
            total = list(torch._foreach_add(total, scaled)) if total else scaled
        return total

    if how == "pooled":
        return {**own, **dict(zip(names, mean([[memory[name] for name in names] for memory in there]), strict=True))}
    rows = mean([[memory[name].mean(1, keepdim=True) for name in names] for memory in there])
    raised = {name: own[name] + (row - own[name].mean(1, keepdim=True)).clamp(min=0) for name, row in zip(names, rows, strict=True)}
    return {**own, **raised}


def is_table(moment: Tensor) -> bool:
    """Whether it has a row for each token, to judge by its shape."""
    return moment.dim() == 2 and moment.shape[0] > 4 * moment.shape[1]
