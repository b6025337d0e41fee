"""The processes of a run that meets faults: the synchronizer with its gateway, and workers that do as they are ordered to."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

import heloco.engine.cluster.gateway.server  # noqa: F401 - so that children need not import it
from heloco.engine.cluster.gateway.client import HttpsLink
from heloco.engine.cluster.host import Door, Host, Recipe
from heloco.engine.cluster.link import digest_of
from heloco.engine.cluster.worker import Worker, task_of
from heloco.errors import UserError


def serve(folder: str, config: str, port: int, state: str) -> None:
    """Until SIGTERM, or until it cannot go on; `state` is a file with how it is doing."""
    torch.set_num_threads(1)
    over: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: over.append(number))
    host = None
    try:
        host = Host(recipe_for(folder, config, port))
        while not over and not host.service.failed:
            write(state, {"token": host.token, **host.status()})
            time.sleep(0.02)
        write(state, {"token": host.token, **host.status()})
    except (UserError, OSError) as error:
        print(f"synchronizer: {error}", file=sys.stderr, flush=True)
    finally:
        if host is not None:
            with contextlib.suppress(UserError, OSError):
                host.close()


def recipe_for(folder: str, config: str, port: int) -> Recipe:
    begun = (Path(folder) / "config.toml").exists()
    return Recipe(folder, "" if begun else config, config if begun else "", door=Door("127.0.0.1", port))


def write(path: str, content: dict[str, Any]) -> None:
    Path(f"{path}.new").write_text(json.dumps(content))
    Path(f"{path}.new").replace(path)


# ---- workers


class Papers:
    """A worker's orders come in a file, and the acknowledgements it gets go to another."""

    def __init__(self, folder: str, number: int) -> None:
        self.orders = Path(folder) / f"orders-{number}"
        self._acks = os.open(Path(folder) / f"acks-{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def order(self, point: str) -> str:
        """What is to be done at this point, once: kill, which is done here, corrupt or double."""
        try:
            found = json.loads(self.orders.read_text())
        except (OSError, ValueError):
            return ""
        if found["point"] != point:
            return ""
        self.orders.unlink()
        if found["do"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return str(found["do"])

    def got(self, ack: Any) -> None:
        os.write(self._acks, f"{json.dumps(ack)}\n".encode())


class Obedient:
    """Before a link of any kind: does as it is ordered to when tensors go either way."""

    papers: Papers
    flips = False
    """One bit of what is sent is not as its digest says."""

    def fetch(self, machine: str, key: Any, layout: Any) -> Any:
        self.papers.order("fetch")
        return super().fetch(machine, key, layout)  # type: ignore[misc]

    def hand_in(self, *given: Any) -> Any:
        if self.papers.order("hand in") == "corrupt":
            self.flips = True
            with contextlib.suppress(Exception):
                self._deliver(*given)
            self.flips = False
        ack = self._deliver(*given)
        if self.papers.order("handed in") == "double":
            again = self._deliver(*given)
            assert again == ack, (again, ack)
        return ack

    def _deliver(self, *given: Any) -> Any:
        ack = super().hand_in(*given)  # type: ignore[misc]
        self.papers.got(ack)
        return ack


def flipped(tensors: Any) -> dict[str, Any]:
    name = max(tensors, key=lambda name: tensors[name].numel())
    other = tensors[name].clone()
    other.view(torch.uint8).view(-1)[0] ^= 1
    return {**tensors, name: other}


class OrderedLink(Obedient, HttpsLink):
    def _send(self, path: str, about: Any, offset: int, layout: Any, tensors: Any) -> str:
        if not self.flips:
            return super()._send(path, about, offset, layout, tensors)
        super()._send(path, about, offset, layout, flipped(tensors))
        return digest_of(layout, tensors)


class OrderedWorker(Worker):
    """`step_s`: what a step takes at the least, as on a slower device."""

    papers: Papers
    step_s = 0.0

    def _before_step(self) -> None:
        self.papers.order("in a round")
        time.sleep(self.step_s)
        super()._before_step()


def work(number: int, address: str, token: str, folder: str, step_s: float = 0.0) -> None:
    """A worker over HTTPS until the run has ended."""
    link = OrderedLink(address, token)
    link.papers = Papers(folder, number)
    work_over(link, number, step_s)


def work_over(link: Any, number: int, step_s: float) -> None:
    torch.set_num_threads(1)
    while True:
        with contextlib.suppress(Exception):
            described = link.describe()
            break
        time.sleep(0.05)
    task, config = task_of(described, device="cpu")
    worker = OrderedWorker(task, config, tell=lambda text: print(f"worker {number}: {text}", file=sys.stderr, flush=True))
    worker.papers, worker.step_s = link.papers, step_s
    signal.signal(signal.SIGTERM, lambda *_: setattr(worker, "stop_requested", "stopped"))
    worker.run(link, f"w{number}", described["run"], patience_s=120.0)
