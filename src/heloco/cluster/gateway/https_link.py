"""A link to a run over HTTPS: outbound connections only, one for tensors and requests, one of its own for signs of life."""

import json
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash
from msgspec import MsgspecError
from msgspec.json import decode
from torch import Tensor

import heloco
from heloco.cluster.gateway import check_parts
from heloco.cluster.gateway.pinned import clean_address, client, down, pinned
from heloco.cluster.protocol import messages as m
from heloco.cluster.protocol.link import LinkDown, digest_of
from heloco.cluster.protocol.messages import Right, RoundKey, Ticket
from heloco.cluster.protocol.refusals import Code, Refused
from heloco.cluster.protocol.tokens import parse_token
from heloco.errors import UserError
from heloco.wire.layout import Layout, pieces, view

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
TIMEOUT_S = 20.0
"""Without a byte for this long, a connection is taken for dead."""
PIECE = 1 << 16
"""Bytes that are sent at once: each must get through within the time-out, also on a slow line."""
LONGEST_ANSWER = 1 << 24
NO_ANSWER = {Code.INTERNAL, Code.HTTP, Code.TIMEOUT, Code.CUT}
"""Refusals that say something about the connection or the gateway, and nothing about the request."""


class HttpsLink:
    """Nothing is connected before the first request; every request may be repeated after `LinkDown`."""

    def __init__(self, address: str, token: str, *, timeout_s: float = TIMEOUT_S) -> None:
        check_parts("httpx")
        self.address = clean_address(address)
        if not token:
            raise UserError(
                f"{self.address} needs a token: give the one that `heloco serve` printed, in HELOCO_TOKEN or with --token-file."
            )
        self._token = parse_token(token)
        self._timeout_s = timeout_s
        self._run = ""
        self._context: ssl.SSLContext | None = None
        self._clients: dict[str, httpx.Client] = {}
        self._opening = threading.Lock()
        self._room = bytearray()
        """What the last start was put into, and the next will be: memory that is in use already is several times as fast."""
        self._partial: tuple[RoundKey | None, bytearray, int] | None = None
        """A download that was cut: what it is of, its bytes, and how many of them have arrived."""

    @property
    def right(self) -> Right:
        """What the token says that it allows."""
        return self._token.right

    # ---- requests

    def _client(self, purpose: str) -> "httpx.Client":
        with self._opening:
            if self._context is None:
                self._context = pinned(self.address, self._token.fingerprint, self._timeout_s)
            if purpose not in self._clients:
                headers = {"authorization": f"Bearer {self._token.secret}"}
                self._clients[purpose] = client(self.address, self._context, self._timeout_s, 2, headers)
            return self._clients[purpose]

    def _ask(self, method: str, path: str, kind: type[T], *, purpose: str = "rounds", **options: Any) -> T:
        """One request; `Refused` where it was refused, also with the code `busy` where the answer is not there yet."""
        import httpx

        try:
            with self._client(purpose).stream(method, path, **options) as response:
                return self._answer(response, kind)
        except httpx.TransportError as error:
            raise down(self.address, error) from error

    def _post(self, path: str, message: m.Message, kind: type[T] = m.Done, **options: Any) -> T:  # type: ignore[assignment]
        return self._ask("POST", path, kind, content=m.encode(message), **options)

    def _post_long(self, path: str, message: m.Message, kind: type[T] = m.Done, **options: Any) -> T:  # type: ignore[assignment]
        """Where the synchronizer needs longer it says so, and is asked again."""
        while True:
            try:
                return self._post(path, message, kind, **options)
            except _NotYet:
                continue

    def _answer(self, response: "httpx.Response", kind: type[T]) -> T:
        """What the gateway said; a refusal is raised."""
        self._check_entry(response)
        content = self._content(response)
        if response.status_code == 202:
            raise _NotYet
        try:
            if response.is_success:
                return decode(content, type=kind)
            body = json.loads(content)
            code, text, size = Code(body["code"]), str(body["text"]), body.get("size")
        except (MsgspecError, ValueError, KeyError, TypeError):
            raise LinkDown(f"{self.address} gave an answer that makes no sense here ({response.status_code}).") from None
        if code in NO_ANSWER:
            raise LinkDown(f"{self.address} did not get the request, or could not answer it ({text}).")
        raise Refused(code, text, size=size)

    def _content(self, response: "httpx.Response") -> bytes:
        content = bytearray()
        for piece in response.iter_raw():
            content += piece
            if len(content) > LONGEST_ANSWER:
                raise LinkDown(f"{self.address} gave an answer that has no end.")
        return bytes(content)

    def _check_entry(self, response: "httpx.Response") -> None:
        if response.status_code == 401 and not response.headers.get("content-type"):
            raise UserError(
                f"{self.address} does not accept the token: it belongs to another run, or was revoked. Paste the one that "
                "`heloco serve` printed there, or ask who serves the run for a new one."
            )
        if response.status_code == 429 and not response.headers.get("content-type"):
            raise LinkDown(f"{self.address} is asked too often from here.")

    def _shown(self, ticket: Ticket) -> dict[str, str]:
        """The headers by which a machine is known."""
        return {"heloco-machine": f"{ticket.machine} {ticket.secret}", "heloco-run": self._run}

    # ---- the run

    def describe(self) -> m.RunInfo:
        info = self._ask("GET", "describe", m.RunInfo)
        self._run = info.run
        return info

    def join(self, name: str, *, returning: Ticket | None, layout: Layout | None) -> m.Joined:
        entries = layout.entries if layout else None
        request = m.JoinRequest(name=_printable(name, 100) or "machine", version=heloco.__version__, layout=entries)
        joined = self._post("join", request, m.Joined, headers=self._shown(returning) if returning else {})
        self._run = joined.run
        return joined

    def next_round(self, ticket: Ticket, wait_s: float) -> m.RoundAnswer:
        request = m.RoundRequest(wait_s=wait_s)
        return self._post("round", request, m.RoundAnswer, headers=self._shown(ticket))  # type: ignore[arg-type]

    def beat(self, ticket: Ticket, steps: int) -> m.BeatAnswer:
        try:
            return self._post("beat", m.Beat(steps=steps), m.BeatAnswer, purpose="beats", headers=self._shown(ticket))
        except UserError as error:  # whoever asks next will find out
            raise LinkDown(str(error)) from error

    def abandon(self, ticket: Ticket, text: str) -> None:
        self._post("abandon", m.Reason(text=_printable(text, 500)), headers=self._shown(ticket))

    def leave(self, ticket: Ticket, text: str) -> None:
        self._post("leave", m.Reason(text=_printable(text, 500)), headers=self._shown(ticket))

    def close(self) -> None:
        """Ends the connections; the next request would make new ones."""
        with self._opening:
            for open_client in self._clients.values():
                open_client.close()
            self._clients.clear()

    # ---- looking at it, and ruling it

    def status(self) -> m.Status:
        return self._ask("GET", "status", m.Status)

    def read(self, name: str, offset: int) -> bytes:
        import httpx

        try:
            with self._client("rounds").stream("GET", "file", params={"name": name, "offset": offset}) as response:
                if not response.is_success:
                    self._answer(response, m.Done)
                return self._content(response)
        except httpx.TransportError as error:
            raise down(self.address, error) from error

    def stop(self, text: str) -> None:
        self._post_long("stop", m.Reason(text=_printable(text, 500)))

    def pause(self, text: str) -> None:
        self._post("pause", m.Reason(text=_printable(text, 500)))

    def unpause(self) -> None:
        self._ask("POST", "unpause", m.Done)

    def evict(self, machine: str, text: str) -> None:
        self._post("evict", m.MachineId(machine=machine, text=_printable(text, 500)))

    def tokens(self) -> m.TokenList:
        return self._ask("GET", "tokens", m.TokenList)

    def new_token(self, right: Right, note: str) -> m.TokenInfo:
        return self._post("tokens", m.TokenRequest(right=right, note=_printable(note, 500)), m.TokenInfo)

    def revoke_token(self, token_id: str) -> None:
        self._post("tokens/revoke", m.TokenId(id=token_id))

    # ---- tensors, down

    def fetch(self, ticket: Ticket, key: RoundKey, layout: Layout, digest: str) -> dict[str, Tensor]:
        buffer = self._download("start", key, key._asdict(), ticket, layout.size)
        if xxhash.xxh3_128_hexdigest(buffer) != digest:
            raise LinkDown("What arrived is not the round's start (its digest differs).")
        return self._checked(layout, buffer)

    def fetch_final(self, ticket: Ticket, layout: Layout) -> dict[str, Tensor]:
        return self._checked(layout, self._download("final", None, {}, ticket, layout.size))

    def _checked(self, layout: Layout, buffer: bytearray) -> dict[str, Tensor]:
        if buffer[: len(layout.header)] != layout.header:
            raise Refused(Code.LAYOUT, "What arrived is not of this run's model: names, shapes or dtypes differ.")
        return view(layout, buffer)

    def _download(self, path: str, key: RoundKey | None, query: dict[str, Any], ticket: Ticket, size: int) -> bytearray:
        """Goes on where it was cut, in this call and in the next; gives up for now when a try brought nothing at all."""
        buffer, arrived = self._room, 0
        if self._partial is not None and self._partial[0] == key and len(self._partial[1]) == size:
            _, buffer, arrived = self._partial
        elif len(buffer) != size:
            buffer = self._room = bytearray(size)
        self._partial = None
        while arrived < size:
            before = arrived
            arrived, cut = self._download_more(path, query, ticket, buffer, arrived)
            if cut is not None and arrived == before:
                self._partial = (key, buffer, arrived)
                raise cut
        return buffer

    def _download_more(
        self, path: str, query: dict[str, Any], ticket: Ticket, buffer: bytearray, arrived: int
    ) -> tuple[int, LinkDown | None]:
        """How much has arrived afterwards, and what went wrong on the way."""
        import httpx

        whole, headers = memoryview(buffer), {"range": f"bytes={arrived}-", **self._shown(ticket)}
        try:
            with self._client("rounds").stream("GET", path, params=query, headers=headers) as response:
                if response.status_code not in (200, 206):
                    self._answer(response, m.Done)
                arrived = self._checked_begin(response, arrived, len(buffer))
                for piece in response.iter_raw():
                    whole[arrived : arrived + len(piece)] = piece
                    arrived += len(piece)
            return arrived, None
        except httpx.TransportError as error:
            trouble = down(self.address, error)
            if isinstance(trouble, UserError):
                raise trouble from error
            return arrived, trouble

    def _checked_begin(self, response: "httpx.Response", arrived: int, size: int) -> int:
        """Where the answer's bytes belong. Its length, as it says itself, must be what is missing."""
        begin = arrived if response.status_code == 206 else 0
        if response.headers.get("content-length") != str(size - begin):
            raise Refused(Code.LAYOUT, f"What a round begins with has not {size} bytes: that is another model.")
        return begin

    # ---- tensors, up

    def hand_in(
        self, ticket: Ticket, key: RoundKey, layout: Layout, tensors: Mapping[str, Tensor], report: m.ContributionReport
    ) -> m.Acknowledgement:
        shown, query = self._shown(ticket), key._asdict()
        progress = self._ask("GET", "contribution", m.UploadState, params=query, headers=shown)
        if progress.ack is not None:
            return progress.ack
        digest = self._send("contribution", query, shown, progress.size, layout, tensors)
        commit = m.ContributionCommit(
            worker=key.worker, round=key.round, version=key.version, digest=digest, loss=report.loss,
            last_loss=report.last_loss, samples=report.samples, units=report.units,
        )  # fmt: skip
        return self._post_long("contribution/commit", commit, m.Acknowledgement, headers=shown)

    def send_model(self, ticket: Ticket, layout: Layout, tensors: Mapping[str, Tensor], names: list[str]) -> None:
        shown = self._shown(ticket)
        size = self._post("model", m.ModelOffer(layout=layout.entries), m.UploadState, headers=shown).size
        digest = self._send("model", {}, shown, size, layout, tensors)
        self._post_long("model/commit", m.ModelCommit(names=tuple(names), digest=digest), headers=shown)

    def _send(
        self, path: str, query: dict[str, Any], shown: dict[str, str], offset: int, layout: Layout, tensors: Mapping[str, Tensor]
    ) -> str:
        """Sends the file of these tensors from a byte on, without ever putting it together; gives the whole file's digest."""
        if offset == layout.size:
            return digest_of(layout, tensors)
        digest = xxhash.xxh3_128()
        content = _pieces_after(offset, layout, tensors, digest)
        headers = {"content-length": str(layout.size - offset), **shown}
        self._ask("PUT", path, m.UploadState, params=query | {"offset": offset}, content=content, headers=headers)
        return digest.hexdigest()

    # ---- for `heloco doctor`

    def clock(self) -> float:
        """The synchronizer's time, in seconds since 1970."""
        return self._ask("GET", "clock", dict[str, float])["time_s"]

    def probe_down(self, size: int) -> float:
        """Seconds to get this many bytes."""
        import httpx

        began, arrived = time.perf_counter(), 0
        try:
            with self._client("rounds").stream("GET", "probe", params={"bytes": size}) as response:
                if not response.is_success:
                    self._answer(response, m.Done)
                arrived = sum(map(len, response.iter_raw()))
        except httpx.TransportError as error:
            raise down(self.address, error) from error
        assert arrived == size
        return time.perf_counter() - began

    def probe_up(self, size: int) -> float:
        """Seconds to send this many bytes."""
        piece, began = memoryview(bytes(PIECE)), time.perf_counter()
        content = (piece[: min(PIECE, size - at)] for at in range(0, size, PIECE))
        self._ask("POST", "probe", dict[str, int], content=content, headers={"content-length": str(size)})
        return time.perf_counter() - began


class _NotYet(Exception):
    """The request is under way: it is to be repeated."""


def _pieces_after(offset: int, layout: Layout, tensors: Mapping[str, Tensor], digest: Any) -> Iterator[memoryview]:
    at = 0
    for piece in pieces(layout, tensors):
        digest.update(piece)
        for first in range(max(0, min(len(piece), offset - at)), len(piece), PIECE):
            yield piece[first : first + PIECE]
        at += len(piece)


def _printable(text: str, most: int) -> str:
    return "".join(c if c.isprintable() else " " for c in text)[:most]
