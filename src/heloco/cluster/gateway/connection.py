"""uvicorn's protocol, with what it lacks for a server that strangers can reach: limits before a request is whole, and a buffer
of its own, so that a large body does not take fresh memory from the system for every piece."""

import asyncio
import json
from importlib.util import find_spec
from typing import Any

BUFFER = 1 << 16
HEADERS = 1 << 16
"""Bytes that may come before a request begins: its line and its headers."""
HEADERS_S = 20.0
"""Seconds that they may take."""


def fastest_http() -> type[Any]:
    """uvicorn's protocol over httptools (C) where that is installed, else h11 (Python)."""
    if find_spec("httptools") is not None:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

        return HttpToolsProtocol
    from uvicorn.protocols.http.h11_impl import H11Protocol

    return H11Protocol


def fastest_loop() -> str:
    return "uvloop" if find_spec("uvloop") is not None else "asyncio"


class Connection(asyncio.BufferedProtocol):
    """A connection, handed on to uvicorn's protocol."""

    def __init__(self, **options: Any) -> None:
        self._http = fastest_http()(**options)
        self._http.send_400_response = self._refuse
        self._end, self._http.shutdown = self._http.shutdown, self._shutdown
        self._loop: asyncio.AbstractEventLoop = self._http.loop
        self._buffer = memoryview(bytearray(BUFFER))
        self._transport: Any = None
        self._early = 0
        """Bytes that belong to no request yet, or to none any more."""
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._http.connection_made(transport)
        self._expect_request()

    def connection_lost(self, error: Exception | None) -> None:
        self._request_began()
        self._http.connection_lost(error)

    def get_buffer(self, _: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, count: int) -> None:
        before = self._http.cycle
        self._http.data_received(self._buffer[:count])
        now = self._http.cycle
        if now is not None and (now is not before or not now.response_complete):
            self._request_began()
        else:
            self._expect_request()
            self._early += count
            if self._early > HEADERS and not (now is not None and now.more_body):
                self._refuse("the request's headers are too long")

    def _expect_request(self) -> None:
        if self._deadline is None:
            self._deadline = self._loop.call_later(HEADERS_S, self._transport.abort)

    def _request_began(self) -> None:
        self._early = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def eof_received(self) -> None:
        self._http.eof_received()

    def pause_writing(self) -> None:
        self._http.pause_writing()

    def resume_writing(self) -> None:
        self._http.resume_writing()

    def _shutdown(self) -> None:
        """The server ends. One that is idle ends at once: it would not notice a polite end before its next request."""
        idle = self._http.cycle is None or self._http.cycle.response_complete
        if idle and not self._transport.get_write_buffer_size():
            self._transport.abort()
        else:
            self._end()

    def _refuse(self, _: str) -> None:
        """What is not HTTP is answered like every other refusal."""
        text = json.dumps({"code": "http", "text": "That is no HTTP/1.1 request, or its headers are too long."})
        head = f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\ncontent-length: {len(text)}\r\nconnection: close"
        self._transport.write(f"{head}\r\n\r\n{text}".encode())
        self._transport.close()
