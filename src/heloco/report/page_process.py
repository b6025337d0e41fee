"""The live page of a served run in a process of its own, so that looking at a run takes neither memory nor time from it.

The process is started by the first look and ends when nobody has looked for a while. It listens on a socket in a folder that only
this user can enter; the process that passes requests on decides who may look. It also ends when the process that started it does.
While it runs, that one writes the run's status to its standard input, a line each.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlencode

import msgspec

from heloco.cluster.protocol.messages import Status
from heloco.errors import UserError

if TYPE_CHECKING:
    import httpcore

    from heloco.report.run_state import LastStatus

IDLE_S = 60.0
"""Seconds without a look after which the process ends."""
START_S = 60.0
STATUS_EVERY_S = 1.0
NICENESS = 10
"""The niceness of the page's process, so that the run itself goes first."""
PATHS, QUERY, HEADERS = ("/", "/events"), ("seen",), (b"last-event-id",)
"""All that the page looks at in a request."""

Scope = Any
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


class PageProcess:
    """An ASGI app that passes requests on to the page's process."""

    def __init__(self, folder: Path, status: Callable[[], Status] | None = None) -> None:
        """`status` gives the run's own status, and may be called from any thread. None: the folder alone tells its state."""
        self._folder, self._status = folder, status
        self._process: subprocess.Popen[bytes] | None = None
        self._pool: httpcore.AsyncConnectionPool | None = None
        self._place: Path | None = None
        self._starting = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            disconnection = asyncio.ensure_future(_disconnected(receive))
            try:
                await self._show(scope, send, disconnection)
            finally:
                disconnection.cancel()

    async def _show(self, scope: Scope, send: Send, disconnection: "asyncio.Future[None]") -> None:
        """Passes an answer on until its end, or until the browser has gone. Before the answer begins nothing is cancelled,
        neither the start of the process nor a connection to it."""
        import httpcore

        path, has_begun = scope["path"].removeprefix(scope.get("root_path", "")), False
        if path not in PATHS:
            await _refuse(send, 404, b"There is no such page.")
            return
        pool = None
        for is_last in (False, True):  # the process may have ended a moment ago, because nobody looked
            try:
                pool = await self.ready(unlike=pool)
                async with pool.stream(scope["method"], f"http://page{path}?{_query(scope)}", headers=_headers(scope)) as answer:
                    headers = [(k.lower(), v) for k, v in answer.headers if k.lower() not in (b"date", b"server")]
                    has_begun = True
                    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
                    chunks = aiter(answer.aiter_stream())
                    while (chunk := await _next(chunks, disconnection)) is not None:
                        await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    if disconnection.done():
                        return
                await send({"type": "http.response.body", "body": b""})
                return
            except (httpcore.NetworkError, httpcore.ProtocolError, OSError, MemoryError, subprocess.SubprocessError):
                if has_begun:
                    return  # the answer stays without its end, and the browser asks again
                if is_last:
                    await _refuse(send, 503, b"The page cannot be shown at the moment: try again.")

    async def ready(self, unlike: "httpcore.AsyncConnectionPool | None" = None) -> "httpcore.AsyncConnectionPool":
        """Connections to the page's process, which is started if it does not run.

        `unlike`: those that failed. The process is then started again."""
        async with self._starting:
            if self._pool in (None, unlike) or self._process is None or self._process.poll() is not None:
                await self._end()
                self._pool = await asyncio.to_thread(self._start)
            assert self._pool is not None
            return self._pool

    def _start(self) -> "httpcore.AsyncConnectionPool":
        from heloco.report.page_connection import connection_pool

        self._place = Path(tempfile.mkdtemp(prefix="heloco-page-"))
        address = self._place / "socket"
        command = [sys.executable, "-P", "-m", __name__, str(self._folder), str(address)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, bufsize=0)
        if self._status is not None:
            threading.Thread(target=_pass_on, args=(self._status, self._process), name="heloco-page", daemon=True).start()
        limit_s = time.monotonic() + START_S
        while not address.exists():
            if self._process.poll() is not None or time.monotonic() > limit_s:
                raise subprocess.SubprocessError("the page's process does not start")
            time.sleep(0.02)
        return connection_pool(str(address))

    async def _end(self) -> None:
        if self._pool is not None:
            await self._pool.aclose()
            self._pool = None
        self.close()

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdin is not None
            if self._status is None:  # else the thread that writes to it closes it
                self._process.stdin.close()
            self._process = None
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)
            self._place = None


def _pass_on(status: Callable[[], Status], process: "subprocess.Popen[bytes]") -> None:
    """Writes the run's status to the process again and again, until it has ended."""
    assert process.stdin is not None
    with process.stdin, contextlib.suppress(OSError):  # the process has ended
        while process.poll() is None:
            with contextlib.suppress(UserError, RuntimeError):  # the run is about to end
                process.stdin.write(msgspec.json.encode(status()) + b"\n")
            time.sleep(STATUS_EVERY_S)


def _query(scope: Scope) -> str:
    """What the page looks at in a query; the key has done its work."""
    query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    return urlencode({name: values[0] for name, values in query.items() if name in QUERY})


def _headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    return [
        (b"host", b"page"),
        (b"accept-encoding", b"identity"),
        *((name, value) for name, value in scope["headers"] if name in HEADERS),
    ]


async def _next(chunks: AsyncIterator[bytes], disconnection: "asyncio.Future[None]") -> bytes | None:
    """The next chunk, or None if there is none or the browser has gone."""
    chunk = asyncio.ensure_future(anext(chunks, None))
    await asyncio.wait((chunk, disconnection), return_when=asyncio.FIRST_COMPLETED)
    if not disconnection.done():
        return chunk.result()
    chunk.cancel()
    await asyncio.gather(chunk, return_exceptions=True)
    return None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refuse(send: Send, status: int, text: bytes) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(text))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


# ---- the process


class _Idle:
    """ASGI middleware that measures how long nobody has looked at the page."""

    def __init__(self, app: Any) -> None:
        self._app, self._open, self._last_s = app, 0, time.monotonic()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1
            self._last_s = time.monotonic()

    @property
    def seconds(self) -> float:
        return 0.0 if self._open else time.monotonic() - self._last_s


def _end(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    os._exit(0)


def _follow_the_starter(place: Path, last_status: "LastStatus") -> None:
    """Standard input is a pipe from the process that started this one: it has the run's statuses, and ends when that process
    does, however that ends."""
    for line in sys.stdin.buffer:
        with contextlib.suppress(msgspec.MsgspecError):
            last_status.take(msgspec.json.decode(line, type=Status))
    _end(place)


def main(folder: Path, address: Path) -> None:
    """Shows the run in `folder` at the socket `address`, whose folder is removed at the end."""
    import uvicorn

    from heloco.report.live import app_of_folder
    from heloco.report.run_state import LastStatus

    os.nice(NICENESS)
    last_status = LastStatus()
    threading.Thread(target=_follow_the_starter, args=(address.parent, last_status), daemon=True).start()
    app = _Idle(app_of_folder(folder, last_status))
    server = uvicorn.Server(uvicorn.Config(app, uds=str(address), log_level="critical", lifespan="off"))

    def end_when_idle() -> None:
        while app.seconds < IDLE_S:
            time.sleep(1.0)
        _end(address.parent)

    threading.Thread(target=end_when_idle, daemon=True).start()
    server.run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
