"""Many rounds at once: their parameters stacked along a leading dimension, one batched forward and backward for all.

Whole simulations are independent of each other, and so are the rounds under way inside one. A stack takes rounds of any of
them as long as they train one architecture with one kind of batch: the worker, the shard, the data, the number of steps, the
learning rate and the optimizer's state are each round's own. A round in a stack gives what it gives alone, within float
tolerance (randomness inside the model, such as dropout, is drawn for the whole stack).

    losses[S] = loss(parameters[S, …], batch[S, …]);   gradients = ∂ Σ losses / ∂ parameters;   AdamW slice by slice

On a GPU the whole inner step is one CUDA graph, replayed H times: data, learning rates and losses of the round stay there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from heloco.inner.options import InnerOptions, learning_rate
from heloco.inner.stacked_loss import GPTLoss, StackedLoss, stacked_loss
from heloco.synchronizer import Contribution, Round
from heloco.task import Task, to_device


@dataclass(frozen=True)
class Job:
    """A round with what it takes to run it beside rounds of other runs."""

    round: Round
    task: Task
    options: InnerOptions

    @property
    def kind(self) -> InnerOptions:
        """What must be alike in one stack: all but the learning rate's course and what becomes of the optimizer's state."""
        alike = InnerOptions()
        return replace(
            self.options, lr=alike.lr, lr_min=alike.lr_min, warmup=alike.warmup, schedule_steps=alike.schedule_steps,
            lr_position=alike.lr_position, keep_state=alike.keep_state,
        )  # fmt: skip

    def learning_rates(self) -> list[float]:
        handed = self.round
        base = handed.shard_steps if self.options.lr_position == "shard" else handed.run_steps
        return [learning_rate(self.options, base + h) for h in range(handed.inner_steps)]

    def batches(self) -> Any:
        """All batches of the round, samples along the first dimension."""
        positions = np.concatenate([np.arange(start, start + count) for start, count in self.round.spans])
        return self.task.batch(self.round.shard, positions)


class StackedInner:
    """Runs jobs of one architecture at most `width` at a time."""

    def __init__(self, task: Task, *, device: torch.device | str = "cpu", width: int = 32) -> None:
        self.device = torch.device(device)
        self.width = width
        self.model = task.build_model().to(self.device).train()
        self.loss: StackedLoss = stacked_loss(task, self.model)
        if self.device.type == "cuda" and isinstance(self.loss, GPTLoss):
            self.loss = torch.compile(self.loss, dynamic=False)
        self._stacks: dict[Any, _Stack] = {}

    def run(self, jobs: Sequence[Job]) -> list[Contribution]:
        done: dict[int, Contribution] = {}
        by_kind: dict[InnerOptions, list[int]] = {}
        for index, job in enumerate(jobs):
            by_kind.setdefault(job.kind, []).append(index)
        for kind, indices in by_kind.items():
            # rounds of like length together: a stack runs as long as its longest
            indices = sorted(indices, key=lambda i: -jobs[i].round.inner_steps)
            for start in range(0, len(indices), self.width):
                picked = indices[start : start + self.width]
                done |= zip(picked, self._run(kind, [jobs[i] for i in picked]), strict=True)
        return [done[i] for i in range(len(jobs))]

    def _run(self, kind: InnerOptions, jobs: list[Job]) -> list[Contribution]:
        steps = max(job.round.inner_steps for job in jobs)
        data = [job.batches() for job in jobs]
        stack = self._stack(kind, len(jobs), steps)
        stack.load(jobs, data)
        stack.run(steps)
        return stack.contributions(jobs, data)

    def _stack(self, kind: InnerOptions, size: int, steps: int) -> "_Stack":
        key = (kind, size, steps)
        if key not in self._stacks:
            self._stacks.clear()  # one at a time: a stack fills the device
            self._stacks[key] = _Stack(self.model, self.loss, kind, size, steps, self.device)
        return self._stacks[key]


class _Stack:
    """The tensors of S rounds and the step that moves them; every tensor keeps its place, as a CUDA graph wants."""

    def __init__(
        self, model: nn.Module, loss: StackedLoss, options: InnerOptions, size: int, steps: int, device: torch.device
    ) -> None:
        def stacked(t: Tensor) -> Tensor:
            return torch.zeros((size, *t.shape), dtype=t.dtype, device=device)

        self.loss, self.options, self.device = loss, options, device
        self.parameters = [stacked(p).requires_grad_() for p in model.parameters()]
        self.buffers = [stacked(b) for b in model.buffers()]
        self.exp_avg = [stacked(p) for p in model.parameters()]
        self.exp_avg_sq = [stacked(p) for p in model.parameters()]
        self.taken = torch.zeros(size, dtype=torch.float64, device=device)
        self.lr = torch.zeros(steps, size, dtype=torch.float64, device=device)
        self.active = torch.zeros_like(self.lr)
        self.losses = torch.zeros_like(self.lr)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.data: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._move = torch.compile(adamw_move, dynamic=True) if device.type == "cuda" else adamw_move

    @torch.no_grad()
    def load(self, jobs: Sequence[Job], data: Sequence[Any]) -> None:
        steps = len(self.lr)
        rates, active = np.zeros(self.lr.shape), np.zeros(self.lr.shape)
        for s, job in enumerate(jobs):
            own = job.round.inner_steps
            rates[:own, s], active[:own, s] = job.learning_rates(), 1
            for ours, start in zip(self.parameters + self.buffers, job.round.parameters + job.round.buffers, strict=True):
                ours[s].copy_(start)
            memory = job.round.memory or {}
            for i, (m, v) in enumerate(zip(self.exp_avg, self.exp_avg_sq, strict=True)):
                for ours, name in ((m, "exp_avg"), (v, "exp_avg_sq")):
                    ours[s].copy_(memory[f"{i}.{name}"]) if memory else ours[s].zero_()
            self.taken[s] = memory["0.step"] if memory else 0
        self.lr.copy_(torch.from_numpy(rates))
        self.active.copy_(torch.from_numpy(active))
        self.at.zero_()
        shape = (self.options.accumulate, self.options.batch_size)
        fresh = _stack_batches([_by_step(own, job.round.inner_steps, steps, shape) for own, job in zip(data, jobs, strict=True)])
        self.data = to_device(fresh, self.device) if self.data is None else _overwrite(self.data, fresh)

    def run(self, steps: int) -> None:
        if self.device.type != "cuda":
            for _ in range(steps):
                self._step()
            return
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        for _ in range(steps):
            self._graph.replay()

    def _step(self) -> None:
        options = self.options
        total = torch.zeros_like(self.losses[0])
        gradients: list[Tensor] = []
        for a in range(options.accumulate):
            batch = _map(self.data, lambda t, a=a: t.index_select(0, self.at)[0, :, a])
            with torch.autocast(self.device.type, torch.bfloat16, enabled=options.precision == "bf16"):
                losses = self.loss(self.parameters, self.buffers, batch) / options.accumulate
            new = torch.autograd.grad(losses.sum(), self.parameters)
            gradients = [g + n for g, n in zip(gradients, new, strict=True)] if gradients else list(new)
            total = total + losses.detach()
        with torch.no_grad():
            self.losses.index_copy_(0, self.at, total.to(self.losses.dtype)[None])
            lr, active = self.lr.index_select(0, self.at)[0], self.active.index_select(0, self.at)[0]
            self.taken += active
            if options.clip:
                gradients = clipped(gradients, options.clip)
            factors = torch.stack([*adamw_factors(self.taken, lr, active, options), active])
            for kind in {p.dtype for p in self.parameters}:  # one conversion for all blocks of a kind
                own = factors.to(kind)[..., None]
                for p, m, v, g in zip(self.parameters, self.exp_avg, self.exp_avg_sq, gradients, strict=True):
                    if p.dtype is kind:
                        self._move(_rows(p), _rows(m), _rows(v), _rows(g), own, options)
            self.at += 1

    def _capture(self) -> None:
        """Records a step. Warming up and recording move the tensors: they are put back as they were."""
        moving = [*self.parameters, *self.buffers, *self.exp_avg, *self.exp_avg_sq, self.taken, self.at, self.losses]
        with torch.no_grad():
            before = [t.clone() for t in moving]
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(2):
                self.at.zero_()
                self._step()
        torch.cuda.current_stream().wait_stream(aside)
        self.at.zero_()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._step()
        with torch.no_grad():
            for t, kept in zip(moving, before, strict=True):
                t.copy_(kept)

    @torch.no_grad()
    def contributions(self, jobs: Sequence[Job], data: Sequence[Any]) -> list[Contribution]:
        traces = self.losses.T.tolist()
        return [self._contribution(s, job, traces[s][: job.round.inner_steps], data[s]) for s, job in enumerate(jobs)]

    def _contribution(self, s: int, job: Job, trace: list[float], data: Any) -> Contribution:
        handed = job.round
        memory = None
        if job.options.keep_state:
            memory = {"0.step": self.taken[s].clone()}
            for i, (m, v) in enumerate(zip(self.exp_avg, self.exp_avg_sq, strict=True)):
                memory |= {f"{i}.exp_avg": m[s].clone(), f"{i}.exp_avg_sq": v[s].clone(), f"{i}.step": memory["0.step"]}
        return Contribution(
            handed.worker,
            handed.index,
            handed.version,
            pseudo_gradient=[start - p[s] for start, p in zip(handed.parameters, self.parameters, strict=True)],
            buffers=[b[s].clone() for b in self.buffers],
            loss=sum(trace) / len(trace),
            last_loss=trace[-1],
            samples=sum(count for _, count in handed.spans),
            units=job.task.units(data),
            memory=memory,
        )


def adamw_factors(taken: Tensor, lr: Tensor, active: Tensor, options: InnerOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Per slice, in float64: the step's size, the second moment's correction, the decay. A slice that is not active stays."""
    count = taken.clamp(min=1)
    return active * lr / (1 - options.beta1**count), (1 - options.beta2**count).sqrt(), 1 - active * lr * options.weight_decay


