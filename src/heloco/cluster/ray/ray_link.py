"""A machine's link to a run over Ray: calls of the synchronizer's actor, and tensors through the object store.

Every wait has our own timeout, because Ray's calls can hang. A transfer that takes long for a good reason (a queue of
contributions, a slow network) may continue while the synchronizer answers pings, which also tell it that this machine lives.
"""

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from torch import Tensor

import heloco
from heloco.cluster.protocol import messages as m
from heloco.cluster.protocol.link import LinkDown
from heloco.cluster.protocol.messages import Right, RoundKey, Ticket
from heloco.cluster.protocol.refusals import Refused
from heloco.cluster.protocol.score_messages import EvaluationResult, ScoreReport
from heloco.cluster.ray.ray_cluster import NAMESPACE, Cluster, Tls, check_versions, require_ray, start_ray
from heloco.cluster.ray.replies import NAME, PIECE, tensor_deadline_s, value_of
from heloco.errors import RunStopped, UserError
from heloco.wire.layout import Layout, pieces, view

BEAT_S = 10.0
ANSWER_S = 60.0
"""Timeout for requests without tensors: the synchronizer may be taking in a contribution of a large model."""
PING_EVERY_S = 3.0
READY_S = 3.0
RECONNECT_AFTER_S = 20.0
"""After this many seconds without a synchronizer, a node's process connects again. Its connection may be to a head that was
replaced by another, and Ray itself never notices that."""


