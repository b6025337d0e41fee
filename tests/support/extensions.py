"""An outer rule, a weight and a task as a user or an installed package adds them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import heloco as package
from heloco.policy import ArrivalCounts
from heloco.run import RunConfig

Block = tuple[Tensor, Tensor]


def sign_step(theta: Tensor, m: Tensor, delta: Tensor, rho: float, *, lr: float = 0.01, momentum: float = 0.5) -> Block:
    """Signed momentum."""
    m = momentum * m + (1 - momentum) * rho * delta
    return theta - lr * m.sign(), m


@dataclass(frozen=True)
class Fading:
    power: float = 1.0

    def __call__(self, counts: ArrivalCounts) -> float:
        return float((1 - counts.progress / 2) ** self.power)


def build_sums(config: RunConfig) -> package.Task:
    """A task of one's own: whether a line learns to add three numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(config.run.seed)
        model, numbers = torch.nn.Linear(3, 1), torch.randn(64, 3)
    data = [(x, x.sum(0, keepdim=True)) for x in numbers]

    def loss(model: Any, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().mean()

    return package.DatasetTask(model, loss, {"a": data[:32], "b": data[32:]}, validation={"all": data[::4]}, seed=config.run.seed)


def simulated(**settings: Any) -> Any:
    """A run over half a second of images."""
    values = {
        "task": "images",
        "paces": [1, 1, 4],
        "arrivals": 6,
        "inner_steps": 2,
        "batch_size": 2,
        "eval_every": 0,
        "recipe": "plain",
    }
    return package.simulate(**{**values, **settings})
