"""The service in an actor. Its answers are tagged values and never exceptions: Ray would wrap those beyond recognition.

Calls of each kind have threads of their own, so that a sign of life waits behind no tensor and no evaluation. Tensors are the
bytes of a safetensors file in flat numpy buffers: Ray shares them between the processes of a node, and copies them once to
another.
"""

import importlib
import operator
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from heloco.cluster.protocol.messages import (
    ContributionReport,
    JoinRequest,
    ModelCommit,
    RoundKey,
    RunInfo,
    Ticket,
)
from heloco.cluster.protocol.refusals import Code, Refused
from heloco.cluster.ray.ray_cluster import NAMESPACE, require_ray
from heloco.cluster.server.local_link import wait_for_round
from heloco.cluster.server.process import RunHost, ServeSpec
from heloco.cluster.server.resident_memory import forget, memory_of
from heloco.cluster.server.service import Service
from heloco.cluster.server.transfers import Upload
from heloco.errors import RunStopped, UserError
from heloco.wire.layout import PIECE_BYTES, Layout

NAME = "heloco-synchronizer"
OK, REFUSED, DOWN, FAILED = "ok", "refused", "down", "failed"
Reply = tuple[Any, ...]
"""(OK, answer), (REFUSED, code, text, size), (DOWN, text): ask again, (FAILED, text): a person must do something."""
UPLOAD_LIMIT, DOWNLOAD_LIMIT = 2, 2
"""Contributions taken in, and starts handed out, at the same time: this bounds the memory, whatever the number of workers."""
WAITING_LIMIT = 64
"""Machines that can wait for a round at the same time; more of them wait for their turn to wait."""
GROUPS = {"beats": 2, "waiting": WAITING_LIMIT, "starts": DOWNLOAD_LIMIT, "contributions": UPLOAD_LIMIT, "end": 2}
GROUP_OF = {
    "beat": "beats", "ping": "beats", "release_start": "beats", "next_round": "waiting", "fetch": "starts",
    "hand_in": "contributions", "send_model": "contributions", "wait_for_end": "end",
}  # fmt: skip
CALLS = {
    "abandon": "service.rounds.abandon", "leave": "service.members.leave", "read": "service.admin.read",
    "stop": "service.admin.stop", "pause": "service.pauses.order", "evict": "service.members.evict", "tokens": "list_tokens",
    "new_token": "new_token", "revoke_token": "revoke_token", "token": "token", "declare_lost": "service.members.declare_lost",
}  # fmt: skip
"""Request -> what of the host it is handed to as it is."""
STEP_S = 1.0
PIECE = PIECE_BYTES
"""Bytes of an object in Ray's store, at most: neither side has to hold a whole model in memory besides its own."""


def tensor_deadline_s(size: int) -> float:
    """How long tensors may take to come: a megabyte a second at the least."""
    return 60.0 + size / 1e6


class Late(Exception):
    """It cannot be answered yet, or something did not come in time; the text is the sentence."""


def reply_to(ask: Callable[[], Any]) -> Reply:
    try:
        return (OK, ask())
    except Refused as refused:
        return (REFUSED, refused.code.value, refused.text, refused.size)
    except (UserError, RunStopped) as error:
        return (FAILED, str(error))
    except Late as error:
        return (DOWN, str(error))
    except require_ray().exceptions.RayError as error:
        return (DOWN, f"The tensors did not reach the synchronizer ({str(error).splitlines()[0]}).")


