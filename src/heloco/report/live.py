"""The report of runs that are still going: the same page, served, and told of every change by server-sent events.

One task looks at the runs' files and tells all that are connected; a page that was away gets everything anew. Nothing but the
page and its events is served, by default to this machine alone.
"""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from heloco.errors import UserError
from heloco.report.html import as_json, page_data, render
from heloco.report.reading import Run

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

LOOK_EVERY_S = 0.5
SHARE_OF_TIME = 0.3  # at most, for making the page's data anew: a long run's take a while
PARTS = ("starlette", "uvicorn")


def check_parts() -> None:
    missing = [name for name in PARTS if find_spec(name) is None]
    if missing:
        raise UserError(f'`heloco watch` needs {" and ".join(missing)}: pip install "heloco[report]"')


class Feed:
    """The page's data, made anew when the runs' files have grown."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.data = page_data(runs)
        self.version = 0
        self._changed = asyncio.Event()

    async def watch(self, look_every_s: float = LOOK_EVERY_S) -> None:
        while True:
            await asyncio.sleep(look_every_s)
            began = time.perf_counter()
            data = await asyncio.to_thread(self._look)
            if data is not None:
                self.data = data
                self.version += 1
                self._changed.set()
                self._changed = asyncio.Event()
                await asyncio.sleep((time.perf_counter() - began) * (1 / SHARE_OF_TIME - 1))

    def _look(self) -> dict[str, Any] | None:
        """The data if there is anything new. What can no longer be read is said on the page, which keeps what it had."""
        try:
            changed = [run.refresh() for run in self.runs]
        except UserError as error:
            told = [*self.data["notes"], str(error)]
            return None if str(error) in self.data["notes"] else {**self.data, "notes": told}
        return page_data(self.runs) if any(changed) else None

    async def events(self, seen: int) -> AsyncIterator[str]:
        """As server-sent events: the data whenever it is newer than what was seen, and a sign of life in between."""
        while True:
            if self.version > seen:
                seen = self.version
                yield f"id: {seen}\ndata: {as_json(self.data)}\n\n"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(15):
                    await self._changed.wait()
                continue
            yield ": still here\n\n"


def app(runs: Sequence[Run], look_every_s: float = LOOK_EVERY_S) -> "Starlette":
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, StreamingResponse
    from starlette.routing import Route

    feeds: list[Feed] = []

    @asynccontextmanager
    async def lifespan(_: "Starlette") -> AsyncIterator[None]:
        feeds.append(Feed(runs))
        watching = asyncio.create_task(feeds[0].watch(look_every_s))
        yield
        watching.cancel()

    async def page(_: "Request") -> "Response":
        content = await asyncio.to_thread(render, {**feeds[0].data, "version": feeds[0].version}, live=True)
        return HTMLResponse(content, headers={"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"})

    async def events(request: "Request") -> "Response":
        seen = request.headers.get("last-event-id") or request.query_params.get("seen", "-1")
        begin = int(seen) if seen.removeprefix("-").isdigit() else -1
        return StreamingResponse(feeds[0].events(begin), media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    return Starlette(routes=[Route("/", page), Route("/events", events)], lifespan=lifespan)


def listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        raise UserError(
            f"Nothing can be served at {host}:{port} ({error.strerror}): choose another --port, or --port 0 for any free one."
        ) from error
    return listening


def serve(runs: Sequence[Run], host: str, port: int, began: Callable[[str], Any]) -> None:
    """Serves until it is interrupted. `began` is told the page's address."""
    check_parts()
    import uvicorn

    listening = listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    began(f"http://{shown}:{listening.getsockname()[1]}")
    config = uvicorn.Config(app(runs), log_level="warning", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listening])
