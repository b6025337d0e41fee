"""One connection, after TLS: uvicorn's protocol, with what it lacks for a server that strangers can
reach.

It adds limits before a request is complete, one request at a time, and an answer that ends for
every request. All connections read into one buffer, so that a large body does not take fresh memory
from the system for every piece.
"""

import asyncio
import json
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from heloco.cluster.gateway.admission import ADMIT, Admission, App, Receive, Scope, Send, Visitor
from heloco.cluster.gateway.auth import unread
from heloco.uvicorn_internals import Http, Owner

BUFFER = memoryview(bytearray(1 << 16))
"""Shared by all connections: the bytes of one read are used up before the next read."""
HEADERS = 1 << 16
"""At most this many bytes may come before a request's body: its request line and headers."""
HEADERS_S = 20.0
"""Timeout for the request line and headers."""
NO_HTTP = "This is not an HTTP/1.1 request, or its headers are too long."
PIPELINED = "One request at a time on a connection: wait for the answer before you send the next one."


def fastest_loop() -> str:
    return "uvloop" if find_spec("uvloop") is not None else "asyncio"


class Connection(asyncio.BufferedProtocol):
    """A connection, handed on to uvicorn's protocol."""

    def __init__(self, make_http: Callable[[Owner], Http], visitor: Visitor, admission: Admission) -> None:
        self._make_http, self._visitor, self._admission = make_http, visitor, admission
        self._http: Http | None = None
        """Made when the connection opens, and None again when it is closed."""
        self._transport: Any = None
        self._unclaimed_bytes = 0
        """Bytes since the last request that belong to no request yet."""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._visitor.end = self._transport.abort
        self._http = self._make_http(self)
        self._http.connection_made(self._transport)
        self._expect_request()

    def connection_lost(self, error: Exception | None) -> None:
        self._admission.leave(self._visitor)
        self._request_began()
        if self._http is not None:
            self._http.connection_lost(error)
        self._http = self._transport = None  # breaks the cycle of references, so that the memory is freed at once

    def get_buffer(self, _: int) -> memoryview:
        return BUFFER

    def buffer_updated(self, count: int) -> None:
        if self._transport.is_closing():
            return
        assert self._http is not None
        try:
            is_request = self._http.feed(BUFFER[:count])
        except MemoryError:
            self._transport.abort()
            return
        if is_request:
            self._request_began()
        else:
            self._expect_request()
            self._unclaimed_bytes += count
            if self._unclaimed_bytes > HEADERS and not self._http.is_discarding:
                self.refuse(pipelined=False)

    def _expect_request(self) -> None:
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(HEADERS_S, self._transport.abort)

    def _request_began(self) -> None:
        self._unclaimed_bytes = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def eof_received(self) -> None:
        assert self._http is not None
        self._http.eof_received()

    def pause_writing(self) -> None:
        assert self._http is not None
        self._http.pause_writing()

    def resume_writing(self) -> None:
        assert self._http is not None
        self._http.resume_writing()

    # ---- what uvicorn's protocol asks for

    async def serve(self, app: App, scope: Scope, receive: Receive, send: Send) -> None:
        scope["extensions"] = {**scope.get("extensions", {}), ADMIT: self._admit}
        send = complete_answer(send)
        if self._visitor.is_admitted:
            send = close_unauthorized(send)
        if scope["method"] == "HEAD":
            send = without_body(send)
        if unread(scope) and any(name == b"expect" for name, _ in scope["headers"]):
            receive, send = close_unread(receive, send)
        await app(scope, receive, send)

    def _admit(self) -> bool:
        return self._admission.admit(self._visitor)

    def shut_down(self) -> None:
        """Closes an idle connection at once, and a busy one after its answer."""
        assert self._http is not None
        if not self._http.is_answering and not self._transport.get_write_buffer_size():
            self._transport.abort()
        else:
            self._http.finish()

    def refuse(self, *, pipelined: bool) -> None:
        """Answers bytes that are not HTTP, or a pipelined request, and closes the connection."""
        if self._transport.is_closing():
            return
        text = json.dumps({"code": "http", "text": PIPELINED if pipelined else NO_HTTP})
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\nconnection: close"
        self._transport.write(f"{head}\r\n\r\n{text}".encode())
        self._transport.close()


def complete_answer(send: Send) -> Send:
    """Ends an answer with its last byte. A client that has all bytes may send the next request before the app has said that the
    answer is complete."""
    bytes_left, is_over = -1, False

    async def sending(message: Any) -> None:
        nonlocal bytes_left, is_over
        if is_over:
            return
        if message["type"] == "http.response.start":
            lengths = [value for name, value in message["headers"] if name.lower() == b"content-length"]
            bytes_left = int(lengths[0]) if lengths else -1
        elif bytes_left >= 0:
            bytes_left -= len(message.get("body", b""))
            if is_over := bytes_left <= 0:
                message = {**message, "more_body": False}
        await send(message)

    return sending


def without_body(send: Send) -> Send:
    """For HEAD: the answer ends with its headers, even where the body would have no end. A refusal
    says that its body is empty, because some clients wait for the body in spite of HEAD."""

    async def sending(message: Any) -> None:
        if message["type"] != "http.response.start":
            return
        if message["status"] >= 400:
            headers = [(name, value) for name, value in message["headers"] if name not in (b"content-length", b"content-type")]
            message = {**message, "headers": [*headers, (b"content-length", b"0")]}
        await send(message)
        await send({"type": "http.response.body", "body": b""})

    return sending


def close_unauthorized(send: Send) -> Send:
    """For a connection that is admitted: when its credentials are no longer good, it must come again as
    a stranger, because it has a place that only machines may have."""

    async def sending(message: Any) -> None:
        await send(_close_connection(message) if message.get("status") == 401 else message)

    return sending


def _close_connection(message: Any) -> Any:
    return {**message, "headers": [*message["headers"], (b"connection", b"close")]}


def close_unread(receive: Receive, send: Send) -> tuple[Receive, Send]:
    """For "Expect: 100-continue": a client that gets its answer before 100 Continue may send the body
    or not. So the next bytes could be anything, and the connection must end."""
    is_body_wanted = False

    async def receiving() -> Any:
        nonlocal is_body_wanted
        is_body_wanted = True
        return await receive()

    async def sending(message: Any) -> None:
        starts = message["type"] == "http.response.start"
        await send(_close_connection(message) if starts and not is_body_wanted else message)

    return receiving, sending
