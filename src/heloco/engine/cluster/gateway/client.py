"""A link to a run over HTTPS: outbound connections only, one for tensors and requests, one of its own for signs of life."""

import json
import math
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import xxhash
from torch import Tensor

import heloco
from heloco.engine.cluster.gateway import check_parts
from heloco.engine.cluster.gateway.credentials import parse_token
from heloco.engine.cluster.gateway.pinned import clean_address, client, down, pinned
from heloco.engine.cluster.link import Answer, Denied, Key, LinkDown, digest_of
from heloco.errors import UserError
from heloco.run.tensors import Layout, pieces, view

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 20.0
"""Without a byte for so long, a connection is taken for dead."""
PIECE = 1 << 16
"""Bytes that are sent at once: each must get through within the time-out, also on a slow line."""
LONGEST_ANSWER = 1 << 24
NO_ANSWER = ("internal", "http", "timeout", "cut")
"""Refusals that say something about the connection or the gateway, and nothing about the request."""


class HttpsLink:
    """Nothing is connected before the first request; every request may be repeated after `LinkDown`."""

    def __init__(self, address: str, token: str, *, timeout_s: float = TIMEOUT_S) -> None:
        check_parts("httpx")
        self.address = clean_address(address)
        self._secret, self._fingerprint = parse_token(token)
        self._timeout_s = timeout_s
        self._run = ""
        self._context: ssl.SSLContext | None = None
        self._clients: dict[str, httpx.Client] = {}
        self._opening = threading.Lock()
        self._room = bytearray()
        """What the last start was put into, and the next will be: memory that is in use already is several times as fast."""
        self._begun: tuple[Key, bytearray, int] | None = None
        """A download that was cut: what it is, its bytes, and how many of them are there."""

    # ---- requests

    def _client(self, purpose: str) -> "httpx.Client":
        with self._opening:
            if self._context is None:
                self._context = pinned(self.address, self._fingerprint, self._timeout_s)
            if purpose not in self._clients:
                headers = {"authorization": f"Bearer {self._secret}"}
                self._clients[purpose] = client(self.address, self._context, self._timeout_s, 2, headers)
            return self._clients[purpose]

    def _ask(self, method: str, path: str, *, purpose: str = "rounds", **options: Any) -> Answer:
        import httpx

        try:
            with self._client(purpose).stream(method, path, **options) as response:
                return self._answer(response)
        except httpx.TransportError as error:
            raise down(self.address, error) from error

    def _post(self, path: str, content: Answer, **options: Any) -> Answer:
        return self._ask("POST", path, content=json.dumps(content, allow_nan=False), **options)

    def _post_long(self, path: str, content: Answer) -> Any:
        """Where the synchronizer needs longer it says so, and is asked again."""
        while "wait" in (answer := self._post(path, content)):
            pass
        return answer["done"]

    def _answer(self, response: "httpx.Response") -> Answer:
        """What the gateway said; a refusal is raised."""
        self._check_entry(response)
        try:
            found = json.loads(self._content(response))
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.get("denied") in NO_ANSWER:
            raise LinkDown(f"{self.address} gave an answer that makes no sense here ({response.status_code}).")
        if "denied" in found:
            about = {name: value for name, value in found.items() if name not in ("denied", "sentence")}
            raise Denied(str(found["denied"]), str(found.get("sentence", "")), **about)
        if not response.is_success:
            raise LinkDown(f"{self.address} refused with {response.status_code}.")
        return found

    def _content(self, response: "httpx.Response") -> bytes:
        content = bytearray()
        for piece in response.iter_raw():
            content += piece
            if len(content) > LONGEST_ANSWER:
                raise LinkDown(f"{self.address} gave an answer that has no end.")
        return bytes(content)

    def _check_entry(self, response: "httpx.Response") -> None:
        if response.status_code == 401:
            raise UserError(
                f"{self.address} does not accept the token: it is of another run. Paste the one that `heloco serve` prints there."
            )
        if response.status_code == 429:
            raise LinkDown(f"{self.address} is asked too often from here.")

    # ---- the run

    def describe(self) -> Answer:
        answer = self._ask("GET", "describe")
        self._run = answer["run"]
        return answer

    def join(self, name: str, *, returning: str | None, pace_s: float | None, layout: Layout | None) -> Answer:
        said = {"name": _printable(name, 100), "returning": returning, "pace_s": pace_s, "version": heloco.__version__}
        answer = self._post("join", said | {"layout": layout.as_json() if layout else None})
        self._run = answer["run"]
        return answer

    def _said_by(self, machine: str) -> dict[str, Any]:
        return {"run": self._run, "machine": machine}

    def _about(self, machine: str, key: Key) -> dict[str, Any]:
        return self._said_by(machine) | dict(zip(("worker", "round", "version"), key, strict=True))

    def next_round(self, machine: str, wait_s: float) -> Answer:
        return self._post("round", self._said_by(machine) | {"wait_s": wait_s})

    def beat(self, machine: str, steps: int, pace_s: float | None) -> Answer:
        try:
            return self._post("beat", self._said_by(machine) | {"steps": steps, "pace_s": pace_s}, purpose="beats")
        except UserError as error:  # whoever asks next will find out
            raise LinkDown(str(error)) from error

    def abandon(self, machine: str, reason: str) -> None:
        self._post("abandon", self._said_by(machine) | {"reason": _printable(reason, 500)})

    def leave(self, machine: str, reason: str) -> None:
        self._post("leave", self._said_by(machine) | {"reason": _printable(reason, 500)})

    def status(self) -> Answer:
        return self._ask("GET", "status")

    def read(self, name: str, offset: int) -> bytes:
        import httpx

        try:
            with self._client("rounds").stream("GET", "file", params={"name": name, "offset": offset}) as response:
                if not response.is_success:
                    self._answer(response)
                return self._content(response)
        except httpx.TransportError as error:
            raise down(self.address, error) from error

    def stop(self, reason: str) -> None:
        self._post_long("stop", {"reason": _printable(reason, 500)})

    def close(self) -> None:
        """Ends the connections; the next request would make new ones."""
        with self._opening:
            for open_client in self._clients.values():
                open_client.close()
            self._clients.clear()

    # ---- tensors, down

    def fetch(self, machine: str, key: Key, layout: Layout) -> dict[str, Tensor]:
        """Goes on where it was cut, in this call and in the next; gives up for now when a try brought nothing at all."""
        buffer, there = bytearray(), 0
        if self._begun is not None and self._begun[0] == key and len(self._begun[1]) == layout.size:
            _, buffer, there = self._begun
        self._begun = None
        if not buffer:
            if len(self._room) != layout.size:
                self._room = bytearray(layout.size)
            buffer = self._room
        while there < layout.size:
            before, cut = there, None
            there, cut = self._download(self._about(machine, key), buffer, there)
            if cut is not None and there == before:
                self._begun = (key, buffer, there)
                raise cut
        if buffer[: len(layout.header)] != layout.header:
            raise Denied("layout", "what came is not of this run's model: names, shapes or dtypes differ.")
        return view(layout, buffer)

    def _download(self, about: dict[str, Any], buffer: bytearray, there: int) -> "tuple[int, LinkDown | None]":
        """How much is there afterwards, and what went wrong on the way."""
        import httpx

        whole = memoryview(buffer)
        try:
            with self._client("rounds").stream("GET", "start", params=about, headers={"range": f"bytes={there}-"}) as response:
                if response.status_code not in (200, 206):
                    self._answer(response)
                there = self._checked_begin(response, there, len(buffer))
                for piece in response.iter_raw():
                    whole[there : there + len(piece)] = piece
                    there += len(piece)
            return there, None
        except httpx.TransportError as error:
            trouble = down(self.address, error)
            if isinstance(trouble, UserError):
                raise trouble from error
            return there, trouble

    def _checked_begin(self, response: "httpx.Response", there: int, size: int) -> int:
        """Where the answer's bytes belong. Its length, as it says itself, must be what is missing."""
        begin = there if response.status_code == 206 else 0
        if response.headers.get("content-length") != str(size - begin):
            raise Denied("layout", f"what a round starts from is not of {size} bytes: that is another model.")
        return begin

    # ---- tensors, up

    def hand_in(self, machine: str, key: Key, layout: Layout, tensors: Mapping[str, Tensor], report: Answer) -> Answer:
        about = self._about(machine, key)
        known = self._ask("GET", "contribution", params=about)
        if "ack" in known:
            ack: Answer = known["ack"]
            return ack
        digest = self._send("contribution", about, known["size"], layout, tensors)
        told = {name: report[name] for name in ("samples", "units")}
        told |= {name: _number(report[name]) for name in ("loss", "last_loss")}
        done: Answer = self._post_long("contribution/commit", about | told | {"digest": digest})
        return done

    def send_model(self, machine: str, layout: Layout, tensors: Mapping[str, Tensor], names: list[str]) -> None:
        said = self._said_by(machine)
        size = self._post("model", said | {"layout": layout.as_json()})["size"]
        digest = self._send("model", said, size, layout, tensors)
        self._post_long("model/commit", said | {"names": names, "digest": digest})

    def _send(self, path: str, about: dict[str, Any], offset: int, layout: Layout, tensors: Mapping[str, Tensor]) -> str:
        """Sends the file of these tensors from a byte on, without ever putting it together; gives the whole file's digest."""
        if offset == layout.size:
            return digest_of(layout, tensors)
        hashed = xxhash.xxh3_128()
        content = _behind(offset, layout, tensors, hashed)
        length = {"content-length": str(layout.size - offset)}
        self._ask("PUT", path, params=about | {"offset": offset}, content=content, headers=length)
        return hashed.hexdigest()

    # ---- for `heloco doctor`

    def clock(self) -> float:
        """The synchronizer's time, in seconds since 1970."""
        return float(self._ask("GET", "clock")["time_s"])

    def certificate_ends(self) -> float:
        """When the synchronizer's certificate ends, in seconds since 1970."""
        import httpx

        try:
            with self._client("rounds").stream("GET", "clock") as response:
                self._check_entry(response)
                stream: Any = response.extensions["network_stream"]
                shown: dict[str, Any] = stream.get_extra_info("ssl_object").getpeercert()
        except httpx.TransportError as error:
            raise down(self.address, error) from error
        return float(ssl.cert_time_to_seconds(shown["notAfter"]))

    def probe_down(self, size: int) -> float:
        """Seconds to get so many bytes."""
        import httpx

        began, there = time.perf_counter(), 0
        try:
            with self._client("rounds").stream("GET", "probe", params={"bytes": size}) as response:
                if not response.is_success:
                    self._answer(response)
                there = sum(map(len, response.iter_raw()))
        except httpx.TransportError as error:
            raise down(self.address, error) from error
        assert there == size
        return time.perf_counter() - began

    def probe_up(self, size: int) -> float:
        """Seconds to send so many bytes."""
        piece, began = memoryview(bytes(PIECE)), time.perf_counter()
        content = (piece[: min(PIECE, size - at)] for at in range(0, size, PIECE))
        self._ask("POST", "probe", content=content, headers={"content-length": str(size)})
        return time.perf_counter() - began


def _behind(offset: int, layout: Layout, tensors: Mapping[str, Tensor], hashed: Any) -> Iterator[memoryview]:
    at = 0
    for piece in pieces(layout, tensors):
        hashed.update(piece)
        for first in range(max(0, min(len(piece), offset - at)), len(piece), PIECE):
            yield piece[first : first + PIECE]
        at += len(piece)


def _printable(text: str, most: int) -> str:
    return "".join(c if c.isprintable() else " " for c in text)[:most]


def _number(value: float | None) -> float | None:
    """JSON has no NaN: a loss that is none is null."""
    return value if value is not None and math.isfinite(value) else None
