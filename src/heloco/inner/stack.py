"""The tensors of S rounds and the step that moves them all; every tensor keeps its place, as a CUDA graph wants."""

import functools
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from heloco.inner.adamw import SETTINGS, adamw_factors, clip_gradients, settings_of, without_gradient
from heloco.inner.options import InnerOptions
from heloco.inner.stacked_loss import StackedLoss
from heloco.inner.stacked_optimizer import ADAMW_STATE, StackedOptimizer, copied, state_names
from heloco.inner.table import Table
from heloco.synchronizer import Contribution
from heloco.task import to_device

if TYPE_CHECKING:
    from heloco.inner.stacked import Job


class Stack:
    """At most `size` rounds as one model with a leading dimension: `load`, `begin`, and then `contributions`."""

    def __init__(
        self, model: nn.Module, loss: StackedLoss, options: InnerOptions, size: int, steps: int, device: torch.device
    ) -> None:
        self.loss, self.options, self.size, self.steps, self.device = loss, options, size, steps, device
        # rows that are not read move by AdamW's rule without a gradient, see `without_gradient`; SGD takes the whole table
        has_table = loss.table is not None and options.inner_optimizer != "sgd"
        self.table = Table(loss.table, size, device) if loss.table is not None and has_table else None
        shapes = [(size, *p.shape) for p in model.parameters()]
        if self.table:
            shapes[self.table.index] = (size, 0, *shapes[self.table.index][2:])  # grows with what rounds read

        def zeros(shape: tuple[int, ...], block: Tensor) -> Tensor:
            return torch.zeros(shape, dtype=block.dtype, device=device)

        self.parameters = [zeros(s, p).requires_grad_() for s, p in zip(shapes, model.parameters(), strict=True)]
        self._slices = [[p.detach()[s] for p in self._whole(self.parameters)] for s in range(size)]
        blocks = zip(shapes, model.parameters(), state_names(options, model), strict=True)
        self.states = [{name: zeros(shape, p) for name in names} for shape, p, names in blocks]
        """What the optimizer keeps of each block."""
        self.buffers = [zeros((size, *b.shape), b) for b in model.buffers()]
        self.steps_taken = torch.zeros(size, dtype=torch.float64, device=device)
        self.lr = torch.zeros(steps, size, dtype=torch.float64, device=device)
        self.active = torch.zeros_like(self.lr)
        self.settings = torch.zeros(len(SETTINGS), size, dtype=torch.float64, device=device)
        self.losses = torch.zeros_like(self.lr)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.data: Any = None
        self.rows: Tensor | None = None
        self.busy = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._end: Future[torch.cuda.Event] | None = None
        self._optimizer = StackedOptimizer(options, self.parameters, self.states)

    # ---- load

    @torch.no_grad()
    def load(self, jobs: Sequence["Job"], data: Sequence[Any]) -> None:
        """The starts, data, learning rates and optimizers' state of at most S rounds; slices beyond them stand still."""
        rates, active, settings = np.zeros(self.lr.shape), np.zeros(self.lr.shape), np.zeros(self.settings.shape)
        for s, job in enumerate(jobs):
            round_steps = job.round.inner_steps
            rates[:round_steps, s], active[:round_steps, s], settings[:, s] = job.learning_rates(), 1, settings_of(job.options)
        self.lr.copy_(torch.from_numpy(rates))
        self.active.copy_(torch.from_numpy(active))
        self.settings.copy_(torch.from_numpy(settings))
        self.at.zero_()
        self._load_data(jobs, data)
        self._load_state(jobs)
        if self.buffers:
            for s, job in enumerate(jobs):
                torch._foreach_copy_([b[s] for b in self.buffers], job.round.buffers)

    def _load_data(self, jobs: Sequence["Job"], data: Sequence[Any]) -> None:
        shape = (self.options.accumulate, self.options.batch_size)
        batches = [_by_step(batch, job.round.inner_steps, self.steps, shape) for batch, job in zip(data, jobs, strict=True)]
        fresh = stack_batches([*batches, *batches[-1:] * (self.size - len(batches))])
        self.data = to_device(fresh, self.device) if self.data is None else _overwrite(self.data, fresh)
        if self.table:
            rows = self.table.load(self.data)
            self.rows = rows if self.rows is None else self.rows.copy_(rows)
            self._resize_table()

    def _resize_table(self) -> None:
        assert self.table
        index, rows = self.table.index, self.table.capacity
        if rows > self.parameters[index].shape[1]:
            shape = (self.size, rows, *self.parameters[index].shape[2:])
            self.parameters[index] = self.parameters[index].new_zeros(shape).requires_grad_()
            self.states[index] = {name: old.new_zeros(shape) for name, old in self.states[index].items()}
            self._optimizer = StackedOptimizer(self.options, self.parameters, self.states)
            self._graph = None  # it knew the old ones

    def _load_state(self, jobs: Sequence["Job"]) -> None:
        torch._foreach_zero_([self.steps_taken, *(moment for state in self.states for moment in state.values())])
        for s, job in enumerate(jobs):
            start = job.round.parameters
            torch._foreach_copy_(self._slices[s], self._whole(start))
            if self.table:
                self.table.read(s, start[self.table.index], self.parameters[self.table.index][s])
            if memory := job.round.memory:
                self._load_memory(s, memory)

    def _load_memory(self, s: int, memory: dict[str, Tensor]) -> None:
        """The state that a worker kept, into the slice of its round."""
        step = next((tensor for name, tensor in memory.items() if name.endswith(".step")), None)
        if step is not None:
            self.steps_taken[s] = step
        at = self.table.index if self.table else -1
        ours = [(moment[s], f"{i}.{name}") for i, state in enumerate(self.states) if i != at for name, moment in state.items()]
        if ours:
            torch._foreach_copy_([moment for moment, _ in ours], [memory[name] for _, name in ours])
        if self.table:
            for name, moment in self.states[at].items():
                self.table.read(s, memory[f"{at}.{name}"], moment[s])

    def _whole(self, blocks: Sequence[Tensor]) -> list[Tensor]:
        """The blocks that are put into the stack whole: all but the table."""
        return [block for i, block in enumerate(blocks) if not self.table or i != self.table.index]

    # ---- run

    @property
    def is_recorded(self) -> bool:
        """Whether the step is ready to be run many times; `record` first where it is not, and load again after it."""
        return self.device.type != "cuda" or self._graph is not None

    def record(self) -> None:
        """One step as a CUDA graph. Warming up and recording move the tensors, so they must be loaded again."""
        _launcher(self.device).submit(lambda: None).result()  # nothing may be launched while a graph is recorded
        second_stream = _second_stream(self.device)  # the same for all stacks: cuBLAS keeps 32 MB for every stream it meets
        second_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(second_stream):
            for _ in range(2):
                self.at.zero_()
                self._step()
        torch.cuda.current_stream(self.device).wait_stream(second_stream)
        torch.cuda.empty_cache()  # the graph keeps memory of its own, and takes what warming up had
        self.at.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self._optimizer.finish_recording()
        self._graph = graph

    def begin(self, steps: int) -> None:
        """Runs the steps. On a GPU they go on a stream of their own: the host, and the GPU beside them, can do other things."""
        self.busy = True
        if self._graph is None:
            for _ in range(steps):
                self._step()
            return
        ready = torch.cuda.current_stream(self.device).record_event()
        self._end = _launcher(self.device).submit(self._replay, self._graph, steps, ready)

    def _replay(self, graph: torch.cuda.CUDAGraph, steps: int, ready: torch.cuda.Event) -> torch.cuda.Event:
        second_stream = _second_stream(self.device)
        with torch.cuda.stream(second_stream):
            second_stream.wait_event(ready)
            for _ in range(steps):
                graph.replay()
            end: torch.cuda.Event = second_stream.record_event()
        return end

    def wait(self) -> None:
        """Returns when the steps that were begun are done."""
        if self._end is not None:
            self._end.result().synchronize()
            self._end = None
        self.busy = False

    def _step(self) -> None:
        options = self.options
        buffers_before = copied(self.buffers)
        total = torch.zeros_like(self.losses[0])
        gradients: list[Tensor] = []
        for a in range(options.accumulate):
            batch, rows = (map_tensors(x, lambda t, a=a: t.index_select(0, self.at)[0, :, a]) for x in (self.data, self.rows))
            # a cast of a parameter that was kept from warming up would not be recorded
            with torch.autocast(self.device.type, torch.bfloat16, options.precision == "bf16", cache_enabled=False):
                losses = self.loss(self.parameters, self.buffers, batch, rows) / options.accumulate
            new = torch.autograd.grad(losses.sum(), self.parameters)
            gradients = [g + n for g, n in zip(gradients, new, strict=True)] if gradients else list(new)
            total = total + losses.detach()
        with torch.no_grad():
            self.losses.index_copy_(0, self.at, total.to(self.losses.dtype)[None])
            lr, active = self.lr.index_select(0, self.at)[0], self.active.index_select(0, self.at)[0]
            self.steps_taken += active
            if options.clip:
                gradients = clip_gradients(gradients, options.clip)
            self._optimizer.move(gradients, self.steps_taken, lr, active, self.settings)
            for buffer, before in zip(self.buffers, buffers_before, strict=True):  # rounds that are over keep theirs
                buffer.copy_(torch.where(active.bool().view(-1, *[1] * (buffer.dim() - 1)), buffer, before))
            self.at += 1

    # ---- results

    @torch.no_grad()
    def contributions(self, jobs: Sequence["Job"], data: Sequence[Any]) -> list[Contribution]:
        """Waits for the steps to end, and returns the result of each round."""
        self.wait()
        traces = self.losses.T.tolist()
        idle = self._idle_factors(jobs) if self.table else None
        each = zip(jobs, traces, data, strict=False)
        return [self._contribution(s, job, t[: job.round.inner_steps], d, idle) for s, (job, t, d) in enumerate(each)]

    def _idle_factors(self, jobs: Sequence["Job"]) -> Tensor:
        """AdamW's factors at every step of the rounds, [7, S, steps]: for the rows of the table that a round did not read."""
        round_steps = torch.zeros(self.size, 1, dtype=torch.float64)
        round_steps[: len(jobs), 0] = torch.tensor([job.round.inner_steps for job in jobs])
        steps = torch.arange(1, self.steps + 1, dtype=torch.float64) - round_steps
        steps_taken = self.steps_taken[:, None] + steps.to(self.device)
        return adamw_factors(steps_taken, self.lr.T, self.active.T, self.settings[..., None].expand(-1, -1, self.steps))

    def _contribution(self, s: int, job: "Job", trace: list[float], data: Any, idle: Tensor | None) -> Contribution:
        worker_round = job.round
        pseudo_gradient = list(torch._foreach_sub(self._whole(worker_round.parameters), self._slices[s]))
        memory = self._memory(s) if job.options.keep_state else None
        if self.table:
            at = self.table.index
            assert idle is not None
            end, *moments = self._whole_table(s, job, idle[:, s, : worker_round.inner_steps])
            pseudo_gradient.insert(at, worker_round.parameters[at] - end)
            if memory:
                memory |= zip((f"{at}.{name}" for name in ADAMW_STATE), moments, strict=True)
        return Contribution(
            worker_round.worker,
            worker_round.index,
            worker_round.version,
            pseudo_gradient=pseudo_gradient,
            buffers=[b[s].clone() for b in self.buffers],
            loss=sum(trace) / len(trace),
            last_loss=trace[-1],
            samples=sum(count for _, count in worker_round.spans),
            units=job.task.units(data),
            memory=memory,
        )

    def _whole_table(self, s: int, job: "Job", factors: Tensor) -> tuple[Tensor, ...]:
        """The table and its two moments after the round: the rows that were read, and the others, which had no gradient."""
        assert self.table
        at, memory = self.table.index, job.round.memory
        start, moments = job.round.parameters[at], tuple(self.states[at][name][s] for name in ADAMW_STATE)
        idle: tuple[Tensor, ...]
        if memory:
            first, second = (memory[f"{at}.{name}"] for name in ADAMW_STATE)
            idle = without_gradient(start, first, second, factors)
        else:  # m and v are 0 there
            decay = float(np.prod([1 - lr * job.options.weight_decay for lr in job.learning_rates()]))
            idle = (start * decay, *(start.new_zeros(start.shape) for _ in moments if job.options.keep_state))
        ends = zip(idle, (self.parameters[at][s], *moments), strict=False)
        return tuple(self.table.write(s, end.detach(), into) for into, end in ends)

    def _memory(self, s: int) -> dict[str, Tensor]:
        """The optimizer's state, as `SequentialInner` keeps it; of the table only the rows that were read."""
        names = [f"{i}.{name}" for i, state in enumerate(self.states) for name in state]
        memory = dict(zip(names, copied([moment[s] for state in self.states for moment in state.values()]), strict=True))
        step = self.steps_taken[s].float()  # as torch's fused AdamW wants it
        return memory | {f"{i}.step": step for i, state in enumerate(self.states) if ADAMW_STATE[0] in state}


