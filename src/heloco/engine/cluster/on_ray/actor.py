"""The service in an actor. Its answers are tagged values and never exceptions: Ray would wrap those beyond recognition.

Calls of each kind have threads of their own, so that a sign of life waits behind no tensor and no evaluation. Tensors are the
bytes of a safetensors file in flat numpy buffers: Ray shares them between the processes of a node, and copies them once to
another.
"""

import importlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from heloco.engine.cluster.files import Denied, Incoming, Key
from heloco.engine.cluster.host import Host, Recipe
from heloco.engine.cluster.link import wait_for_round
from heloco.engine.cluster.memory import forget, memory_of
from heloco.engine.cluster.on_ray.cluster import NAMESPACE, require_ray
from heloco.engine.cluster.service import Service
from heloco.errors import RunStopped, UserError
from heloco.run.tensors import AT_ONCE, Layout

NAME = "heloco-synchronizer"
OK, DENIED, DOWN, REFUSED = "ok", "denied", "down", "refused"
Reply = tuple[Any, ...]
"""(OK, answer), (DENIED, name, sentence, about), (DOWN, sentence): ask again, (REFUSED, sentence): a person must do something."""
AT_ONCE_IN, AT_ONCE_OUT = 2, 2
"""Contributions taken in, and starts handed out, at the same time: this bounds the memory, whatever the number of workers."""
WAITING = 64
"""Machines that can wait for a round at the same time; more of them wait for their turn to wait."""
GROUPS = {"beats": 2, "waiting": WAITING, "starts": AT_ONCE_OUT, "contributions": AT_ONCE_IN, "over": 2}
GROUP_OF = {
    "beat": "beats", "ping": "beats", "got": "beats", "next_round": "waiting", "fetch": "starts", "hand_in": "contributions",
    "send_model": "contributions", "over": "over",
}  # fmt: skip
PLAIN = ("abandon", "leave", "read", "stop")
"""What is handed to the service as it is."""
STEP_S = 1.0
PIECE = AT_ONCE
"""Bytes of an object in Ray's store, at most: neither side has to hold a whole model in memory besides its own."""


def tensor_deadline_s(size: int) -> float:
    """How long tensors may take to come: a megabyte a second at the least."""
    return 60.0 + size / 1e6


class Late(Exception):
    """It cannot be answered yet, or something did not come in time; the text is the sentence."""


def answered(ask: Callable[[], Any]) -> Reply:
    try:
        return (OK, ask())
    except Denied as error:
        return (DENIED, error.name, str(error), error.about)
    except (UserError, RunStopped) as error:
        return (REFUSED, str(error))
    except Late as error:
        return (DOWN, str(error))
    except require_ray().exceptions.RayError as error:
        return (DOWN, f"The tensors did not reach the synchronizer ({str(error).splitlines()[0]}).")


