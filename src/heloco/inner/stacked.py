"""Many rounds at once: their parameters stacked along a leading dimension, one batched forward and backward for all.

Whole simulations are independent of each other, and so are the rounds under way inside one. A stack takes rounds of any of
them as long as they train one architecture with one kind of batch: the worker, the shard, the data, the number of steps, the
learning rate and the optimizer's state are each round's own. A round in a stack gives what it gives alone, within float
tolerance (randomness inside the model, such as dropout, is drawn for the whole stack).

    losses[S] = loss(parameters[S, …], batch[S, …]);   gradients = ∂ Σ losses / ∂ parameters;   AdamW slice by slice

On a GPU the whole inner step is one CUDA graph, replayed H times: data, learning rates and losses of the round stay there.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from heloco.errors import UserError
from heloco.inner.adamw import SETTINGS
from heloco.inner.options import InnerOptions, learning_rate
from heloco.inner.stack import Stack
from heloco.inner.stacked_loss import StackedLoss, stacked_loss
from heloco.synchronizer import Contribution, Round
from heloco.task import Task

Results = Callable[[], list[Contribution]]
"""To be called once: waits for the jobs that were begun and gives their contributions, in their order."""


@functools.cache
def kind_of(options: InnerOptions) -> InnerOptions:
    """The settings that must be equal within a stack: all but the learning rate's course and AdamW's settings."""
    defaults = InnerOptions()
    free = ("lr", "lr_min", "warmup", "schedule_steps", "lr_position", "second_moment", *SETTINGS)
    return replace(options, **{name: getattr(defaults, name) for name in free})


def check_stackable(options: InnerOptions) -> None:
    """Refuses settings that a stack cannot honour."""
    for name in ("compile", "recompute"):
        if getattr(options, name):
            raise UserError(f"{name} is set, but a study computes the rounds of many runs as one stack of models: leave it out.")


@dataclass(frozen=True)
class Job:
    """A round, with what is needed to run it together with rounds of other runs."""

    round: Round
    task: Task
    options: InnerOptions

    @property
    def kind(self) -> InnerOptions:
        """The settings that two rounds must have in common to be computed in one stack."""
        return kind_of(self.options)

    def learning_rates(self) -> list[float]:
        """The learning rate of each inner step of the round."""
        worker_round = self.round
        base = self.options.first_position(worker_round.shard_steps, worker_round.progress)
        return [learning_rate(self.options, base + h) for h in range(worker_round.inner_steps)]

    def batches(self) -> Any:
        """All batches of the round, samples along the first dimension."""
        positions = np.concatenate([np.arange(start, start + count) for start, count in self.round.spans])
        return self.task.batch(self.round.shard, positions)


class StackedInner:
    """Runs jobs of one architecture, at most `width` at a time. If the device's memory is too small for that, the width is
    halved and the same jobs are run again."""

    def __init__(self, task: Task, *, device: torch.device | str = "cpu", width: int = 32, steps: int = 0) -> None:
        """`steps`: how many inner steps a stack has room for at least, so that it need not be made again for longer rounds."""
        self.device = torch.device(device)
        self.width, self.steps = width, steps
        self.model = task.build_model().to(self.device).train()
        self.loss: StackedLoss = stacked_loss(task, self.model)
        self.stacks: list[Stack] = []
        """One for each kind of job that runs or ran last."""

    def run(self, jobs: Sequence[Job]) -> list[Contribution]:
        """Runs any number of jobs, of any kinds, and returns their contributions in the same order."""
        contributions: dict[int, Contribution] = {}
        by_kind: dict[InnerOptions, list[int]] = {}
        for index, job in enumerate(jobs):
            by_kind.setdefault(job.kind, []).append(index)
        for indices in by_kind.values():
            # rounds of like length together: a stack runs as long as its longest
            waiting = sorted(indices, key=lambda i: -jobs[i].round.inner_steps)
            while waiting:
                stack_indices = waiting[: self.width]
                results = self._try_to_begin([jobs[i] for i in stack_indices])
                if results is None:
                    self.width = self._size(len(stack_indices)) // 2
                    self._forget()
                    continue
                contributions |= zip(stack_indices, results(), strict=True)
                waiting = waiting[len(stack_indices) :]
        return [contributions[i] for i in range(len(jobs))]

    def begin(self, jobs: Sequence[Job]) -> Results:
        """Begins at most `width` jobs of one kind. On a GPU the host is free until it asks for their results."""
        results = self._try_to_begin(list(jobs))
        if results is not None:
            return results
        contributions = self.run(jobs)
        return lambda: contributions

    def _try_to_begin(self, jobs: list[Job]) -> Results | None:
        """Begins the jobs; returns None if memory does not suffice.

        The caller tries again outside of `except`, because an exception keeps the stack alive while it is handled.
        """
        steps = max(job.round.inner_steps for job in jobs)
        data = [job.batches() for job in jobs]
        try:
            stack = self._stack(jobs[0].kind, self._size(len(jobs)), max(steps, self.steps))
            stack.load(jobs, data)
            if not stack.is_recorded:
                stack.record()
                stack.load(jobs, data)
            stack.begin(steps)
        except torch.OutOfMemoryError:
            if self._size(len(jobs)) == 1:
                raise
            return None
        return lambda: stack.contributions(jobs, data)

    def _stack(self, kind: InnerOptions, size: int, steps: int) -> Stack:
        """An idle stack with room for this many rounds."""
        check_stackable(kind)
        for stack in self.stacks:
            if not stack.busy and (stack.options, stack.size) == (kind, size) and stack.steps >= steps:
                return stack
        self._forget()
        self.stacks.append(Stack(self.model, self.loss, kind, size, steps, self.device))
        return self.stacks[-1]

    def _size(self, jobs: int) -> int:
        """On a GPU one stack of the full width serves any number of jobs, so that its graph is recorded once."""
        return self.width if self.device.type == "cuda" else jobs

    def _forget(self) -> None:
        """Gives the memory of idle stacks back: what is asked for next will not fit them."""
        self.stacks = [stack for stack in self.stacks if stack.busy]
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