class RayLink:
    """A `Link` and an `AdminLink` that reach the synchronizer through a Ray cluster."""

    def __init__(self, address: str = "", token: str = "", *, tls: Tls | None = None, name: str = NAME) -> None:
        """`address`: ray://HOST:PORT as a client, ray:HOST:PORT on a node of the cluster, or empty inside Ray's own processes."""
        self.address = address or "this Ray cluster"
        self._join_address, self._token, self._tls, self._name = address, token, tls, name
        self._is_client = address.startswith("ray://")
        self._cluster: Cluster | None = None
        self._handle: Any = None
        self._lock = threading.Lock()  # beats come from another thread
        self._beating = threading.Lock()
        """Held while the thread of the beats uses the connection."""
        self._missed_s = 0.0
        """Since when no actor was found under the synchronizer's name; 0 if one was found."""
        self._room = np.empty(0, np.uint8)
        """The buffer of the last start, reused for the next one: memory that is in use already is several times as fast."""
        self._ray = require_ray()
        self._connect()

    def _connect(self) -> None:
        with self._lock:
            if self._join_address and not self._ray.is_initialized():
                self._cluster = start_ray(self._join_address, token=self._token, tls=self._tls)

    def _disconnect(self) -> None:
        with self._lock:
            self._handle = None
            if self._cluster is not None:
                self._cluster.stop()
                self._cluster = None

    # ---- calls

    def actor(self, *, may_reconnect: bool = True) -> Any:
        """The synchronizer's actor. After it was lost it is looked up by name again, because the
        head starts another one from the journal. With `may_reconnect`, the connection is closed if
        no actor is found for long; the next call opens a new one."""
        if not self._ray.is_initialized():
            try:
                self._connect()
            except UserError as error:
                raise LinkDown(str(error)) from error
            if not self._ray.is_initialized():
                raise LinkDown("Ray is being started again.")
        if self._handle is None:
            try:
                self._handle = self._ray.get_actor(self._name, namespace=NAMESPACE)
                self._missed_s = 0.0
            except ValueError:
                if may_reconnect:
                    self._note_missing()
                raise LinkDown("No run is being served in the Ray cluster at the moment.") from None
        return self._handle

    def _note_missing(self) -> None:
        now_s = time.monotonic()
        self._missed_s = self._missed_s or now_s
        if self._cluster is not None and now_s - self._missed_s > RECONNECT_AFTER_S:
            self._missed_s = 0.0
            with self._beating:
                self._disconnect()

    @contextlib.contextmanager
    def _reaching(self) -> Any:
        """Turns Ray's errors about a peer that is gone, slow or out of reach into `LinkDown`. The call may have been carried out,
        and may be repeated."""
        errors = self._ray.exceptions
        try:
            yield
        except errors.RayTaskError as error:  # an error in the service itself, whose state is intact
            raise LinkDown(f"The synchronizer failed with an internal error ({str(error).strip().splitlines()[-1]}).") from error
        except errors.GetTimeoutError as error:
            self._handle = None
            raise LinkDown("The synchronizer does not answer.") from error
        except errors.RayError as error:
            self._handle = None
            raise LinkDown(f"The synchronizer is out of reach ({type(error).__name__}).") from error
        except ConnectionError as error:  # only for a client, which connects again
            self._disconnect()
            raise LinkDown(f"The Ray cluster is out of reach ({_first_line(error)}).") from error
        except (LinkDown, Refused, RunStopped):
            raise
        except Exception as error:  # Ray's plain exceptions about an old handle or connection
            self._handle = None
            raise LinkDown(f"The synchronizer cannot be asked ({_first_line(error)}).") from error

    def _ask(self, method: str, *arguments: Any, within_s: float = ANSWER_S, machine: str = "") -> Any:
        with self._reaching():
            actor = self.actor()
            reference = getattr(actor, method).remote(*arguments)
            return value_of(self._wait_for(actor, reference, within_s, machine))

    def _wait_for(self, actor: Any, reference: Any, within_s: float, machine: str) -> Any:
        """The value of a reference. Waits at most `within_s`, and only while the synchronizer answers pings."""
        until = time.monotonic() + within_s
        while not self._ray.wait([reference], timeout=min(PING_EVERY_S, within_s))[0]:
            if time.monotonic() > until:
                raise LinkDown(f"The synchronizer has not answered within {within_s:.0f} s.")
            self._ray.get(actor.ping.remote(machine), timeout=BEAT_S)
        # On a node of the cluster the value is here already. A client downloads it in this call.
        return self._ray.get(reference, timeout=max(READY_S, until - time.monotonic()) if self._is_client else READY_S)

    # ---- requests

    def describe(self) -> m.RunInfo:
        info: m.RunInfo = self._ask("describe")
        check_versions(self._ray.__version__, info.ray)
        return info

    def join(self, name: str, *, returning: Ticket | None, layout: Layout | None) -> m.Joined:
        request = m.JoinRequest(name=name, version=heloco.__version__, layout=layout.entries if layout else None)
        joined: m.Joined = self._ask("join", request, returning)
        return joined

    def next_round(self, ticket: Ticket, wait_s: float, *, evaluates: bool = False) -> m.RoundAnswer:
        answer: m.RoundAnswer = self._ask("next_round", ticket, wait_s, evaluates, within_s=wait_s + ANSWER_S)
        return answer

    def beat(self, ticket: Ticket, steps: int) -> m.BeatAnswer:
        with self._beating, self._reaching():
            actor = self.actor(may_reconnect=False)
            answer: m.BeatAnswer = value_of(self._ray.get(actor.beat.remote(ticket, steps), timeout=BEAT_S))
            return answer

    def abandon(self, ticket: Ticket, text: str) -> None:
        self._ask("ask", "abandon", ticket, text)

    def leave(self, ticket: Ticket, text: str) -> None:
        self._ask("ask", "leave", ticket, text)

    def close(self) -> None:
        self._disconnect()

    # ---- looking at it, and controlling it

    def status(self) -> m.Status:
        status: m.Status = self._ask("status")
        return status

    def read(self, name: str, offset: int) -> bytes:
        content: bytes = self._ask("ask", "read", name, offset)
        return content

    def stop(self, text: str) -> None:
        self._ask("ask", "stop", text)

    def suspend(self, text: str) -> None:
        self._ask("ask", "suspend", text)

    def pause(self, text: str) -> None:
        self._ask("ask", "pause", text)

    def unpause(self) -> None:
        self._ask("ask", "unpause")

    def evict(self, machine: str, text: str) -> None:
        self._ask("ask", "evict", machine, text)

    def declare_lost(self, machine: str, text: str) -> None:
        """Removes a machine whose process is known to be dead."""
        self._ask("ask", "declare_lost", machine, text)

    def tokens(self) -> m.TokenList:
        tokens: m.TokenList = self._ask("ask", "tokens")
        return tokens

    def new_token(self, right: Right, note: str) -> m.TokenInfo:
        token: m.TokenInfo = self._ask("ask", "new_token", right, note)
        return token

    def revoke_token(self, token_id: str) -> None:
        self._ask("ask", "revoke_token", token_id)

    def token(self, right: Right) -> str:
        """A valid token of the gateway, in the form that is pasted."""
        token: str = self._ask("ask", "token", right)
        return token

    # ---- tensors

    def fetch(self, ticket: Ticket, key: RoundKey, layout: Layout, digest: str) -> dict[str, Tensor]:
        self._download(ticket, key, layout)
        if xxhash.xxh3_128_hexdigest(self._room.data) != digest:
            raise LinkDown("What arrived is not the round's start: the synchronizer has changed its run.")
        return view(layout, self._room)

    def fetch_evaluated(self, ticket: Ticket, job: m.EvaluationJob, layout: Layout) -> dict[str, Tensor]:
        self._download(ticket, job.arrival, layout)
        if xxhash.xxh3_128_hexdigest(self._room.data) != job.digest:
            raise LinkDown("What arrived is not the model to evaluate (its digest differs).")
        return view(layout, self._room)

    def send_scores(self, ticket: Ticket, result: EvaluationResult) -> None:
        self._ask("ask", "send_scores", ticket, result)

    def report_scores(self, ticket: Ticket, report: ScoreReport) -> None:
        self._ask("ask", "report_scores", ticket, report)

    def fetch_final(self, ticket: Ticket, layout: Layout) -> dict[str, Tensor]:
        self._download(ticket, None, layout)
        return view(layout, self._room)

    def _download(self, ticket: Ticket, key: RoundKey | int | None, layout: Layout) -> None:
        within_s = tensor_deadline_s(layout.size)
        references = self._ask("fetch", ticket, key, within_s=within_s, machine=ticket.machine)
        if len(self._room) != layout.size:
            self._room = np.empty(layout.size, np.uint8)
        bytes_received = 0
        with self._reaching():
            self._ray.wait(references, num_returns=len(references), timeout=0)  # starts the transfer of all pieces
            while references:
                piece = self._wait_for(self.actor(), references.pop(0), within_s, ticket.machine)
                if bytes_received + len(piece) > layout.size:
                    break
                self._room[bytes_received : bytes_received + len(piece)] = (
                    piece  # copied, because memory that Ray shares is read-only
                )
                bytes_received += len(piece)
            self.actor().release_start.remote(ticket.machine)
        if bytes_received != layout.size or references or bytes(self._room[: len(layout.header)]) != layout.header:
            raise LinkDown("What arrived is not of the run's model: the synchronizer has changed its run.")

    def hand_in(
        self, ticket: Ticket, key: RoundKey, layout: Layout, tensors: Mapping[str, Tensor], report: m.ContributionReport
    ) -> m.Acknowledgement:
        references, digest = self.put_tensors(layout, tensors)
        within_s = tensor_deadline_s(layout.size) + ANSWER_S
        call = ("hand_in", ticket, key, references, digest, report)
        ack: m.Acknowledgement = self._ask(*call, within_s=within_s, machine=ticket.machine)
        return ack

    def send_model(self, ticket: Ticket, layout: Layout, tensors: Mapping[str, Tensor], names: list[str]) -> None:
        references, digest = self.put_tensors(layout, tensors)
        within_s = tensor_deadline_s(layout.size) + ANSWER_S
        commit = m.ModelCommit(names=tuple(names), digest=digest)
        self._ask("send_model", ticket, layout, references, commit, within_s=within_s, machine=ticket.machine)

    def put_tensors(self, layout: Layout, tensors: Mapping[str, Tensor]) -> tuple[list[Any], str]:
        """Puts the file with these tensors into this machine's store, from which the synchronizer
        fetches it. Returns the references of its pieces, and the digest of the file."""
        digest = xxhash.xxh3_128()
        with self._reaching():
            self.actor()  # raises LinkDown before anything is put if there is no synchronizer
            references = []
            for piece in in_pieces(pieces(layout, tensors)):
                digest.update(piece.data)
                references.append(self._ray.put(piece))
            return references, digest.hexdigest()


def in_pieces(parts: Iterable[memoryview]) -> Iterator[npt.NDArray[np.uint8]]:
    """The same bytes, with small parts joined. Each piece must be used before the next is requested."""
    room, bytes_filled = np.empty(PIECE, np.uint8), 0
    for part in parts:
        large = len(part) > PIECE // 2
        if bytes_filled and (large or bytes_filled + len(part) > PIECE):
            yield room[:bytes_filled]
            bytes_filled = 0
        if large:
            yield np.frombuffer(part, np.uint8)
        else:
            room[bytes_filled : bytes_filled + len(part)] = part
            bytes_filled += len(part)
    if bytes_filled:
        yield room[:bytes_filled]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
