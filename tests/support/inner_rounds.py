"""Rounds of the inner loop over a small regression, and the loop in plain torch."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heloco.inner import InnerOptions
from heloco.synchronizer import Round
from heloco.task import Task
from heloco.task.datasets import DatasetTask


def seeded(make: Any, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def task_of(model: nn.Module, dtype: torch.dtype = torch.float32, samples: int = 64) -> DatasetTask:
    """Two shards of a regression from 4 numbers to 2."""
    draw = torch.Generator().manual_seed(3)
    shards = {}
    for name in ("a", "b"):
        x = torch.randn(samples, 4, generator=draw, dtype=dtype)
        y = torch.randn(samples, 2, generator=draw, dtype=dtype)
        shards[name] = list(zip(x, y, strict=True))
    return DatasetTask(model.to(dtype), lambda m, batch: F.mse_loss(m(batch[0]), batch[1]), shards)


def mlp() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))


def with_dropout() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)))


def with_norm() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))


def round_for(
    task: Task,
    options: InnerOptions,
    *,
    worker: int = 0,
    index: int = 0,
    shard: int = 0,
    steps: int = 5,
    spans: Sequence[tuple[int, int]] | None = None,
    shard_steps: int = 0,
    progress: float = 0.0,
    memory: dict[str, Tensor] | None = None,
) -> Round:
    model = task.build_model()
    spans = ((shard_steps * options.windows_per_step, steps * options.windows_per_step),) if spans is None else tuple(spans)
    parameters = [p.detach().clone() + 0.01 * index for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    return Round(worker, index, 0, shard, tuple(spans), steps, shard_steps, progress, parameters, buffers, memory)


def cosine(options: InnerOptions, position: float) -> float:
    """The cosine without warm-up, once more."""
    fraction = min(1.0, position / options.schedule_steps)
    return options.lr_min + (options.lr - options.lr_min) * 0.5 * (1 + math.cos(math.pi * fraction))


class Plain:
    """The inner loop in plain torch, with one AdamW for all its rounds."""

    def __init__(self, task: Task, options: InnerOptions) -> None:
        self.task, self.options = task, options
        self.model = task.build_model()
        self.adam = torch.optim.AdamW(
            self.model.parameters(),
            betas=(options.beta1, options.beta2),
            eps=options.adam_eps,
            weight_decay=options.weight_decay,
            fused=True,
        )

    def run(self, worker_round: Round, positions: Sequence[int], base: float) -> tuple[list[Tensor], list[float]]:
        """(Δ, the losses); `base` is where the round stands on the cosine."""
        with torch.no_grad():
            for p, start in zip(self.model.parameters(), worker_round.parameters, strict=True):
                p.copy_(start)
        losses = []
        for h, batch in enumerate(np.array(positions).reshape(worker_round.inner_steps, self.options.batch_size)):
            self.adam.param_groups[0]["lr"] = cosine(self.options, base + h)
            self.adam.zero_grad()
            loss = self.task.loss(self.model, self.task.batch(worker_round.shard, batch))
            loss.backward()
            if self.options.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
            self.adam.step()
            losses.append(loss.item())
        return [start - p.detach() for start, p in zip(worker_round.parameters, self.model.parameters(), strict=True)], losses


OPTIONS = InnerOptions(batch_size=3, lr=0.05, lr_min=0.001, schedule_steps=12)
