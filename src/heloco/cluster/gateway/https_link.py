"""A link to a run over HTTPS, with outbound connections only: one for tensors and requests, and one for beats."""

import ssl
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import xxhash
from msgspec import MsgspecError
from msgspec.json import decode
from torch import Tensor

import heloco
from heloco.cluster.gateway import check_parts
from heloco.cluster.gateway.pinned import clean_address, link_error, make_client, pin_certificate
from heloco.cluster.protocol import messages as m
from heloco.cluster.protocol.link import LinkDown, digest_of
from heloco.cluster.protocol.messages import Right, RoundKey, Ticket
from heloco.cluster.protocol.refusals import Refusal, RefusalCode, Refused, as_error
from heloco.cluster.protocol.score_messages import EvaluationResult, ScoreReport
from heloco.cluster.protocol.tokens import parse_token
from heloco.errors import UserError
from heloco.wire.layout import Layout, pieces_after, view

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
TIMEOUT_S = 20.0
"""After this many seconds without a byte a connection counts as dead."""
PIECE = 1 << 16
"""Bytes that are sent at once. Each piece must get through within the timeout, also on a slow line."""
ANSWER_LIMIT_BYTES = 1 << 24
NO_ANSWER = {RefusalCode.INTERNAL, RefusalCode.HTTP, RefusalCode.TIMEOUT, RefusalCode.CUT}
"""Refusals that are about the connection or the gateway, and not about the request."""


