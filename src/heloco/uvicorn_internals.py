"""All that is used of uvicorn beyond its documentation, with the reason for each. Tried with uvicorn 0.54, which is why later
versions are excluded. `tests/cluster/test_uvicorn_internals.py` fails when a new version has other names.

Http           the protocol of one connection. uvicorn has no way to refuse a second request on a connection that is still
               answering the first, or to answer in our own words what is no HTTP.
OwnListener    a server with a listener of ours. uvicorn has no way to count connections before TLS.
EndingServer   a server that says when it ends. Otherwise uvicorn cancels the streams of open pages, with a traceback for each.
               Its log is silent from then on: what cannot be sent in the time that is left is cut off, also with tracebacks.
should_exit    makes a server in another thread end. There is no documented way.
The modules    that uvicorn imports when a server starts are imported here, so that a process that is forked later has them.
"""

import contextlib
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn
import uvicorn.lifespan.on
import uvicorn.protocols.http.auto
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

with contextlib.suppress(ImportError):  # uvloop is not for every system
    import uvicorn.loops.uvloop

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class Pipelined(Exception):
    """A request came before the previous one was answered."""


class Owner(Protocol):
    """The part of a connection that uvicorn's protocol calls."""

    async def serve(self, app: "ASGIApp", scope: "Scope", receive: "Receive", send: "Send") -> None: ...
    def refuse(self, *, pipelined: bool) -> None:
        """Answers bytes that are not a valid request, and closes the connection."""

    def shut_down(self) -> None:
        """Called when the server stops."""


class Http(HttpToolsProtocol):
    """uvicorn's protocol, with one request at a time."""

    def __init__(self, config: uvicorn.Config, server_state: Any, app_state: dict[str, Any], owner: Owner) -> None:
        super().__init__(config, server_state, app_state)
        self._owner, self.served_app, self._is_pipelined = owner, self.app, False
        self.app: Any = self._serve

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        await self._owner.serve(self.served_app, scope, receive, send)

    def feed(self, data: memoryview) -> bool:
        """Parses bytes. True if a request is under way now, or began and was answered during the call."""
        before = self.cycle
        self.data_received(data)  # type: ignore[arg-type]
        return self.cycle is not None and (self.cycle is not before or self.is_answering)

    @property
    def is_answering(self) -> bool:
        """Whether a request is under way whose answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def is_discarding(self) -> bool:
        """Whether the rest of a body is still arriving after its request was answered."""
        return self.cycle is not None and self.cycle.more_body

    def on_message_begin(self) -> None:
        """httptools calls this before it reads anything else of a request, so a pipelined request takes no memory."""
        if self.is_answering:
            self._is_pipelined = True
            raise Pipelined
        super().on_message_begin()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancels the keep-alive timer, which uvicorn leaves and which would hold the connection in memory."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self.app = self.served_app

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's words
        self._owner.refuse(pipelined=self._is_pipelined)

    def shutdown(self) -> None:
        self._owner.shut_down()

    def finish(self) -> None:
        """Closes the connection when the request under way is answered."""
        super().shutdown()


class Listening(Protocol):
    """The part of `asyncio.Server` that uvicorn's server uses."""

    def close(self) -> None: ...
    async def wait_closed(self) -> None: ...


class EndingServer(uvicorn.Server):
    """uvicorn's server, which calls `before_end` before it waits for open connections."""

    def __init__(self, config: uvicorn.Config, before_end: Callable[[], None]) -> None:
        super().__init__(config)
        self._before_end = before_end

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._before_end()
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await super().shutdown(sockets)


class OwnListener(uvicorn.Server):
    """uvicorn's server with our own listener. `open_listener` is called in the server's loop, with a
    function that makes the protocol of a connection."""

    def __init__(self, config: uvicorn.Config, open_listener: Callable[[Callable[[Owner], Http]], Listening]) -> None:
        super().__init__(config)
        self._open_listener = open_listener

    async def startup(self, sockets: Any = None) -> None:  # noqa: ARG002 - the listener has them
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise RuntimeError("the application did not start")
        self.servers: list[Any] = [self._open_listener(self._make_http)]
        self.started = True

    def end_soon(self) -> None:
        """Makes the server end. May be called from any thread."""
        self.should_exit = True

    def _make_http(self, owner: Owner) -> Http:
        return Http(self.config, self.server_state, self.lifespan.state, owner)
