"""A gateway over a small run on loopback, and machines that say what they are told to."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import torch
from torch import Tensor

from heloco.cluster.client.worker import Worker
from heloco.cluster.gateway.https_link import HttpsLink
from heloco.cluster.gateway.https_server import GatewayServer
from heloco.cluster.protocol.link import digest_of
from heloco.cluster.protocol.messages import Acknowledgement, ContributionReport, Right, RoundKey, Ticket
from heloco.cluster.server.process import ListenConfig, RunHost
from heloco.cluster.server.service import Service
from heloco.records.events import Event
from heloco.records.journal_reader import FOLDER, read_events
from heloco.run import RunConfig
from heloco.task import Task
from heloco.wire.layout import Layout, pieces

SETTINGS: dict[str, Any] = {
    "preset": "1m", "width": 32, "layers": 1, "heads": 2, "context": 16, "eval_windows": 4, "inner_steps": 3, "arrivals": 30,
    "batch_size": 2, "lr": 0.003, "paces": [1.0, 1.0], "method": "heloco-ramp", "checkpoint_every": 10, "eval_every": 10,
    "beat_s": 0.2, "device": "cpu",
}  # fmt: skip
NUMBERS = {"loss": 1.0, "last_loss": 1.0, "samples": 6, "units": 96}
NOBODY = Ticket(machine="m#1", secret="x")
"""A machine that no run knows."""


REPORT = ContributionReport(**NUMBERS)


class Served:
    """A run and its gateway."""

    def __init__(self, service: Service, folder: Path, page: Any = None, **listen: Any) -> None:
        self.service, self.folder = service, folder
        PAGES[str(folder)] = page
        pages = f"{__name__}:page_of" if page is not None else ""
        self.host = RunHost(service, ListenConfig("127.0.0.1", 0, ("localhost",), page=pages, **listen))
        self.server: GatewayServer = self.host.gateway  # type: ignore[assignment]
        self.links: list[HttpsLink] = []

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def run(self) -> str:
        return self.service.state.run_id

    def secret(self, right: Right = "worker") -> str:
        assert self.host.tokens is not None
        return self.host.tokens.first(right).secret

    def other_link(self) -> HttpsLink:
        """Of somebody who knows the run already."""
        link = self.link()
        link.describe()
        return link

    def link(
        self, port: int | None = None, token: str | None = None, timeout_s: float = 10.0, right: Right = "worker"
    ) -> HttpsLink:
        address = f"https://127.0.0.1:{port or self.port}"
        self.links.append(HttpsLink(address, token or self.host.token(right), timeout_s=timeout_s))
        return self.links[-1]

    def raw(self, secret: str | None = None, ticket: Ticket | None = None) -> Any:
        """A plain HTTPS client, of a machine where it has a ticket."""
        headers = {"authorization": f"Bearer {self.secret() if secret is None else secret}"}
        if ticket is not None:
            headers |= {"heloco-machine": f"{ticket.machine} {ticket.secret}", "heloco-run": self.run}
        return httpx.Client(base_url=self.server.address, verify=False, headers=headers, trust_env=False, timeout=20)

    def digest(self) -> str:
        assert self.service.state.run is not None
        return self.service.state.run.digest()

    def events(self) -> list[type[Event]]:
        return [type(event) for event, _ in read_events(self.folder / FOLDER)]

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.host.close()


PAGES: dict[str, Any] = {}


class Machine:
    """One that does not train: it hands in what the test says."""

    def __init__(self, link: Any, name: str = "m") -> None:
        self.link = link
        join_answer = link.join(name, returning=None, layout=None)
        self.ticket, self.layout = join_answer.ticket, Layout(join_answer.start_layout)
        self.contribution = Layout(join_answer.contribution_layout)
        self.start_digest = ""

    def take(self) -> RoundKey:
        answer = self.link.next_round(self.ticket, 5)
        self.start_digest = answer.start_digest
        return answer.key

    def fetch(self, key: RoundKey, link: Any = None) -> dict[str, Tensor]:
        return (link or self.link).fetch(self.ticket, key, self.layout, self.start_digest)

    def delta(self, seed: int = 0) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {name: _numbers(name, dtype, shape, generator) for name, dtype, shape in self.contribution.entries}

    def content(self, delta: dict[str, Tensor]) -> bytes:
        return b"".join(pieces(self.contribution, delta))

    def commit(self, key: RoundKey, delta: dict[str, Tensor]) -> dict[str, Any]:
        """What says that a contribution has arrived whole."""
        return {**key._asdict(), **NUMBERS, "digest": digest_of(self.contribution, delta)}

    def hand_in(self, key: RoundKey, delta: dict[str, Tensor]) -> Acknowledgement:
        return self.link.hand_in(self.ticket, key, self.contribution, delta, REPORT)


def _numbers(name: str, dtype: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Small numbers, codes that stand for such, or scales above 0."""
    if dtype == "U8":
        return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    numbers = torch.randn(shape, generator=generator) * 1e-3
    return numbers.abs() + 1e-6 if name.startswith("scale.") else numbers


Serve = Callable[..., Served]


def train(tiny: tuple[Task, RunConfig], link: Any, name: str, **options: Any) -> str:
    """A machine that does train takes part until the run ends; returns what it says then."""
    return Worker(*tiny, tell=lambda _: None).run(link, name, link.describe().run, **options)


def page_of(folder: Path, _: Any) -> Any:
    return PAGES[str(folder)]