class HttpsLink:
    """Connects at the first request. Every request may be repeated after `LinkDown`."""

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
        """The buffer of the last start, reused for the next one: memory that is in use already is several times as fast."""
        self._partial: tuple[RoundKey | int | None, bytearray, int] | None = None
        """A download that was interrupted: its round or arrival, its buffer, and the bytes received so far."""

    @property
    def right(self) -> Right:
        """The right of the token."""
        return self._token.right

    # ---- requests

    def _client(self, purpose: str) -> "httpx.Client":
        with self._opening:
            if self._context is None:
                self._context = pin_certificate(self.address, self._token.fingerprint, self._timeout_s)
            if purpose not in self._clients:
                headers = {"authorization": f"Bearer {self._token.secret}"}
                self._clients[purpose] = make_client(self.address, self._context, self._timeout_s, 2, headers)
            return self._clients[purpose]

    def _ask(self, method: str, path: str, kind: type[T], *, purpose: str = "rounds", **options: Any) -> T:
        """Makes one request and decodes its answer. Raises `Refused`, `LinkDown`, or `_NotYet` for a call still under way."""
        import httpx

        try:
            with self._client(purpose).stream(method, path, **options) as response:
                return self._answer(response, kind)
        except httpx.TransportError as error:
            raise link_error(self.address, error) from error

    def _post(self, path: str, message: m.Message, kind: type[T] = m.Done, **options: Any) -> T:  # type: ignore[assignment]
        return self._ask("POST", path, kind, content=m.encode(message), **options)

    def _post_long(self, path: str, message: m.Message, kind: type[T] = m.Done, **options: Any) -> T:  # type: ignore[assignment]
        """Posts a request that may take long, and repeats it while the synchronizer is still busy with it."""
        while True:
            try:
                return self._post(path, message, kind, **options)
            except _NotYet:
                continue

    def _answer(self, response: "httpx.Response", kind: type[T]) -> T:
        """Decodes the gateway's answer, or raises its refusal."""
        self._check_entry(response)
        content = self._content(response)
        if response.status_code == 202:
            raise _NotYet
        try:
            if response.is_success:
                return decode(content, type=kind)
            refusal = decode(content, type=Refusal)
        except (MsgspecError, ValueError):
            raise LinkDown(f"{self.address} gave an answer that cannot be read here ({response.status_code}).") from None
        if refusal.code in NO_ANSWER:
            raise LinkDown(f"{self.address} did not get the request, or could not answer it ({refusal.text}).")
        raise as_error(refusal)

    def _content(self, response: "httpx.Response") -> bytes:
        content = bytearray()
        for piece in response.iter_raw():
            content += piece
            if len(content) > ANSWER_LIMIT_BYTES:
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

    def _ticket_headers(self, ticket: Ticket) -> dict[str, str]:
        """The headers that identify a machine."""
        return {"heloco-machine": f"{ticket.machine} {ticket.secret}", "heloco-run": self._run}

    # ---- the run

    def describe(self) -> m.RunInfo:
        info = self._ask("GET", "describe", m.RunInfo)
        self._run = info.run
        return info

    def join(self, name: str, *, returning: Ticket | None, layout: Layout | None) -> m.Joined:
        entries = layout.entries if layout else None
        request = m.JoinRequest(
            name=m.printable(name, m.SHORT_TEXT_LIMIT) or "machine", version=heloco.__version__, layout=entries
        )
        joined = self._post("join", request, m.Joined, headers=self._ticket_headers(returning) if returning else {})
        self._run = joined.run
        return joined

    def next_round(self, ticket: Ticket, wait_s: float, *, evaluates: bool = False) -> m.RoundAnswer:
        request = m.RoundRequest(wait_s=wait_s, evaluates=evaluates)
        return self._post("round", request, m.RoundAnswer, headers=self._ticket_headers(ticket))  # type: ignore[arg-type]

    def beat(self, ticket: Ticket, steps: int) -> m.BeatAnswer:
        try:
            return self._post("beat", m.Beat(steps=steps), m.BeatAnswer, purpose="beats", headers=self._ticket_headers(ticket))
        except UserError as error:  # the next request of the worker will raise it
            raise LinkDown(str(error)) from error

    def abandon(self, ticket: Ticket, text: str) -> None:
        self._post("abandon", m.Reason(text=m.printable(text)), headers=self._ticket_headers(ticket))

    def leave(self, ticket: Ticket, text: str) -> None:
        self._post("leave", m.Reason(text=m.printable(text)), headers=self._ticket_headers(ticket))

    def close(self) -> None:
        """Closes the connections. The next request would open new ones."""
        with self._opening:
            for open_client in self._clients.values():
                open_client.close()
            self._clients.clear()

    # ---- looking at it, and controlling it

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
            raise link_error(self.address, error) from error

    def stop(self, text: str) -> None:
        self._post_long("stop", m.Reason(text=m.printable(text)))

    def suspend(self, text: str) -> None:
        self._post_long("suspend", m.Reason(text=m.printable(text)))

    def pause(self, text: str) -> None:
        self._post("pause", m.Reason(text=m.printable(text)))

    def unpause(self) -> None:
        self._ask("POST", "unpause", m.Done)

    def evict(self, machine: str, text: str) -> None:
        self._post("evict", m.MachineId(machine=machine, text=m.printable(text)))

    def tokens(self) -> m.TokenList:
        return self._ask("GET", "tokens", m.TokenList)

    def new_token(self, right: Right, note: str) -> m.TokenInfo:
        return self._post("tokens", m.TokenRequest(right=right, note=m.printable(note)), m.TokenInfo)

    def revoke_token(self, token_id: str) -> None:
        self._post("tokens/revoke", m.TokenId(id=token_id))

    # ---- tensors, down

    def fetch(self, ticket: Ticket, key: RoundKey, layout: Layout, digest: str) -> dict[str, Tensor]:
        buffer = self._download("start", key, key._asdict(), ticket, layout.size)
        if xxhash.xxh3_128_hexdigest(buffer) != digest:
            raise LinkDown("What arrived is not the round's start (its digest differs).")
        return self._view_checked(layout, buffer)

    def fetch_evaluated(self, ticket: Ticket, job: m.EvaluationJob, layout: Layout) -> dict[str, Tensor]:
        buffer = self._download("evaluation", job.arrival, {"arrival": job.arrival}, ticket, layout.size)
        if xxhash.xxh3_128_hexdigest(buffer) != job.digest:
            raise LinkDown("What arrived is not the model to evaluate (its digest differs).")
        return self._view_checked(layout, buffer)

    def send_scores(self, ticket: Ticket, result: EvaluationResult) -> None:
        self._post("evaluation", result, headers=self._ticket_headers(ticket))

    def report_scores(self, ticket: Ticket, report: ScoreReport) -> None:
        self._post("scores", report, headers=self._ticket_headers(ticket))

    def fetch_final(self, ticket: Ticket, layout: Layout) -> dict[str, Tensor]:
        return self._view_checked(layout, self._download("final", None, {}, ticket, layout.size))

    def _view_checked(self, layout: Layout, buffer: bytearray) -> dict[str, Tensor]:
        if buffer[: len(layout.header)] != layout.header:
            raise Refused(RefusalCode.LAYOUT, "What arrived is not of this run's model: names, shapes or dtypes differ.")
        return view(layout, buffer)

    def _download(self, path: str, key: RoundKey | int | None, query: dict[str, Any], ticket: Ticket, size: int) -> bytearray:
        """Downloads a file, and continues after interruptions. If a try brings no byte, it keeps the partial file for the
        next call and raises `LinkDown`."""
        buffer, bytes_received = self._room, 0
        if self._partial is not None and self._partial[0] == key and len(self._partial[1]) == size:
            _, buffer, bytes_received = self._partial
        elif len(buffer) != size:
            buffer = self._room = bytearray(size)
        self._partial = None
        while bytes_received < size:
            bytes_before = bytes_received
            bytes_received, cut = self._download_more(path, query, ticket, buffer, bytes_received)
            if cut is not None and bytes_received == bytes_before:
                self._partial = (key, buffer, bytes_received)
                raise cut
        return buffer

    def _download_more(
        self, path: str, query: dict[str, Any], ticket: Ticket, buffer: bytearray, bytes_received: int
    ) -> tuple[int, LinkDown | None]:
        """Continues a download. Returns the bytes received in total, and the error that interrupted it, if any."""
        import httpx

        target, headers = memoryview(buffer), {"range": f"bytes={bytes_received}-", **self._ticket_headers(ticket)}
        try:
            with self._client("rounds").stream("GET", path, params=query, headers=headers) as response:
                if response.status_code not in (200, 206):
                    self._answer(response, m.Done)
                bytes_received = self._first_byte(response, bytes_received, len(buffer))
                for piece in response.iter_raw():
                    target[bytes_received : bytes_received + len(piece)] = piece
                    bytes_received += len(piece)
            return bytes_received, None
        except httpx.TransportError as error:
            trouble = link_error(self.address, error)
            if isinstance(trouble, UserError):
                raise trouble from error
            return bytes_received, trouble

    def _first_byte(self, response: "httpx.Response", bytes_received: int, size: int) -> int:
        """The offset of the answer's first byte. The stated length must be exactly what is missing."""
        begin = bytes_received if response.status_code == 206 else 0
        if response.headers.get("content-length") != str(size - begin):
            raise Refused(RefusalCode.LAYOUT, f"The start of the round does not have {size} bytes: it is of another model.")
        return begin

    # ---- tensors, up

    def hand_in(
        self, ticket: Ticket, key: RoundKey, layout: Layout, tensors: Mapping[str, Tensor], report: m.ContributionReport
    ) -> m.Acknowledgement:
        headers, query = self._ticket_headers(ticket), key._asdict()
        progress = self._ask("GET", "contribution", m.UploadState, params=query, headers=headers)
        if progress.ack is not None:
            return progress.ack
        digest = self.send_tensors("contribution", query, headers, progress.size, layout, tensors)
        commit = m.ContributionCommit(
            worker=key.worker, round=key.round, version=key.version, digest=digest, loss=report.loss,
            last_loss=report.last_loss, samples=report.samples, units=report.units,
        )  # fmt: skip
        return self._post_long("contribution/commit", commit, m.Acknowledgement, headers=headers)

    def send_model(self, ticket: Ticket, layout: Layout, tensors: Mapping[str, Tensor], names: list[str]) -> None:
        headers = self._ticket_headers(ticket)
        size = self._post("model", m.ModelOffer(layout=layout.entries), m.UploadState, headers=headers).size
        digest = self.send_tensors("model", {}, headers, size, layout, tensors)
        self._post_long("model/commit", m.ModelCommit(names=tuple(names), digest=digest), headers=headers)

    def send_tensors(
        self,
        path: str,
        query: dict[str, Any],
        ticket_headers: dict[str, str],
        offset: int,
        layout: Layout,
        tensors: Mapping[str, Tensor],
    ) -> str:
        """Sends the file with these tensors from `offset` on, piece by piece. Returns the digest of the whole file."""
        if offset == layout.size:
            return digest_of(layout, tensors)
        digest = xxhash.xxh3_128()
        parts = pieces_after(offset, layout, tensors, digest)
        content = (part[at : at + PIECE] for part in parts for at in range(0, len(part), PIECE))
        headers = {"content-length": str(layout.size - offset), **ticket_headers}
        self._ask("PUT", path, m.UploadState, params=query | {"offset": offset}, content=content, headers=headers)
        return digest.hexdigest()

    # ---- for `heloco doctor`

    def clock(self) -> float:
        """The synchronizer's time, in seconds since 1970."""
        return self._ask("GET", "clock", dict[str, float])["time_s"]

    def probe_down(self, size: int) -> float:
        """Seconds to download this many bytes."""
        import httpx

        began, bytes_received = time.perf_counter(), 0
        try:
            with self._client("rounds").stream("GET", "probe", params={"bytes": size}) as response:
                if not response.is_success:
                    self._answer(response, m.Done)
                bytes_received = sum(map(len, response.iter_raw()))
        except httpx.TransportError as error:
            raise link_error(self.address, error) from error
        assert bytes_received == size
        return time.perf_counter() - began

    def probe_up(self, size: int) -> float:
        """Seconds to upload this many bytes."""
        piece, began = memoryview(bytes(PIECE)), time.perf_counter()
        content = (piece[: min(PIECE, size - at)] for at in range(0, size, PIECE))
        self._ask("POST", "probe", dict[str, int], content=content, headers={"content-length": str(size)})
        return time.perf_counter() - began


class _NotYet(Exception):
    """The call is still under way: repeat the request."""