class SynchronizerActor:
    def __init__(self) -> None:
        self._host: RunHost | None = None
        self._threads = 1
        self._has_begun = threading.Event()
        self._one_model = threading.Lock()
        """Of the files of starts and contributions, one at a time is in memory."""
        self._shared: tuple[Path, list[Any]] | None = None
        """(file, references) of the start that was last handed out: machines that begin together want the same."""
        self._starts_sent: dict[str, list[Any]] = {}
        """Machine -> the start it is fetching. Ray's own account of who still wants an object can miss one that was just sent."""

    def begin(self, spec: ServeSpec, threads: int) -> Reply:
        """Everything slow: the data is prepared, the journal followed. Until then all others are told to ask again."""

        def open_host() -> dict[str, Any]:
            torch.set_num_threads(threads)
            self._host = RunHost.open(spec)
            self._threads = torch.get_num_threads()  # a run that is taken up goes on with as many as it had
            self._has_begun.set()
            return {"address": self._host.address, "notices": self._host.service.notices, "pid": os.getpid()}

        return reply_to(open_host)

    @property
    def host(self) -> RunHost:
        if self._host is None:
            raise Late("The run is being prepared.")
        return self._host

    @property
    def service(self) -> Service:
        return self.host.service

    # ---- requests without tensors

    def ask(self, request: str, *arguments: Any) -> Reply:
        return reply_to(lambda: operator.attrgetter(CALLS[request])(self.host)(*arguments))

    def describe(self) -> Reply:
        def describe_run() -> RunInfo:
            return structs.replace(self.service.describe(), ray=require_ray().__version__)

        return reply_to(describe_run)

    def join(self, request: JoinRequest, ticket: Ticket | None) -> Reply:
        return reply_to(lambda: self.service.members.join(request, ticket))

    def status(self) -> Reply:
        return reply_to(lambda: self.service.admin.status())

    def memory(self) -> Reply:
        """What the synchronizer's process holds in memory."""
        return reply_to(lambda: memory_of(os.getpid()))

    def beat(self, ticket: Ticket, steps: int) -> Reply:
        return reply_to(lambda: self.service.members.beat(ticket, steps))

    def ping(self, machine: str) -> Reply:
        """From a machine that waits for tensors, here or under way: it is not to blame for that."""
        return reply_to(lambda: self.service.state.note_transfer(machine))

    def next_round(self, ticket: Ticket, wait_s: float) -> Reply:
        return reply_to(lambda: wait_for_round(self.service, ticket, wait_s))

    # ---- tensors

    def fetch(self, ticket: Ticket, key: RoundKey | None) -> Reply:
        """References to the start's bytes, in pieces; without a key those of the model of a run that has ended."""
        return reply_to(lambda: self._start(ticket, key))

    def _start(self, ticket: Ticket, key: RoundKey | None) -> list[Any]:
        path = self.service.rounds.final(ticket) if key is None else self.service.rounds.start(ticket, key)
        machine = ticket.machine
        with self._one_model:
            if self._shared is None or self._shared[0] != path:
                self._shared = None  # first, so that Ray may free it
                self._shared = (path, _put(path))
            present = self.service.state.roster.present
            self._starts_sent = {m: pieces for m, pieces in self._starts_sent.items() if m in present} | {
                machine: self._shared[1]
            }
            self.service.state.note_transfer(machine)
            return self._shared[1]

    def release_start(self, machine: str) -> None:
        """The machine has its own copy of the start now."""
        self._starts_sent.pop(machine, None)
        if self._host is not None:
            self._host.service.state.note_transfer(machine)

    def hand_in(self, ticket: Ticket, key: RoundKey, references: list[Any], digest: str, report: ContributionReport) -> Reply:
        """The tensors are pulled here when it is their turn, and not before."""

        def take_in() -> Any:
            torch.set_num_threads(self._threads)  # OpenMP keeps it for each thread by itself
            contributions = self.service.contributions
            progress = contributions.progress(ticket, key)
            if progress.ack is not None:
                return progress.ack
            upload = contributions.upload(ticket, key)
            self._pull(ticket.machine, references, upload, progress.size)
            with self._one_model:
                return contributions.commit(ticket, key, digest, report)

        return reply_to(take_in)

    def send_model(self, ticket: Ticket, layout: Layout, references: list[Any], commit: ModelCommit) -> Reply:
        def take_in() -> None:
            upload = self.service.models.upload(ticket, layout)
            self._pull(ticket.machine, references, upload, upload.size)
            self.service.models.commit(ticket, commit)

        return reply_to(take_in)

    def _pull(self, machine: str, references: list[Any], upload: Upload, offset: int) -> None:
        """Piece by piece from Ray's store into the file, from a byte on; no piece is held longer than that takes."""
        turn = upload.begin(offset)
        at = 0
        while references:
            require_ray().wait(references[:2], num_returns=1, timeout=0)  # the next one is on its way meanwhile
            piece = self._pull_piece(machine, references.pop(0), upload.layout.size)
            upload.write(turn, memoryview(piece)[max(0, offset - at) :])
            at += len(piece)
            self.service.state.note_transfer(machine)
            forget_array(piece)

    def _pull_piece(self, machine: str, reference: Any, size: int) -> Any:
        ray = require_ray()
        until = time.monotonic() + tensor_deadline_s(size)
        while True:
            try:
                return ray.get(reference, timeout=STEP_S)
            except ray.exceptions.GetTimeoutError:
                self.service.state.note_transfer(machine)  # it is on the way; how far, Ray does not say
                if time.monotonic() > until:
                    raise Late(f"{size} bytes took longer than {tensor_deadline_s(size):.0f} s to come.") from None

    # ---- the end

    def wait_for_end(self) -> Reply:
        """Answers when the run has ended. That there is no answer any more tells at once that this process is gone."""
        self._has_begun.wait()
        state = self.service.state
        with state.changed:
            while state.ended is None:
                state.changed.wait(STEP_S)
            return (OK, state.ended)

    def close(self) -> Reply:
        def close_host() -> None:
            if self._host is not None:
                self._host.close()

        return reply_to(close_host)


def _put(path: Path) -> list[Any]:
    """References to a file's bytes in Ray's store, in pieces."""
    ray, references = require_ray(), []
    try:
        content = np.memmap(path, np.uint8, "r").view(np.ndarray)
        for at in range(0, len(content), PIECE):
            piece = content[at : at + PIECE]
            references.append(ray.put(piece))
            forget_array(piece)
            forget_array(ray.get(references[-1]))
        return references
    except FileNotFoundError:
        raise Refused(Code.NOT_HELD, "This round was given up: take a fresh one.") from None


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