class SynchronizerActor:
    def __init__(self) -> None:
        self._host: Host | None = None
        self._threads = 1
        self._begun = threading.Event()
        self._one_model = threading.Lock()
        """Of the files of starts and contributions, one at a time is in memory."""
        self._shared: tuple[Path, list[Any]] | None = None
        """(file, references) of the start that was last handed out: machines that begin together want the same."""
        self._given: dict[str, list[Any]] = {}
        """Machine -> the start it is fetching. Ray's own account of who still wants an object can miss one that was just sent."""

    def begin(self, recipe: Recipe, threads: int) -> Reply:
        """Everything slow: the data is prepared, the journal followed. Until then all others are told to ask again."""

        def made() -> dict[str, Any]:
            torch.set_num_threads(threads)
            self._host = Host(recipe)
            self._threads = torch.get_num_threads()  # a run that is taken up goes on with as many as it had
            self._begun.set()
            return {"address": self._host.address, "token": self._host.token, "news": self._host.news, "pid": os.getpid()}

        return answered(made)

    @property
    def service(self) -> Service:
        if self._host is None:
            raise Late("The run is being prepared.")
        return self._host.service

    # ---- requests without tensors

    def ask(self, what: str, *given: Any) -> Reply:
        return answered(lambda: getattr(self.service, PLAIN[PLAIN.index(what)])(*given))

    def describe(self) -> Reply:
        return answered(lambda: {**self.service.describe(), "ray": require_ray().__version__})

    def join(self, name: str, returning: str | None, pace_s: float | None, layout: Any) -> Reply:
        def joined() -> dict[str, Any]:
            brought = None if layout is None else Layout.from_json(layout)
            return self.service.join(name, returning=returning, pace_s=pace_s, layout=brought)

        return answered(joined)

    def status(self) -> Reply:
        return answered(lambda: {**self.service.status(), "failed": self.service.failed, "memory": memory_of(os.getpid())})

    def beat(self, machine: str, steps: int, pace_s: float | None) -> Reply:
        return answered(lambda: self.service.beat(machine, steps, pace_s))

    def ping(self, machine: str) -> Reply:
        """From a machine that waits for tensors, here or under way: it is not to blame for that."""
        return answered(lambda: self.service.moved(machine))

    def next_round(self, machine: str, wait_s: float) -> Reply:
        return answered(lambda: wait_for_round(self.service, machine, wait_s))

    # ---- tensors

    def fetch(self, machine: str, key: Key) -> Reply:
        """References to the start's bytes, in pieces."""
        return answered(lambda: self._start(machine, key))

    def _start(self, machine: str, key: Key) -> list[Any]:
        path = self.service.start(machine, key)
        with self._one_model:
            if self._shared is None or self._shared[0] != path:
                self._shared = None  # first, so that Ray may free it
                self._shared = (path, _put(path))
            here = self.service.machines.present
            self._given = {m: held for m, held in self._given.items() if m in here} | {machine: self._shared[1]}
            self.service.moved(machine)
            return self._shared[1]

    def got(self, machine: str) -> None:
        """The machine has its own copy of the start now."""
        self._given.pop(machine, None)
        if self._host is not None:
            self._host.service.moved(machine)

    def hand_in(self, machine: str, key: Key, boxed: list[Any], report: dict[str, Any]) -> Reply:
        """The tensors are pulled here when it is their turn, and not before."""

        def taken() -> Any:
            torch.set_num_threads(self._threads)  # OpenMP keeps it for each thread by itself
            service = self.service
            known = service.received(machine, key)
            if "ack" in known:
                return known["ack"]
            incoming = service.incoming(machine, key)
            self._pull(machine, boxed, incoming, known["size"])
            with self._one_model:
                return service.commit(machine, key, report)

        return answered(taken)

    def send_model(self, machine: str, layout: Any, boxed: list[Any], names: list[str], digest: str) -> Reply:
        def taken() -> None:
            incoming = self.service.incoming_model(machine, Layout.from_json(layout))
            self._pull(machine, boxed, incoming, incoming.size)
            self.service.commit_model(machine, names, digest)

        return answered(taken)

    def _pull(self, machine: str, boxed: list[Any], incoming: Incoming, offset: int) -> None:
        """Piece by piece from Ray's store into the file, from a byte on; no piece is held longer than that takes."""
        turn = incoming.begin(offset)
        at = 0
        while boxed:
            require_ray().wait(boxed[:2], num_returns=1, timeout=0)  # the next one is on its way meanwhile
            piece = self._pulled(machine, boxed.pop(0), incoming.layout.size)
            incoming.write(turn, memoryview(piece)[max(0, offset - at) :])
            at += len(piece)
            self.service.moved(machine)
            forget_array(piece)

    def _pulled(self, machine: str, reference: Any, size: int) -> Any:
        ray = require_ray()
        until = time.monotonic() + tensor_deadline_s(size)
        while True:
            try:
                return ray.get(reference, timeout=STEP_S)
            except ray.exceptions.GetTimeoutError:
                self.service.moved(machine)  # it is on the way; how far, Ray does not say
                if time.monotonic() > until:
                    raise Late(f"{size} bytes took longer than {tensor_deadline_s(size):.0f} s to come.") from None

    # ---- the end

    def over(self) -> Reply:
        """Answers when the run has ended. That there is no answer any more tells at once that this process is gone."""
        self._begun.wait()
        service = self.service
        with service.changed:
            while not service.ended:
                service.changed.wait(STEP_S)
            return (OK, {"ended": service.ended, "failed": service.failed})

    def close(self) -> Reply:
        def closed() -> None:
            if self._host is not None:
                self._host.close()

        return answered(closed)


def _put(path: Path) -> list[Any]:
    """References to a file's bytes in Ray's store, in pieces."""
    ray, found = require_ray(), []
    try:
        content = np.memmap(path, np.uint8, "r").view(np.ndarray)
        for at in range(0, len(content), PIECE):
            piece = content[at : at + PIECE]
            found.append(ray.put(piece))
            forget_array(piece)
            forget_array(ray.get(found[-1]))
        return found
    except FileNotFoundError:
        raise Denied("not-held", "this round was given up: take a fresh one.") from None


def forget_array(mapped: npt.NDArray[np.uint8]) -> None:
    forget(mapped.ctypes.data, mapped.nbytes)


def this_node() -> Any:
    """Where an actor is to run: here, or not at all."""
    ray = require_ray()
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    return strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def make_actor(name: str = NAME) -> Any:
    """On this machine, under its name. A restart would come back empty and a retry do things twice: both are ours to do."""
    ray = require_ray()
    for method, group in GROUP_OF.items():
        ray.method(concurrency_group=group)(getattr(SynchronizerActor, method))  # marks it
    remote = ray.remote(
        concurrency_groups=GROUPS, max_concurrency=8, max_restarts=0, max_task_retries=0, num_cpus=0,
        scheduling_strategy=this_node(),
    )  # fmt: skip
    return remote(SynchronizerActor).options(name=name, namespace=NAMESPACE).remote()