@functools.cache
def _launcher(_device: torch.device) -> ThreadPoolExecutor:
    """The thread that launches graphs. A launch waits while the GPU's queue is full, and the host has other things to do."""
    return ThreadPoolExecutor(1, thread_name_prefix="launcher")


@functools.cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def map_tensors(batch: Any, function: Any) -> Any:
    if batch is None or isinstance(batch, Tensor):
        return None if batch is None else function(batch)
    if isinstance(batch, dict):
        return {key: map_tensors(value, function) for key, value in batch.items()}
    return type(batch)(map_tensors(value, function) for value in batch)


def _by_step(batch: Any, round_steps: int, steps: int, shape: tuple[int, int]) -> Any:
    """Samples as [steps, accumulate, batch_size, …]; a shorter round's last step stands in for those it does not have."""

    def by_step(t: Tensor) -> Tensor:
        t = t.view(round_steps, *shape, *t.shape[1:])
        return t if round_steps == steps else torch.cat([t, t[-1:].expand(steps - round_steps, *t.shape[1:])])

    return map_tensors(batch, by_step)


def stack_batches(batches: Sequence[Any]) -> Any:
    """[steps, S, accumulate, batch_size, …]"""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.stack(list(batches), dim=1)
    if isinstance(first, dict):
        return {key: stack_batches([b[key] for b in batches]) for key in first}
    return type(first)(stack_batches(parts) for parts in zip(*batches, strict=True))


def _overwrite(old: Any, new: Any) -> Any:
    if isinstance(old, Tensor):
        return old.copy_(new, non_blocking=True)
    if isinstance(old, dict):
        return {key: _overwrite(value, new[key]) for key, value in old.items()}
    return type(old)(_overwrite(a, b) for a, b in zip(old, new, strict=True))
