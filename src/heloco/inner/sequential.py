"""The inner loop for any `nn.Module`, one round after the other: H steps of the inner optimizer, then Δ = start − end.

A round is a function of what it was handed: its randomness comes from the run's seed, the worker and the round, so a round that
is run again (after a crash, on another machine of the same kind) gives the same contribution.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import closing

import numpy as np
import torch
from torch import Tensor, nn

from heloco.errors import UserError
from heloco.inner.batches import AHEAD, batches_of
from heloco.inner.optimizers import InnerOptimizer, make_optimizer
from heloco.inner.options import InnerOptions, learning_rate
from heloco.inner.repeated_blocks import compile_model, recompute_blocks, repeated_blocks, undo_compilation
from heloco.inner.seeding import seeded
from heloco.seeds import derive
from heloco.synchronizer import Contribution, Round
from heloco.task import Task, to_device
from heloco.task.rounding import kernels_serve, rounded_products


class SequentialInner:
    """Trains rounds one after the other, with any task's model. `before_step` is called before each inner step. What it raises
    ends the round (a stop request, for one). On a GPU the operands of float32 products are rounded to TF32."""

    def __init__(
        self,
        task: Task,
        options: InnerOptions,
        *,
        seed: int,
        device: torch.device | str = "cpu",
        before_step: Callable[[], None] | None = None,
    ) -> None:
        self.task = task
        self.options = options
        self.seed = seed
        self.device = torch.device(device)
        self.before_step = before_step
        self.model = task.build_model().to(self.device)
        self._parameters = list(self.model.parameters())
        self._buffers = list(self.model.buffers())
        if options.recompute and not recompute_blocks(self.model):
            raise UserError("recompute is set, but the model has no list of blocks of one kind: leave it out.")
        is_worthwhile = kernels_serve(self.device) and bool(repeated_blocks(self.model))
        self.is_compiled = is_worthwhile if options.compile is None else options.compile
        """Whether the model computes through torch.compile."""
        if self.is_compiled:
            compile_model(self.model)

    def run(self, rounds: Sequence[Round]) -> list[Contribution]:
        """Computes the rounds one after the other. Returns a contribution for each, in the same order."""
        return [self._run(each) for each in rounds]

    def _run(self, worker_round: Round) -> Contribution:
        if not self.is_compiled:
            return self._compute(worker_round)
        from torch._dynamo.exc import TorchDynamoException

        try:
            return self._compute(worker_round)
        except TorchDynamoException as error:
            self._give_up_compilation(error)
        return self._compute(worker_round)

    def _give_up_compilation(self, error: Exception) -> None:
        """Without a C++ compiler on a CPU, for one."""
        reason = " ".join([line for line in str(error).splitlines() if line.strip()][:2])
        if self.options.compile:
            raise UserError(
                f"compile is set, but torch.compile cannot compile this model here ({reason}): leave it out."
            ) from error
        print(f"heloco: torch.compile cannot compile this model ({reason}). It is computed without.", file=sys.stderr, flush=True)
        undo_compilation(self.model)
        self.is_compiled = False

    def _compute(self, worker_round: Round) -> Contribution:
        self._load(worker_round)
        optimizer = make_optimizer(self.options, self.model)
        optimizer.load(worker_round.memory or {})
        positions = np.concatenate([np.arange(start, start + count) for start, count in worker_round.spans])
        steps = positions.reshape(worker_round.inner_steps, self.options.accumulate, self.options.batch_size)
        base = self.options.first_position(worker_round.shard_steps, worker_round.progress)
        losses, units = [], 0
        seed = derive(self.seed, "round", worker_round.worker, worker_round.index)
        ahead = AHEAD.get(self.device.type, 0)
        all_batches = closing(batches_of(self.task, worker_round.shard, list(steps), ahead=ahead))
        with rounded_products(self.device), seeded(seed, self.device), all_batches as steps_batches:
            for h, batches in enumerate(steps_batches):
                self._merge(worker_round, h)
                if self.before_step is not None:
                    self.before_step()
                optimizer.set_lr(learning_rate(self.options, base + h))
                losses.append(self.step(optimizer, batches))
                units += sum(map(self.task.units, batches))
            self._merge(worker_round, len(steps))
        trace = torch.stack(losses).tolist()
        return Contribution(
            worker_round.worker,
            worker_round.index,
            worker_round.version,
            pseudo_gradient=[_difference(s, p.detach()) for s, p in zip(worker_round.parameters, self._parameters, strict=True)],
            buffers=[b.detach().clone() for b in self._buffers],
            loss=sum(trace) / len(trace),
            last_loss=trace[-1],
            samples=len(positions),
            units=units,
            memory=optimizer.memory() if self.options.keep_state else None,
            end=[p.detach().clone() for p in self._parameters] if worker_round.overlap else None,
        )

    @torch.no_grad()
    def _load(self, worker_round: Round) -> None:
        self.model.train()
        overlap = worker_round.overlap
        first = overlap.parameters if overlap and overlap.parameters is not None else worker_round.parameters
        for parameter, start in zip(self._parameters, first, strict=True):
            parameter.copy_(start)
            parameter.grad = None
        for ours, theirs in zip(self._buffers, worker_round.buffers, strict=True):
            ours.copy_(theirs)

    @torch.no_grad()
    def _merge(self, worker_round: Round, step: int) -> None:
        """Merges the blocks of the start that arrive before this step."""
        overlap = worker_round.overlap
        if overlap is None or overlap.parameters is None:
            return
        for parameter, start, at in zip(self._parameters, worker_round.parameters, overlap.merge_steps, strict=True):
            if at == step:
                parameter.copy_(merge(parameter, start, overlap.share))

    def step(self, optimizer: InnerOptimizer, batches: Sequence[object]) -> Tensor:
        """One inner step over the micro-batches; returns their mean loss, still on the device."""
        total = torch.zeros((), device=self.device)
        for batch in batches:
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.precision == "bf16"):
                loss = self.task.loss(self.model, to_device(batch, self.device)) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if self.options.clip:
            nn.utils.clip_grad_norm_(self._parameters, self.options.clip)
        optimizer.step()
        return total


def _difference(start: Tensor, end: Tensor) -> Tensor:
    """Δ of a block, at least in float32: the difference of two numbers in half precision has more digits than they have."""
    dtype = torch.promote_types(start.dtype, torch.float32)
    return start.to(dtype) - end.to(dtype)


def merge(parameter: Tensor, start: Tensor, share: float) -> Tensor:
    """share · parameter + (1 − share) · start, of one block."""
    return parameter * share + start * (1 - share)
