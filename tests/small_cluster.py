"""For tests of real runs: a service over a model of a few numbers, and machines that hand in what they are told to."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heloco.engine.cluster.link import LocalLink
from heloco.engine.cluster.service import Service
from heloco.engine.cluster.serving import external_run
from heloco.run import RunConfig, resolve, with_fields
from heloco.run.tensors import Layout

NAMES = ["weight", "bias", "mean", "count"]


def model() -> dict[str, Tensor]:
    """Two parameters and two buffers, one of them a counter."""
    numbers = torch.Generator().manual_seed(0)
    return {
        "parameter.0": torch.randn(5, 3, generator=numbers),
        "parameter.1": torch.randn(4, generator=numbers),
        "buffer.0": torch.zeros(3),
        "buffer.1": torch.zeros((), dtype=torch.int64),
    }


def delta(seed: int, size: float = 0.1) -> dict[str, Tensor]:
    """A contribution's tensors."""
    numbers = torch.Generator().manual_seed(seed)
    return {
        "pseudo_gradient.0": torch.randn(5, 3, generator=numbers) * size,
        "pseudo_gradient.1": torch.randn(4, generator=numbers) * size,
        "buffer.0": torch.rand(3, generator=numbers),
        "buffer.1": torch.tensor(seed),
    }


REPORT = {"loss": 1.5, "last_loss": 1.25, "samples": 8, "units": 80}


@dataclass
class Clock:
    """Time that passes when a test says so."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def config(**settings: Any) -> RunConfig:
    values = {"task": "external", "paces": [1.0, 1.0, 1.0], "arrivals": 20, "inner_steps": 2, "batch_size": 2, "device": "cpu"}
    return resolve(with_fields(RunConfig(), {**values, "checkpoint_every": 4, **settings}))


def opened(folder: Path, clock: Clock | None = None, **settings: Any) -> Service:
    """A service over the folder's run, or over a new one that has its model."""
    service = external_run(config(**settings), folder)
    if clock is not None:
        service._clock = clock
        service._zero_s = clock.now - (service.recorded.time_s if service.recorded else 0.0)
        service._ticked_s = service.now_s
    if service.recorded is None:
        link = LocalLink(service)
        layout = Layout.of(model())
        bringer = link.join("bringer", returning=None, pace_s=None, layout=layout)["machine"]
        link.send_model(bringer, layout, model(), NAMES)
        service.leave(bringer)
    return service


@dataclass
class Hand:
    """A machine that does what a test says."""

    service: Service
    name: str
    machine: str = field(init=False)
    key: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        self.link = LocalLink(self.service)
        self.machine = self.service.join(self.name)["machine"]

    def take(self) -> dict[str, Any]:
        answer = self.service.next_round(self.machine)
        self.key = None if "wait" in answer else (answer["worker"], answer["round"], answer["version"])
        return answer

    def hand_in(self, tensors: dict[str, Tensor], key: tuple[int, int, int] | None = None, **report: Any) -> dict[str, Any]:
        key = key or self.key
        assert key is not None and self.service.recorded is not None
        return self.link.hand_in(self.machine, key, self.service.recorded.layout, tensors, {**REPORT, **report})

    def work(self, seed: int) -> dict[str, Any]:
        self.take()
        return self.hand_in(delta(seed))
