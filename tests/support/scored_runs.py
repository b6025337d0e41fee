"""Served runs with a model of two blocks, whose score tells every outer step from every other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from heloco.cluster.server.open_run import new_run, old_run
from heloco.cluster.server.service import Service
from heloco.run import RunConfig, RunFolder
from heloco.task.datasets import DatasetTask
from support.small_cluster import Clock, Hand, config

SIZES = (5, 4)


class TwoBlocks(nn.Module):
    """Scored by its sums, which tell every outer step from every other."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.zeros(size)) for size in SIZES)


def scores_of(model: nn.Module) -> dict[str, dict[str, float]]:
    return {"all": {"loss": sum(p.detach().double().sum().item() for p in model.parameters())}}


def task(evaluate: Callable[[nn.Module], Any] = scores_of) -> DatasetTask:
    return DatasetTask(TwoBlocks(), lambda model, _: model.a.sum(), {"x": [0] * 64}, evaluate=evaluate)


def settings(**changed: Any) -> RunConfig:
    return config(task="images", **{"paces": [1.0], "arrivals": 40, "eval_every": 2, "checkpoint_every": 0, **changed})


def delta(seed: int) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return {f"pseudo_gradient.{i}": torch.randn(size, generator=numbers) for i, size in enumerate(SIZES)}


def served(folder: Path, task: DatasetTask, **changed: Any) -> Service:
    if folder.exists():
        return old_run(task, RunFolder.open(folder), RunFolder.open(folder).config(), clock=Clock())
    return new_run(task, settings(**changed), folder, clock=Clock())


def contribute(service: Service, count: int, first: int = 0) -> None:
    hand = Hand(service, f"m{first}")
    for seed in range(first, first + count):
        hand.take()
        hand.hand_in(delta(seed))
    hand.leave()
