"""Training loops of one's own on real services: small models, runs whose model a loop brings, links that keep what they carry."""

import contextlib
import json
import re
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heloco.cluster.protocol.messages import Acknowledgement, ContributionReport, RoundKey, Ticket
from heloco.cluster.server.open_run import external_run
from heloco.cluster.server.service import Service
from heloco.records.events import Abandon
from heloco.records.journal_reader import FOLDER, read_events
from heloco.run import RunConfig, resolve, with_fields
from support.local_link import LocalLink
from support.repository import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
DEADLINE_S = 60.0


def config(**fields: Any) -> RunConfig:
    defaults = {"task": "external", "inner_steps": 3, "arrivals": 4, "paces": [1.0], "method": "heloco-ramp", "device": "cpu"}
    return resolve(with_fields(RunConfig(), defaults | fields))


@contextlib.contextmanager
def external_runs(place: Path) -> Iterator[Callable[..., Service]]:
    """`start(folder, **fields)` begins a run in a folder at this place, or goes on with it. All of them are closed in the end."""
    services: list[Service] = []

    def start(folder: str = "run", **fields: Any) -> Service:
        services.append(external_run(config(**fields), place / folder))
        return services[-1]

    try:
        yield start
    finally:
        for service in services:
            service.close()


class Heard(LocalLink):
    """Keeps what it carried."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.contributions: dict[RoundKey, list[Tensor]] = {}
        self.reports: dict[RoundKey, ContributionReport] = {}
        self.starts: dict[RoundKey, list[Tensor]] = {}
        self.memory: set[int] = set()
        """Where the starts lie."""
        self.narrow: set[str] = set()
        """Blocks whose start is in bfloat16, so that their pseudo-gradient needs memory of its own."""

    def fetch(self, ticket: Ticket, key: RoundKey, layout: Any, digest: str) -> dict[str, Tensor]:
        start = super().fetch(ticket, key, layout, digest)
        self.starts[key] = [t.clone() for name, t in start.items() if name.startswith("parameter.")]
        self.memory |= {t.untyped_storage().data_ptr() for t in start.values()}
        self.narrow |= {name.replace("parameter", "pseudo_gradient") for name, t in start.items() if t.dtype is torch.bfloat16}
        return start

    def hand_in(self, ticket: Ticket, key: RoundKey, layout: Any, tensors: Any, report: ContributionReport) -> Acknowledgement:
        addresses = {t.untyped_storage().data_ptr() for name, t in tensors.items() if name not in self.narrow}
        assert addresses <= self.memory, "another copy of the model"
        self.contributions[key] = [t.clone() for name, t in tensors.items() if name.startswith("pseudo_gradient.")]
        self.reports[key] = report
        return super().hand_in(ticket, key, layout, tensors, report)


def tape(service: Service) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (service.state.folder / "tape.jsonl").read_text().splitlines()]


def abandoned(service: Service) -> list[Abandon]:
    return [event for event, _ in read_events(service.state.folder / FOLDER) if isinstance(event, Abandon)]


def outer(service: Service) -> list[Tensor]:
    assert service.state.run is not None
    return [p.detach() for p in service.state.run.synchronizer.parameters]


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def net(seed: int = 0, width: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))


def batches(seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(10_000):
        x = torch.randn(8, 3, generator=generator)
        yield x, x.sum(1, keepdim=True).sin()
    raise AssertionError("the loop did not end")


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def adam(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def quiet(_: str) -> None:
    pass


def example(name: str, without_heloco: bool = False) -> Any:
    """An example as a module; or the script as it was before the marked lines came."""
    text = (EXAMPLES / f"{name}.py").read_text()
    if without_heloco:
        text = text.replace("with heloco.join(address, model, optimizer) as run:  # heloco", "if True:")
        text = "".join(line for line in text.splitlines(keepends=True) if "# heloco" not in line)
        assert not re.search(r"heloco\.\w+\(", text)
    module = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
    return module


def in_threads(*work: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(work)

    def run(i: int) -> None:
        try:
            results[i] = work[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "a loop hangs"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
