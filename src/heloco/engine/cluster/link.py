"""What a machine sees of a run, whatever connects them; and the shortest connection, to a service in the same process."""

from collections.abc import Mapping
from typing import Any, Protocol

import xxhash
from torch import Tensor

from heloco.engine.cluster.files import Denied, Key
from heloco.engine.cluster.service import Service
from heloco.run.tensors import Layout, pieces, view

__all__ = ["Denied", "Key", "Link", "LinkDown", "LocalLink", "digest_of"]

Answer = dict[str, Any]


class LinkDown(Exception):
    """The run cannot be reached at the moment. Asking again later is right: every request may be repeated."""


class Link(Protocol):
    """Every request raises `Denied` where it was refused and `LinkDown` where there was no answer.

    Beats must not wait behind tensors; a transfer that was cut goes on where it stopped when it is asked for again.
    """

    address: str

    def describe(self) -> Answer: ...
    def join(self, name: str, *, returning: str | None, pace_s: float | None, layout: Layout | None) -> Answer: ...
    def send_model(self, machine: str, layout: Layout, tensors: Mapping[str, Tensor], names: list[str]) -> None: ...
    def next_round(self, machine: str, wait_s: float) -> Answer:
        """Waits up to `wait_s` for a round where there is none at once."""

    def fetch(self, machine: str, key: Key, layout: Layout) -> dict[str, Tensor]:
        """What the round starts from. The tensors are the machine's own, to write to; the next start may take their place."""

    def hand_in(self, machine: str, key: Key, layout: Layout, tensors: Mapping[str, Tensor], report: Answer) -> Answer:
        """Sends a contribution and has it acknowledged."""

    def beat(self, machine: str, steps: int, pace_s: float | None) -> Answer: ...
    def abandon(self, machine: str, reason: str) -> None: ...
    def leave(self, machine: str, reason: str) -> None: ...
    def status(self) -> Answer: ...
    def read(self, name: str, offset: int) -> bytes:
        """More of the run's config, tape or evaluations."""

    def stop(self, reason: str) -> None: ...
    def close(self) -> None: ...


def digest_of(layout: Layout, tensors: Mapping[str, Tensor]) -> str:
    found = xxhash.xxh3_128()
    for piece in pieces(layout, tensors):
        found.update(piece)
    return found.hexdigest()


class LocalLink:
    """To a service in this process."""

    def __init__(self, service: Service) -> None:
        self.address = "this process"
        self.service = service

    def describe(self) -> Answer:
        return self.service.describe()

    def join(self, name: str, *, returning: str | None, pace_s: float | None, layout: Layout | None) -> Answer:
        return self.service.join(name, returning=returning, pace_s=pace_s, layout=layout)

    def send_model(self, machine: str, layout: Layout, tensors: Mapping[str, Tensor], names: list[str]) -> None:
        incoming = self.service.incoming_model(machine, layout)
        turn = incoming.begin(incoming.size)
        for piece in _behind(incoming.size, layout, tensors):
            incoming.write(turn, piece)
        self.service.commit_model(machine, names, digest_of(layout, tensors))

    def next_round(self, machine: str, wait_s: float) -> Answer:
        return wait_for_round(self.service, machine, wait_s)

    def fetch(self, machine: str, key: Key, layout: Layout) -> dict[str, Tensor]:
        content = bytearray(self.service.start(machine, key).read_bytes())
        self.service.moved(machine)
        return view(layout, content)

    def hand_in(self, machine: str, key: Key, layout: Layout, tensors: Mapping[str, Tensor], report: Answer) -> Answer:
        known = self.service.received(machine, key)
        if "ack" in known:
            ack: Answer = known["ack"]
            return ack
        incoming = self.service.incoming(machine, key)
        turn = incoming.begin(known["size"])
        for piece in _behind(known["size"], layout, tensors):
            incoming.write(turn, piece)
        return self.service.commit(machine, key, {**report, "digest": digest_of(layout, tensors)})

    def beat(self, machine: str, steps: int, pace_s: float | None) -> Answer:
        return self.service.beat(machine, steps, pace_s)

    def abandon(self, machine: str, reason: str) -> None:
        self.service.abandon(machine, reason)

    def leave(self, machine: str, reason: str) -> None:
        self.service.leave(machine, reason)

    def status(self) -> Answer:
        return self.service.status()

    def read(self, name: str, offset: int) -> bytes:
        return self.service.read(name, offset)

    def stop(self, reason: str) -> None:
        self.service.stop(reason)

    def close(self) -> None:
        pass


def wait_for_round(service: Service, machine: str, wait_s: float) -> Answer:
    """A round as soon as there is one, or why there was none."""
    until = service.now_s + wait_s
    with service.changed:
        while True:
            answer = service.next_round(machine)
            if "wait" not in answer or (left := until - service.now_s) <= 0:
                return answer
            service.changed.wait(min(left, 1.0))


def _behind(offset: int, layout: Layout, tensors: Mapping[str, Tensor]) -> "list[memoryview]":
    found, at = [], 0
    for piece in pieces(layout, tensors):
        if at + len(piece) > offset:
            found.append(piece[max(0, offset - at) :])
        at += len(piece)
    return found
