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

import heloco.engine.cluster.gateway.server  # noqa: F401 - so that children need not import it
from heloco.engine.cluster.gateway.client import HttpsLink
from heloco.engine.cluster.host import Door, Host, Recipe
from heloco.engine.cluster.worker import Worker, task_of
from heloco.errors import UserError

POINTS = ("fetch", "in a round", "hand in", "handed in")
"""Where a worker can be told to do something: before it gets a round's start, between two steps, before it hands in, and after
the synchronizer has taken its contribution in but before it knows."""


def serve(folder: str, config: str, port: int, state: str) -> None:
    """Until SIGTERM, or until it cannot go on; `state` is a file with how it is doing."""
    torch.set_num_threads(1)
    over: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: over.append(number))
    begun = (Path(folder) / "config.toml").exists()
    host = None
    try:
        host = Host(Recipe(folder, "" if begun else config, config if begun else "", door=Door("127.0.0.1", port)))
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


def write(path: str, content: dict[str, Any]) -> None:
    Path(f"{path}.new").write_text(json.dumps(content))
    Path(f"{path}.new").replace(path)


class OrderedLink(HttpsLink):
    """Does what the file `orders` says at its point, once: kill, corrupt, double."""

    orders: Path

    def _order(self, point: str) -> str:
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

    def fetch(self, machine: str, key: Any, layout: Any) -> Any:
        self._order("fetch")
        return super().fetch(machine, key, layout)

    def hand_in(self, machine: str, key: Any, layout: Any, tensors: Any, report: Any) -> Any:
        order = self._order("hand in")
        if order == "corrupt":
            with contextlib.suppress(Exception):
                self._send_flipped(machine, key, layout, tensors, report)
        ack = super().hand_in(machine, key, layout, tensors, report)
        if self._order("handed in") == "double":
            again = super().hand_in(machine, key, layout, tensors, report)
            assert again == ack, (again, ack)
        return ack

    def _send_flipped(self, machine: str, key: Any, layout: Any, tensors: Any, report: Any) -> None:
        """One bit is not as the digest says."""
        name = max(tensors, key=lambda name: tensors[name].numel())
        flipped = tensors[name].clone()
        flipped.view(torch.uint8).view(-1)[0] ^= 1
        sent = {**tensors, name: flipped}
        real = self._send

        def lying(path: str, about: Any, offset: int, lay: Any, _: Any) -> str:
            real(path, about, offset, lay, sent)
            from heloco.engine.cluster.link import digest_of

            return digest_of(layout, tensors)

        self._send = lying  # type: ignore[method-assign]
        try:
            super().hand_in(machine, key, layout, tensors, report)
        finally:
            del self._send  # type: ignore[attr-defined]


def work(number: int, address: str, token: str, orders: str, acks: str) -> None:
    """A worker until the run has ended; every acknowledgement it got is a line in `acks`."""
    torch.set_num_threads(1)
    link = OrderedLink(address, token)
    link.orders = Path(orders)
    while True:
        with contextlib.suppress(Exception):
            described = link.describe()
            break
        time.sleep(0.05)
    task, config = task_of(described, device="cpu")
    worker = Worker(task, config, tell=lambda text: print(f"worker {number}: {text}", file=sys.stderr, flush=True))
    signal.signal(signal.SIGTERM, lambda *_: setattr(worker, "stop_requested", "stopped"))
    before_step = worker.inner.before_step
    real = HttpsLink.hand_in
    log = os.open(acks, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def logged(self: Any, machine: str, key: Any, *rest: Any) -> Any:
        ack = real(self, machine, key, *rest)
        os.write(log, f"{json.dumps(ack)}\n".encode())
        return ack

    def step() -> None:
        link._order("in a round")
        assert before_step is not None
        before_step()

    HttpsLink.hand_in = logged  # type: ignore[method-assign]
    worker.inner.before_step = step
    worker.run(link, f"w{number}", described["run"], patience_s=120.0)
