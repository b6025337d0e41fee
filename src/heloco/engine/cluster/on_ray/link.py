"""A machine's link to a run over Ray: calls of the synchronizer's actor, tensors through the object store.

Every wait has an end of our own, for Ray's calls can hang. What takes long for a good reason (a turn among many contributions, a
slow network) is waited for as long as the synchronizer answers at all; meanwhile it is told that this machine is still there.
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

from heloco.engine.cluster.files import hashing
from heloco.engine.cluster.link import Answer, Denied, Key, LinkDown
from heloco.engine.cluster.on_ray.actor import DENIED, DOWN, NAME, PIECE, REFUSED, tensor_deadline_s
from heloco.engine.cluster.on_ray.cluster import NAMESPACE, Cluster, Tls, check_versions, require_ray, start_ray
from heloco.errors import RunStopped, UserError
from heloco.run.tensors import Layout, pieces, view

BEAT_S = 10.0
ANSWER_S = 60.0
"""For requests without tensors: an evaluation or a checkpoint may be under way."""
PING_EVERY_S = 3.0
READY_S = 3.0
ANEW_S = 20.0
"""Without a synchronizer for so long, a node's process connects anew: its connection may be to a head that another has replaced,
and Ray itself never notices that."""


class RayLink:
    def __init__(self, address: str = "", *, token: str = "", tls: Tls | None = None, name: str = NAME) -> None:
        """`address`: ray://HOST:PORT as a client, ray:HOST:PORT on a node of the cluster, empty inside Ray's own processes."""
        self.address = address or "this Ray cluster"
        self._where, self._token, self._tls, self._name = address, token, tls, name
        self._is_client = address.startswith("ray://")
        self._cluster: Cluster | None = None
        self._handle: Any = None
        self._lock = threading.Lock()  # signs of life come from a thread of their own
        self._beating = threading.Lock()
        """Held while that thread uses the connection."""
        self._missed_s = 0.0
        """Since when nobody was found under the synchronizer's name; 0: somebody was."""
        self._room = np.empty(0, np.uint8)
        """What the last start was put into, and the next will be: memory that is in use already is several times as fast."""
        self._ray = require_ray()
        self._connect()

    def _connect(self) -> None:
        with self._lock:
            if self._where and not self._ray.is_initialized():
                self._cluster = start_ray(self._where, token=self._token, tls=self._tls)

    def _disconnect(self) -> None:
        with self._lock:
            self._handle = None
            if self._cluster is not None:
                self._cluster.stop()
                self._cluster = None

    # ---- asking

    def _actor(self, *, anew: bool = True) -> Any:
        """Looked up by its name again after it was lost: the head starts another one from the journal. `anew`: where that is in
        vain for long, the connection is ended, and the next one who asks makes another."""
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
                if anew:
                    self._missed()
                raise LinkDown("No run is being served in the Ray cluster at the moment.") from None
        return self._handle

    def _missed(self) -> None:
        now_s = time.monotonic()
        self._missed_s = self._missed_s or now_s
        if self._cluster is not None and now_s - self._missed_s > ANEW_S:
            self._missed_s = 0.0
            with self._beating:
                self._disconnect()

    @contextlib.contextmanager
    def _reaching(self) -> Any:
        """Whatever Ray says of a peer that is gone, late or out of reach. It may have done what it was asked, and may be asked
        again."""
        errors = self._ray.exceptions
        try:
            yield
        except errors.RayTaskError as error:  # of the service itself: what it holds is whole
            raise LinkDown(f"The synchronizer met an error of its own ({str(error).strip().splitlines()[-1]}).") from error
        except errors.GetTimeoutError as error:
            self._handle = None
            raise LinkDown("The synchronizer does not answer.") from error
        except errors.RayError as error:
            self._handle = None
            raise LinkDown(f"The synchronizer is out of reach ({type(error).__name__}).") from error
        except ConnectionError as error:  # a client's: it connects anew
            self._disconnect()
            raise LinkDown(f"The Ray cluster is out of reach ({_first_line(error)}).") from error
        except (LinkDown, Denied, RunStopped):
            raise
        except Exception as error:  # Ray's plain ones, of a handle or a connection from before
            self._handle = None
            raise LinkDown(f"The synchronizer cannot be asked ({_first_line(error)}).") from error

    def _ask(self, method: str, *given: Any, within_s: float = ANSWER_S, machine: str = "") -> Any:
        with self._reaching():
            actor = self._actor()
            reference = getattr(actor, method).remote(*given)
            return _read(self._awaited(actor, reference, within_s, machine))

    def _awaited(self, actor: Any, reference: Any, within_s: float, machine: str) -> Any:
        """What a reference stands for, for as long as the synchronizer answers pings; it ends all the same."""
        until = time.monotonic() + within_s
        while not self._ray.wait([reference], timeout=min(PING_EVERY_S, within_s))[0]:
            if time.monotonic() > until:
                raise LinkDown(f"The synchronizer has not answered within {within_s:.0f} s.")
            self._ray.get(actor.ping.remote(machine), timeout=BEAT_S)
        # On a node of the cluster it is here now; to a client it comes only with this.
        return self._ray.get(reference, timeout=max(READY_S, until - time.monotonic()) if self._is_client else READY_S)

    # ---- requests

    def describe(self) -> Answer:
        answer: Answer = self._ask("describe")
        check_versions(self._ray.__version__, answer["ray"])
        return answer

    def join(self, name: str, *, returning: str | None, pace_s: float | None, layout: Layout | None) -> Answer:
        answer: Answer = self._ask("join", name, returning, pace_s, None if layout is None else layout.as_json())
        return answer

    def next_round(self, machine: str, wait_s: float) -> Answer:
        answer: Answer = self._ask("next_round", machine, wait_s, within_s=wait_s + ANSWER_S)
        return answer

    def beat(self, machine: str, steps: int, pace_s: float | None) -> Answer:
        with self._beating, self._reaching():
            actor = self._actor(anew=False)
            answer: Answer = _read(self._ray.get(actor.beat.remote(machine, steps, pace_s), timeout=BEAT_S))
            return answer

    def abandon(self, machine: str, reason: str) -> None:
        self._ask("ask", "abandon", machine, reason)

    def leave(self, machine: str, reason: str) -> None:
        self._ask("ask", "leave", machine, reason)

    def status(self) -> Answer:
        answer: Answer = self._ask("status")
        return answer

    def read(self, name: str, offset: int) -> bytes:
        answer: bytes = self._ask("ask", "read", name, offset)
        return answer

    def stop(self, reason: str) -> None:
        self._ask("ask", "stop", reason)

    def close(self) -> None:
        self._disconnect()

    # ---- tensors

    def fetch(self, machine: str, key: Key, layout: Layout) -> dict[str, Tensor]:
        within_s = tensor_deadline_s(layout.size)
        shared = self._ask("fetch", machine, key, within_s=within_s, machine=machine)
        if len(self._room) != layout.size:
            self._room = np.empty(layout.size, np.uint8)
        there = 0
        with self._reaching():
            self._ray.wait(shared, num_returns=len(shared), timeout=0)  # all may come at once
            while shared:
                piece = self._awaited(self._actor(), shared.pop(0), within_s, machine)
                if there + len(piece) > layout.size:
                    break
                self._room[there : there + len(piece)] = piece  # what Ray shares with others is not ours to write to
                there += len(piece)
            self._actor().got.remote(machine)
        if there != layout.size or shared or bytes(self._room[: len(layout.header)]) != layout.header:
            raise LinkDown("What arrived is not the round's start: the synchronizer has changed its run.")
        return view(layout, self._room)

    def hand_in(self, machine: str, key: Key, layout: Layout, tensors: Mapping[str, Tensor], report: Answer) -> Answer:
        boxed, digest = self._put(layout, tensors)
        within_s = tensor_deadline_s(layout.size) + ANSWER_S
        told = {**report, "digest": digest}
        answer: Answer = self._ask("hand_in", machine, key, boxed, told, within_s=within_s, machine=machine)
        return answer

    def send_model(self, machine: str, layout: Layout, tensors: Mapping[str, Tensor], names: list[str]) -> None:
        boxed, digest = self._put(layout, tensors)
        within_s = tensor_deadline_s(layout.size) + ANSWER_S
        self._ask("send_model", machine, layout.as_json(), boxed, names, digest, within_s=within_s, machine=machine)

    def _put(self, layout: Layout, tensors: Mapping[str, Tensor]) -> tuple[list[Any], str]:
        """References to the tensors' file in this machine's store, in pieces, from which the synchronizer takes them when it
        wants to; and the file's digest, which is made meanwhile."""
        hashed = xxhash.xxh3_128()
        with self._reaching():
            self._actor()  # where nobody is there to take them, nothing is put
            references = []
            for piece in in_pieces(pieces(layout, tensors)):
                with hashing(hashed, piece.data):
                    references.append(self._ray.put(piece))
            return references, hashed.hexdigest()


def in_pieces(parts: Iterable[memoryview]) -> Iterator[npt.NDArray[np.uint8]]:
    """The same bytes, the small parts put together; each piece is to be used before the next is asked for."""
    room, filled = np.empty(PIECE, np.uint8), 0
    for part in parts:
        large = len(part) > PIECE // 2
        if filled and (large or filled + len(part) > PIECE):
            yield room[:filled]
            filled = 0
        if large:
            yield np.frombuffer(part, np.uint8)
        else:
            room[filled : filled + len(part)] = part
            filled += len(part)
    if filled:
        yield room[:filled]


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _read(reply: tuple[Any, ...]) -> Any:
    if reply[0] == DENIED:
        raise Denied(reply[1], reply[2], **reply[3])
    if reply[0] == DOWN:
        raise LinkDown(reply[1])
    if reply[0] == REFUSED:
        raise RunStopped(reply[1])
    return reply[1]
