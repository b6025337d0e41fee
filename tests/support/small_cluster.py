"""Helpers for tests of real runs: a service with a tiny model, and machines that a test controls."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import heloco
from heloco.cluster.protocol.messages import (
    Acknowledgement,
    ContributionReport,
    Joined,
    JoinRequest,
    RoundAnswer,
    RoundKey,
    Ticket,
    Wait,
)
from heloco.cluster.server.open_run import external_run
from heloco.cluster.server.service import Service
from heloco.run import RunConfig, resolve, with_fields
from heloco.wire.layout import Layout
from support.local_link import LocalLink

NAMES = ["weight", "bias", "mean", "count"]
NO_DIGEST = "0" * 32


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


def report(**values: Any) -> ContributionReport:
    return ContributionReport(**{"loss": 1.5, "last_loss": 1.25, "samples": 8, "units": 80, **values})


@dataclass
class Clock:
    """A clock that a test sets."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def config(**settings: Any) -> RunConfig:
    values = {"task": "external", "paces": [1.0, 1.0, 1.0], "arrivals": 20, "inner_steps": 2, "batch_size": 2, "device": "cpu"}
    return resolve(with_fields(RunConfig(), {**values, "checkpoint_every": 4, **settings}))


def opened(folder: Path, clock: Clock | None = None, **settings: Any) -> Service:
    """A service for the run in the folder, or for a new run that has its model."""
    service = external_run(config(**settings), folder, clock=clock or Clock())
    if service.state.run is None:
        link = LocalLink(service)
        layout = Layout.from_tensors(model())
        bringer = link.join("bringer", returning=None, layout=layout).ticket
        link.send_model(bringer, layout, model(), NAMES)
        service.members.leave(bringer, "it brought the model")
    return service


def join_request(name: str, **about: Any) -> JoinRequest:
    return JoinRequest(**{"name": name, "version": heloco.__version__, **about})


@dataclass
class Hand:
    """A machine that a test controls."""

    service: Service
    name: str
    returning: Ticket | None = None
    ticket: Ticket = field(init=False)
    key: RoundKey | None = None

    def __post_init__(self) -> None:
        self.join()

    def join(self) -> Joined:
        """Joins the run, or comes back as the same machine."""
        join_answer = self.service.members.join(join_request(self.name), self.returning)
        self.ticket = self.returning = join_answer.ticket
        return join_answer

    @property
    def id(self) -> str:
        return self.ticket.machine

    @property
    def link(self) -> LocalLink:
        return LocalLink(self.service)

    def take(self) -> RoundAnswer:
        answer = self.service.rounds.next(self.ticket)
        self.key = None if isinstance(answer, Wait) else answer.key
        return answer

    def hand_in(self, tensors: dict[str, Tensor], key: RoundKey | None = None, **about: Any) -> Acknowledgement:
        key = key or self.key
        assert key is not None and self.service.state.run is not None
        return self.link.hand_in(self.ticket, key, self.service.state.run.contribution_layout, tensors, report(**about))

    def work(self, seed: int) -> Acknowledgement:
        self.take()
        return self.hand_in(delta(seed))

    def beat(self, steps: int = 0) -> Any:
        return self.service.members.beat(self.ticket, steps)

    def leave(self, text: str = "it left") -> None:
        self.service.members.leave(self.ticket, text)

    def abandon(self, text: str = "it gave up") -> None:
        self.service.rounds.abandon(self.ticket, text)