def clipped(gradients: Sequence[Tensor], norm: float) -> list[Tensor]:
    """The gradients of each slice scaled down to this norm where they exceed it, as `clip_grad_norm_` does for one model."""
    squares = torch.stack([g.flatten(1).square().sum(1) for g in gradients]).sum(0)
    scale = (norm / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    return [g * _along(scale, g) for g in gradients]


def adamw_move(p: Tensor, m: Tensor, v: Tensor, g: Tensor, factors: Tensor, options: InnerOptions) -> None:
    """AdamW on one block of all slices, a slice a row, whatever its shape: one compiled kernel serves all blocks."""
    size, root, decay, here = factors
    m.add_((g - m) * ((1 - options.beta1) * here))
    v.add_((g * g - v) * ((1 - options.beta2) * here))
    p.mul_(decay).sub_(size * m / (v.sqrt() / root + options.adam_eps))


def _rows(block: Tensor) -> Tensor:
    return block.detach().reshape(len(block), -1)


def _along(values: Tensor, like: Tensor) -> Tensor:
    """One value per slice, ready to be broadcast over the rest of `like`."""
    return values.view(-1, *([1] * (like.dim() - 1)))


def _map(batch: Any, function: Any) -> Any:
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: _map(value, function) for key, value in batch.items()}
    return type(batch)(_map(value, function) for value in batch)


def _by_step(batch: Any, own: int, steps: int, shape: tuple[int, int]) -> Any:
    """Samples as [steps, accumulate, batch_size, …]; a shorter round's last step stands in for those it does not have."""

    def by_step(t: Tensor) -> Tensor:
        t = t.view(own, *shape, *t.shape[1:])
        return t if own == steps else torch.cat([t, t[-1:].expand(steps - own, *t.shape[1:])])

    return _map(batch, by_step)


def _stack_batches(batches: Sequence[Any]) -> Any:
    """[steps, S, accumulate, batch_size, …]"""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.stack(list(batches), dim=1)
    if isinstance(first, dict):
        return {key: _stack_batches([b[key] for b in batches]) for key in first}
    return type(first)(_stack_batches(parts) for parts in zip(*batches, strict=True))


def _overwrite(old: Any, new: Any) -> Any:
    if isinstance(old, Tensor):
        return old.copy_(new, non_blocking=True)
    if isinstance(old, dict):
        return {key: _overwrite(value, new[key]) for key, value in old.items()}
    return type(old)(_overwrite(a, b) for a, b in zip(old, new, strict=True))
