"""The service as a Ray actor. Its replies are values and never exceptions (`replies`).

Each kind of call has its own threads, so that a beat never waits for a tensor or an evaluation. Tensors are the bytes of a
safetensors file in flat numpy buffers. Ray shares them between the processes of a node, and copies them once to another node.
"""

import importlib
import operator
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from heloco.cluster.protocol.messages import (
    Acknowledgement,
    BeatAnswer,
    ContributionReport,
    Ended,
    Joined,
    JoinRequest,
    ModelCommit,
    RoundAnswer,
    RoundKey,
    RunInfo,
    Status,
    Ticket,
)
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.ray.ray_cluster import NAMESPACE, require_ray
from heloco.cluster.ray.replies import NAME, PIECE, Answer, Begun, Down, Failed, Reply, tensor_deadline_s
from heloco.cluster.server.process import RunHost, ServeSpec
from heloco.cluster.server.service import Service, wait_for_round
from heloco.cluster.server.transfers import Upload
from heloco.disk import drop_mapped_pages
from heloco.errors import RunStopped, UserError
from heloco.wire.layout import Layout

T = TypeVar("T")
UPLOAD_LIMIT, DOWNLOAD_LIMIT = 2, 2
"""How many contributions are received and how many starts are sent at the same time. This bounds the memory."""
WAITING_LIMIT = 64
"""How many calls can wait for a round at the same time. Further calls queue."""
GROUPS = {"beats": 2, "waiting": WAITING_LIMIT, "starts": DOWNLOAD_LIMIT, "contributions": UPLOAD_LIMIT, "end": 2}
GROUP_OF = {
    "beat": "beats", "ping": "beats", "release_start": "beats", "next_round": "waiting", "fetch": "starts",
    "hand_in": "contributions", "send_model": "contributions", "wait_for_end": "end",
}  # fmt: skip
CALLS = {
    "abandon": "service.rounds.abandon", "send_scores": "service.evaluation.take_in",
    "report_scores": "service.evaluation.take_report",
    "leave": "service.members.leave", "read": "service.admin.read",
    "stop": "service.admin.stop", "suspend": "service.admin.suspend",
    "pause": "service.pauses.pause", "unpause": "service.pauses.unpause",
    "evict": "service.members.evict", "tokens": "list_tokens", "new_token": "new_token",
    "revoke_token": "revoke_token", "token": "token", "declare_lost": "service.members.declare_lost",
}  # fmt: skip
"""Request -> the method of the `RunHost` that answers it."""
STEP_S = 1.0


class Late(Exception):
    """The call cannot be answered yet, or a transfer was too slow."""


def reply_to(ask: Callable[[], T]) -> Reply[T]:
    """Calls `ask`. An error that the other side must understand becomes a reply, because Ray would wrap it in its own."""
    try:
        return Answer(ask())
    except Refused as error:
        return error.refusal
    except (UserError, RunStopped) as error:
        return Failed(str(error))
    except Late as error:
        return Down(str(error))
    except require_ray().exceptions.RayError as error:
        return Down(f"The tensors did not reach the synchronizer ({str(error).splitlines()[0]}).")


