"""The processes of workers in a run with faults. They carry out orders."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from faults.restarts import restart_until_done
from heloco.cli.join import TRAINING, TRAINING_MODULES
from heloco.cli.warm_restart import import_ahead
from heloco.cluster.client.worker import Worker, task_of
from heloco.cluster.gateway.https_link import HttpsLink
from heloco.cluster.protocol.link import digest_of
from heloco.cluster.protocol.messages import to_plain
from heloco.cluster.protocol.refusals import Refused

import_ahead(TRAINING_MODULES)

SENT_LIMIT = 3
"""A worker remembers this many contributions, to send an old one again on request."""


class Papers:
    """A worker's files: its orders, the process of each of its starts, and the acknowledgements that it gets."""

    def __init__(self, folder: str, number: int) -> None:
        self.orders = Path(folder) / f"orders-{number}"
        with (Path(folder) / f"starts-{number}").open("a") as starts:
            starts.write(f"{os.getpid()}\n")
        self._acks = os.open(Path(folder) / f"acks-{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def order(self, point: str) -> str:
        """The order for this point, if there is one: corrupt, double or replay. The order to kill is carried out here."""
        try:
            order = json.loads(self.orders.read_text())
        except (OSError, ValueError):
            return ""
        if order["point"] != point:
            return ""
        self.orders.unlink()
        if order["do"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return str(order["do"])

    def got(self, ack: Any) -> None:
        os.write(self._acks, f"{json.dumps(to_plain(ack))}\n".encode())


class Obedient:
    """Mixin for a link: carries out orders before and after transfers of tensors."""

    papers: Papers
    flips = False
    """Whether to flip one bit of what is sent, so that the digest is wrong."""
    deliveries: "list[tuple[tuple[Any, ...], Any]]"
    """The last contributions, with their acknowledgements."""

    def fetch(self, *arguments: Any) -> Any:
        self.papers.order("fetch")
        return super().fetch(*arguments)  # type: ignore[misc]

    def hand_in(self, *arguments: Any) -> Any:
        self.deliveries = getattr(self, "deliveries", [])
        do = self.papers.order("hand in")
        if do == "corrupt":
            self.flips = True
            with contextlib.suppress(Exception):
                self._deliver(*arguments)
            self.flips = False
        ack = self._deliver(*arguments)
        do = self.papers.order("handed in")
        if do == "double":
            second_ack = self._deliver(*arguments)
            assert second_ack == ack, (second_ack, ack)
        if do == "replay" and self.deliveries:
            self._replay(*self.deliveries[0])
        ticket, key, layout, tensors, report = arguments
        self.deliveries = [
            *self.deliveries[-SENT_LIMIT + 1 :],
            ((ticket, key, layout, {n: t.clone() for n, t in tensors.items()}, report), ack),
        ]
        return ack

    def _replay(self, arguments: tuple[Any, ...], ack: Any) -> None:
        """Sends an old contribution again. It must get the same answer or a refusal."""
        with contextlib.suppress(Refused):
            second_ack = super().hand_in(*arguments)  # type: ignore[misc]
            assert second_ack == ack, (second_ack, ack)

    def _deliver(self, *arguments: Any) -> Any:
        ack = super().hand_in(*arguments)  # type: ignore[misc]
        self.papers.got(ack)
        return ack


def flipped(tensors: Any) -> dict[str, Any]:
    name = max(tensors, key=lambda name: tensors[name].numel())
    changed = tensors[name].clone()
    changed.view(torch.uint8).view(-1)[0] ^= 1
    return {**tensors, name: changed}


class OrderedLink(Obedient, HttpsLink):
    def send_tensors(self, path: str, query: Any, ticket_headers: Any, offset: int, layout: Any, tensors: Any) -> str:
        if not self.flips:
            return super().send_tensors(path, query, ticket_headers, offset, layout, tensors)
        super().send_tensors(path, query, ticket_headers, offset, layout, flipped(tensors))
        return digest_of(layout, tensors)


class OrderedWorker(Worker):
    """`step_s`: minimal duration of a step, as on a slower device."""

    papers: Papers
    step_s = 0.0

    def before_step(self) -> None:
        self.papers.order("in a round")
        time.sleep(self.step_s)
        super().before_step()


def work(number: int, address: str, token: str, folder: str, step_s: float = 0.0) -> None:
    """Runs a worker over HTTPS until the run has ended, in a child that is restarted as `heloco join` does it."""

    def work_in_child() -> int:
        link = OrderedLink(address, token)
        link.papers = Papers(folder, number)
        work_over(link, number, step_s)
        return 0

    restart_until_done(f"worker {number}", work_in_child, Path(folder) / f"acks-{number}", TRAINING)


def work_over(link: Any, number: int, step_s: float) -> None:
    torch.set_num_threads(1)
    while True:
        with contextlib.suppress(Exception):
            info = link.describe()
            break
        time.sleep(0.05)
    task, config = task_of(info, device="cpu")
    worker = OrderedWorker(task, config, tell=lambda text: print(f"worker {number}: {text}", file=sys.stderr, flush=True))
    worker.papers, worker.step_s = link.papers, step_s
    signal.signal(signal.SIGTERM, lambda *_: setattr(worker, "stop_requested", "stopped"))
    worker.run(link, f"w{number}", info.run, patience_s=120.0)
