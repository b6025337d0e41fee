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


class SharedMoment:
    """Makes the state that a worker begins a round with from what each worker kept.

    Called with the worker's number and the workers' states (None before a first round). Row means are computed once for each
    state: with many workers, most of them have not changed since the last call."""

    def __init__(self, sharing: str, beta2: float) -> None:
        self.sharing, self.beta2 = sharing, beta2
        self._corrected_moments: dict[int, tuple[Memory, list[Tensor]]] = {}
        """Worker -> a state, and the corrected row means of it."""

    @torch.no_grad()
    def __call__(self, worker: int, worker_memories: Sequence[Memory | None]) -> Memory | None:
        worker_memory = worker_memories[worker]
        present = [(other, memory) for other, memory in enumerate(worker_memories) if memory]
        if worker_memory is None or len(present) < 2 or not (names := self._names(worker_memory)):
            return worker_memory
        correction = self._correction(worker_memory)
        corrected_moments = [self._correct_moments(other, memory, names) for other, memory in present]
        means = [torch.stack(each).mean(0) * correction for each in zip(*corrected_moments, strict=True)]
        if self.sharing == "rows":
            means = [
                worker_memory[name] + (mean - _rows(worker_memory[name])).clamp(min=0)
                for name, mean in zip(names, means, strict=True)
            ]
        return {**worker_memory, **dict(zip(names, means, strict=True))}

    def _names(self, memory: Memory) -> list[str]:
        """The second moments that are shared."""
        is_shared = is_table if self.sharing == "rows" else lambda _: True
        return [name for name, moment in memory.items() if name.endswith(".exp_avg_sq") and is_shared(moment)]

    def _correction(self, memory: Memory) -> Tensor:
        """AdamW's 1 − β2^t. It stays on its device, so that the host does not wait."""
        step = next(tensor for name, tensor in memory.items() if name.endswith(".step"))
        return 1 - self.beta2 ** step.double()

    def _correct_moments(self, worker: int, memory: Memory, names: Sequence[str]) -> list[Tensor]:
        """The worker's moments, or their row means, corrected. Whole moments are not kept: they are as large as the model."""
        if self.sharing == "pooled":
            return [memory[name] / self._correction(memory) for name in names]
        if worker not in self._corrected_moments or self._corrected_moments[worker][0] is not memory:
            correction = self._correction(memory)
            self._corrected_moments[worker] = memory, [_rows(memory[name]) / correction for name in names]
        return self._corrected_moments[worker][1]


def _rows(moment: Tensor) -> Tensor:
    return moment.mean(1, keepdim=True)


def is_table(moment: Tensor) -> bool:
    """Whether a parameter has a row for each token, judged by its shape: more than four times as many rows as columns."""
    return moment.dim() == 2 and moment.shape[0] > 4 * moment.shape[1]