class SynchronizerActor:
    """The served run inside a Ray actor. Machines and people call its methods through Ray."""

    def __init__(self) -> None:
        self._host: RunHost | None = None
        self._threads = 1
        self._has_begun = threading.Event()
        self._start_lock = threading.Lock()
        """Held while a start is put into Ray's store, so that machines that fetch the same one share it."""
        self._newest_start: tuple[Path, list[Any]] | None = None
        """(file, references) of the start that was sent last. Machines that begin together fetch the same one."""
        self._starts_sent: dict[str, list[Any]] = {}
        """Machine -> references of the start that it is fetching. Ray itself may free an object whose reference was just sent."""

    def begin(self, spec: ServeSpec, threads: int) -> Reply[Begun]:
        """Opens the run, which may take long: it prepares data and follows the journal. Until then
        other calls are answered with `Down`."""

        def open_host() -> Begun:
            torch.set_num_threads(threads)
            self._host = RunHost.open(spec)
            self._threads = torch.get_num_threads()  # a resumed run keeps its number of threads
            self._has_begun.set()
            return Begun(address=self._host.address, notices=tuple(self._host.service.notices), pid=os.getpid())

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

    def ask(self, request: str, *arguments: Any) -> Reply[Any]:
        """Answers a request without tensors by the method of the `RunHost` that `CALLS` names."""
        return reply_to(lambda: operator.attrgetter(CALLS[request])(self.host)(*arguments))

    def describe(self) -> Reply[RunInfo]:
        def describe_run() -> RunInfo:
            return structs.replace(self.service.describe(), ray=require_ray().__version__)

        return reply_to(describe_run)

    def join(self, request: JoinRequest, ticket: Ticket | None) -> Reply[Joined]:
        return reply_to(lambda: self.service.members.join(request, ticket))

    def status(self) -> Reply[Status]:
        return reply_to(lambda: self.service.admin.status())

    def beat(self, ticket: Ticket, steps: int) -> Reply[BeatAnswer]:
        return reply_to(lambda: self.service.members.beat(ticket, steps))

    def ping(self, machine: str) -> Reply[None]:
        """From a machine that waits for a transfer, so that it does not count as lost."""
        return reply_to(lambda: self.service.state.note_transfer(machine))

    def next_round(self, ticket: Ticket, wait_s: float, evaluates: bool = False) -> Reply[RoundAnswer]:
        return reply_to(lambda: wait_for_round(self.service, ticket, wait_s, evaluates))

    # ---- tensors

    def fetch(self, ticket: Ticket, key: RoundKey | int | None) -> Reply[list[Any]]:
        """References to the pieces of a round's start. With an arrival, of the model to evaluate; without a key, of the
        final model of a run that has ended."""
        return reply_to(lambda: self._start(ticket, key))

    def _file(self, ticket: Ticket, key: RoundKey | int | None) -> Path:
        if key is None:
            return self.service.rounds.final(ticket)
        return self.service.evaluation.model(ticket, key) if isinstance(key, int) else self.service.rounds.start(ticket, key)

    def _start(self, ticket: Ticket, key: RoundKey | int | None) -> list[Any]:
        path, machine = self._file(ticket, key), ticket.machine
        with self._start_lock:
            if self._newest_start is None or self._newest_start[0] != path:
                self._newest_start = None  # first, so that Ray may free it
                self._newest_start = (path, _put(path))
            present = self.service.state.roster.present
            self._starts_sent = {m: pieces for m, pieces in self._starts_sent.items() if m in present} | {
                machine: self._newest_start[1]
            }
            self.service.state.note_transfer(machine)
            return self._newest_start[1]

    def release_start(self, machine: str) -> None:
        """The machine has copied the start, so its references can be dropped."""
        self._starts_sent.pop(machine, None)
        if self._host is not None:
            self._host.service.state.note_transfer(machine)

    def hand_in(
        self, ticket: Ticket, key: RoundKey, references: list[Any], digest: str, report: ContributionReport
    ) -> Reply[Acknowledgement]:
        """Receives a contribution. Its tensors are fetched from Ray's store when it is their turn, and not before."""

        def take_in() -> Acknowledgement:
            torch.set_num_threads(self._threads)  # OpenMP has this setting per thread
            contributions = self.service.contributions
            progress = contributions.progress(ticket, key)
            if progress.ack is not None:
                return progress.ack
            upload = contributions.upload(ticket, key)
            self._pull(ticket.machine, references, upload, progress.size)
            return contributions.commit(ticket, key, digest, report)

        return reply_to(take_in)

    def send_model(self, ticket: Ticket, layout: Layout, references: list[Any], commit: ModelCommit) -> Reply[None]:
        def take_in() -> None:
            upload = self.service.models.upload(ticket, layout)
            self._pull(ticket.machine, references, upload, upload.size)
            self.service.models.commit(ticket, commit)

        return reply_to(take_in)

    def _pull(self, machine: str, references: list[Any], upload: Upload, offset: int) -> None:
        """Copies pieces from Ray's store to the upload, from `offset` on, and drops each piece at once."""
        turn = upload.begin(offset)
        piece_begin = 0
        while references:
            require_ray().wait(references[:2], num_returns=1, timeout=0)  # starts the transfer of the next piece
            piece = self._pull_piece(machine, references.pop(0), upload.layout.size)
            upload.write(turn, memoryview(piece)[max(0, offset - piece_begin) :])
            piece_begin += len(piece)
            self.service.state.note_transfer(machine)
            forget_array(piece)

    def _pull_piece(self, machine: str, reference: Any, size: int) -> Any:
        ray = require_ray()
        until = time.monotonic() + tensor_deadline_s(size)
        while True:
            try:
                return ray.get(reference, timeout=STEP_S)
            except ray.exceptions.GetTimeoutError:
                self.service.state.note_transfer(machine)  # the transfer is under way, but Ray reports no progress
                if time.monotonic() > until:
                    raise Late(f"{size} bytes took longer than {tensor_deadline_s(size):.0f} s to come.") from None

    # ---- the end

    def wait_for_end(self) -> Ended:
        """Returns when the run has ended. If this process dies, the call fails at once."""
        self._has_begun.wait()
        state = self.service.state
        with state.changed:
            while state.ended is None:
                state.changed.wait(STEP_S)
            return state.ended

    def close(self) -> Reply[None]:
        def close_host() -> None:
            if self._host is not None:
                self._host.close()

        return reply_to(close_host)


def _put(path: Path) -> list[Any]:
    """Puts a file into Ray's store in pieces, and returns their references."""
    ray, references = require_ray(), []
    try:
        content = np.memmap(path, np.uint8, "r").view(np.ndarray)
        for begin in range(0, len(content), PIECE):
            piece = content[begin : begin + PIECE]
            references.append(ray.put(piece))
            forget_array(piece)
            forget_array(ray.get(references[-1]))
        return references
    except FileNotFoundError:
        raise Refused(RefusalCode.NOT_HELD, "This round was given up: take a fresh one.") from None


def forget_array(array: npt.NDArray[np.uint8]) -> None:
    """Gives the memory of a mapped array back to the system. What is read again comes from its file or from Ray's store."""
    drop_mapped_pages(array.ctypes.data, array.nbytes)


def this_node() -> Any:
    """A scheduling strategy for actors that must run on this node."""
    ray = require_ray()
    strategies = importlib.import_module("ray.util.scheduling_strategies")
    return strategies.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def make_actor(name: str = NAME) -> Any:
    """Makes the actor on this node, under its name. Ray must not restart or retry it: a restarted actor would be empty, and a
    retried call would run twice."""
    ray = require_ray()
    for method, group in GROUP_OF.items():
        ray.method(concurrency_group=group)(getattr(SynchronizerActor, method))  # marks it
    remote = ray.remote(
        concurrency_groups=GROUPS, max_concurrency=8, max_restarts=0, max_task_retries=0, num_cpus=0,
        scheduling_strategy=this_node(),
    )  # fmt: skip
    return remote(SynchronizerActor).options(name=name, namespace=NAMESPACE).remote()
