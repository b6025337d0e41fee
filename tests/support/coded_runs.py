"""Served runs whose contributions travel as codes, and machines that hand in what a test says, each with a client."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heloco.cluster.client.run_client import RunClient
from heloco.cluster.protocol.messages import Acknowledgement, Ticket
from heloco.cluster.server.open_run import external_run
from heloco.cluster.server.service import Service
from heloco.methods import METHODS
from heloco.outer.kernels.windows import dense
from heloco.wire import blocks
from heloco.wire.encoder import ContributionEncoder
from heloco.wire.formats import find_format, read_block
from heloco.wire.layout import Layout
from heloco.wire.link_options import LinkOptions
from support.local_link import LocalLink
from support.small_cluster import Clock, config, report

SHAPES = ((20, 300), (40,), (6, 8))
"""A matrix of which every format makes codes, and two blocks that travel as they are."""


def model() -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(0)
    parameters = [torch.randn(shape, generator=numbers) for shape in SHAPES]
    return blocks.name_start(parameters, [torch.zeros(3)])


def delta(seed: int, size: float = 0.1) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=numbers) * size for shape in SHAPES]


def opened(folder: Path, clock: Clock | None = None, **settings: Any) -> Service:
    """A service for the run in the folder, or for a new run that has its model."""
    service = external_run(config(**{"wire": "int4", **settings}), folder, clock=clock or Clock())
    if service.state.run is None:
        link = LocalLink(service)
        layout = Layout.from_tensors(model())
        bringer = link.join("bringer", returning=None, layout=layout).ticket
        link.send_model(bringer, layout, model(), ["matrix", "vector", "narrow", "mean"])
        service.members.leave(bringer, "it brought the model")
    return service


class Client:
    """A machine's process: the real client over a link inside the test, which hands in what the test says."""

    def __init__(self, link: Any, name: str = "m", returning: Ticket | None = None) -> None:
        self.client = RunClient(link, name, returning=returning, tell=lambda _: None, patience_s=5.0)
        self.client.join()

    @property
    def ticket(self) -> Ticket:
        return self.client.joined.ticket

    def take(self) -> tuple[int, int, int]:
        taken_round = self.client.take()
        assert taken_round is not None
        self.key = taken_round.key
        return self.key

    def hand_in(self, pseudo_gradient: list[Tensor]) -> Acknowledgement:
        tensors = blocks.name_contribution([block.clone() for block in pseudo_gradient], [torch.ones(3)])
        return self.client.hand_in(self.key, tensors, report())

    def work(self, seed: int, size: float = 0.1) -> Acknowledgement:
        self.take()
        return self.hand_in(delta(seed, size))


@contextlib.contextmanager
def joined(service: Service, name: str = "m", returning: Ticket | None = None, link: Any = None) -> Iterator[Client]:
    client = Client(link or LocalLink(service), name, returning)
    try:
        yield client
    finally:
        client.client.leave()


class ByHand:
    """What the run must come to: contributions that are encoded and decoded here, and the outer rule."""

    def __init__(self, workers: int = 3, **options: Any) -> None:
        self.options = LinkOptions(**{"wire": "int4", **options})
        self.format = find_format(self.options.wire)
        self.parameters = [torch.nn.Parameter(tensor) for tensor in blocks.blocks_of(blocks.PARAMETER, model())]
        self.outer = METHODS["heloco-ramp"].build(self.parameters, workers=workers)

    def encoder(self, worker: int) -> ContributionEncoder:
        """With an empty residual, as of a new process."""
        return ContributionEncoder(self.format, self.options, seed=0, worker=worker)

    def apply(self, encoder: ContributionEncoder, round_index: int, seed: int, *, last_accepted: int, weight: float) -> None:
        codes = encoder.encode(round_index, delta(seed), last_accepted=last_accepted)
        decoded = [dense(read_block(self.format, blocks.PSEUDO_GRADIENT, i, codes, shape)) for i, shape in enumerate(SHAPES)]
        self.outer.step(weight=weight, pseudo_gradients=decoded)

    def equals(self, service: Service) -> bool:
        assert service.state.run is not None
        ours = service.state.run.synchronizer.thetas
        return all(torch.equal(a, b) for a, b in zip(ours, self.parameters, strict=True))
