"""The report of runs that are still going: the same page, served, with every change sent to it as a server-sent event.

One task looks at the runs' files and sends what is new to all that are connected. A page that was away gets all changes since
then, or everything if that is shorter. The page and its changes are made once for all that look. Another task looks at the runs'
states, which are events of their own: they change also if no file does, and are sent as a sign of life too.
Nothing but the page and its events is served, by default to this machine alone.
"""

import asyncio
import contextlib
import logging
import re
import socket
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from heloco.errors import UserError
from heloco.hosts import is_loopback
from heloco.records.run_files import CONFIG
from heloco.report.differences import differences
from heloco.report.own_names import OwnNames, names_of_this_machine
from heloco.report.page_data import page_data
from heloco.report.page_writer import as_json, render_report, render_waiting
from heloco.report.run_reader import Run, read_runs
from heloco.report.run_state import LastStatus, watch_states

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

log = logging.getLogger("heloco.page")

LOOK_EVERY_S = 0.5
SHARE_OF_TIME = 0.3  # at most, for making the page's data: a long run's take a while
PARTS = ("starlette", "uvicorn", "httptools")
VERSION = re.compile("-?[0-9]{1,15}")
STATE_EVERY_S = 1.0
STATE_BYTES_PER_S = 20_000
"""Larger states, of many machines, are sent less often."""
SIGN_OF_LIFE_S = 5.0
"""A page that has had no event for much longer than this says that its connection is lost."""
CHANGES_KEPT = 100
"""The number of versions that a page may be behind and still get only the changes."""


def check_parts() -> None:
    """Raises UserError, with the command that installs them, if packages that serve the page are missing."""
    missing_modules = [name for name in PARTS if find_spec(name) is None]
    if missing_modules:
        raise UserError(f'`heloco watch` needs {" and ".join(missing_modules)}: pip install "heloco[report]"')


class Feed:
    """The page's data, made again when the runs' files have grown. What is sent is encoded once for all pages."""

    def __init__(self, runs: Sequence[Run], statuses: Mapping[Path, LastStatus] | None = None) -> None:
        """`statuses`: by a run's folder, what the run says of itself."""
        self.runs = runs
        self.data = page_data(runs)
        self._reading = threading.Lock()
        """Held while the runs are read on, or looked at as they stand."""
        self._states = watch_states(runs, statuses)
        self._state = self._look_at_states()
        """The runs' states as an event."""
        self.version = time.time_ns() // 1_000_000  # above all versions of an earlier process, which an open page may know
        self.over = False
        self._is_behind = False
        """Whether the runs have been read further than the data shows."""
        self._data_json = ""
        self._html, self._html_version = b"", -1
        self._rendering = asyncio.Lock()
        self._changes: deque[tuple[int, str]] = deque(maxlen=CHANGES_KEPT)
        """(version, its changes from the version before, as JSON without brackets)"""
        self._changed = asyncio.Event()

    def end(self) -> None:
        """Ends all streams of events."""
        self.over = True
        self._changed.set()

    async def watch(self, look_every_s: float = LOOK_EVERY_S) -> None:
        """Looks at the runs again and again, and sends what has changed to everyone who looks at the page."""
        last_error = ""
        while True:
            await asyncio.sleep(look_every_s)
            began = time.perf_counter()
            try:
                data = await asyncio.to_thread(self._look)
            except Exception as error:  # no memory, or no thread, say: the next look may have it
                if repr(error) != last_error:
                    log.warning("The page could not be brought up to date, and is tried again.", exc_info=error)
                last_error = repr(error)
                continue
            last_error = ""
            if data is not None:
                self._take(*data)
                await asyncio.sleep((time.perf_counter() - began) * (1 / SHARE_OF_TIME - 1))

    async def watch_states(self, look_every_s: float = LOOK_EVERY_S) -> None:
        """Looks at the runs' states again and again, and sends them when they have changed."""
        while True:
            try:
                state = await asyncio.to_thread(self._look_at_states)
            except (OSError, MemoryError, RuntimeError):  # no descriptor or no thread, say: the next look may have it
                state = self._state
            if state != self._state:
                self._state = state
                self._wake()
                await asyncio.sleep(STATE_EVERY_S + len(state) / STATE_BYTES_PER_S)
            await asyncio.sleep(look_every_s)

    def _look_at_states(self) -> str:
        with self._reading:
            states = [watch.look() for watch in self._states]
        return f"event: state\ndata: {msgspec.json.encode(states).decode()}\n\n"

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _take(self, data: dict[str, Any], changes: str) -> None:
        self.data, self._data_json = data, ""
        self.version += 1
        self._changes.append((self.version, changes))
        self._wake()

    def _look(self) -> tuple[dict[str, Any], str] | None:
        """Reads the runs again. Returns the data and its changes, or None if nothing is new. If a run can no longer be read, the
        page says so and keeps the data it had."""
        try:
            with self._reading:
                for run in self.runs:
                    self._is_behind |= run.refresh()
            if not self._is_behind:
                return None
            data = page_data(self.runs)
            self._is_behind = False
        except UserError as error:
            if str(error) in self.data["notes"]:
                return None
            data = {**self.data, "notes": [*self.data["notes"], str(error)]}
        return data, as_json(differences(self.data, data))[1:-1]

    def _next_event(self, seen_version: int) -> str:
        """The event that brings a page from the version it has seen to the current one."""
        all_changes = [changes for version, changes in self._changes if version > seen_version]
        self._data_json = self._data_json or as_json(self.data)
        if len(all_changes) == self.version - seen_version and sum(map(len, all_changes)) < len(self._data_json):
            return f"id: {self.version}\nevent: change\ndata: [{','.join(filter(None, all_changes))}]\n\n"
        return f"id: {self.version}\ndata: {self._data_json}\n\n"

    async def html(self) -> bytes:
        """The page with the current data. It is rendered once for all that ask for it before the data changes."""
        async with self._rendering:
            if self._html_version != self.version:
                version, data = self.version, {**self.data, "version": self.version}
                text = await asyncio.to_thread(render_report, data, live=True)
                self._html, self._html_version = text.encode(), version
            return self._html

    async def events(self, seen_version: int) -> AsyncIterator[str]:
        """Yields server-sent events: the changes after the version that the page has seen, and the runs' states. These are sent
        when they change, and as a sign of life if nothing does."""
        seen_state = ""
        while not self.over:
            changed = self._changed
            if self.version > seen_version:
                event, seen_version = self._next_event(seen_version), self.version
                yield event
            if self._state != seen_state:
                seen_state = self._state
                yield seen_state
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SIGN_OF_LIFE_S):
                    await changed.wait()
                continue
            seen_state = ""


class Page:
    """The page and its events for runs that `find` finds: at once, or when there is something to show."""

    def __init__(
        self,
        find: Callable[[], Sequence[Run]],
        look_every_s: float = LOOK_EVERY_S,
        statuses: Mapping[Path, LastStatus] | None = None,
    ) -> None:
        """`statuses`: by a run's folder, what the run says of itself."""
        self._find, self._look_every_s, self._statuses = find, look_every_s, statuses
        self._feed: Feed | None = None
        self._watchers: list[asyncio.Task[None]] = []
        self._opening = asyncio.Lock()

    async def _ready(self) -> Feed:
        async with self._opening:  # two pages may be the first ones at the same time
            if self._feed is None:
                self._feed = Feed(await asyncio.to_thread(self._find), self._statuses)
                looks = self._feed.watch(self._look_every_s), self._feed.watch_states(self._look_every_s)
                self._watchers = [asyncio.create_task(look) for look in looks]
            return self._feed

    def end(self) -> None:
        """Ends all streams of events, because the server is about to end."""
        if self._feed is not None:
            self._feed.end()

    async def page(self, _: "Request") -> "Response":
        from starlette.responses import HTMLResponse, Response

        headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        try:
            feed = await self._ready()
            content: bytes | str = await feed.html()
        except UserError as error:  # the run has only just begun, say
            content = render_waiting(str(error))
        except (OSError, MemoryError):
            return Response("There is no memory or no file left for the page at the moment: try again.", 503)
        return HTMLResponse(content, headers=headers)

    async def events(self, request: "Request") -> "Response":
        from starlette.responses import Response, StreamingResponse

        try:
            feed = await self._ready()
        except (UserError, OSError, MemoryError):
            return Response("There is nothing to show at the moment: try again.", 503)
        version_text = request.headers.get("last-event-id") or request.query_params.get("seen", "-1")
        if not VERSION.fullmatch(version_text):
            return Response("seen must be a whole number: the version that the page has.", 400)
        headers = {"Cache-Control": "no-store"}
        if request.method == "HEAD":
            return Response(media_type="text/event-stream", headers=headers)
        return StreamingResponse(feed.events(int(version_text)), media_type="text/event-stream", headers=headers)


def app_of_folder(folder: Path, last_status: LastStatus | None = None) -> "Starlette":
    """The page of the run in a folder. The run may not have begun yet. `last_status`: what the run says of itself."""

    def find() -> Sequence[Run]:
        if not (folder / CONFIG).exists():
            raise UserError("The run has not begun: no machine has brought its model yet.")
        return read_runs([folder])

    return _app(Page(find, statuses=None if last_status is None else {folder: last_status}))


def _app(page: Page) -> "Starlette":
    from starlette.applications import Starlette
    from starlette.routing import Route

    return Starlette(routes=[Route("/", page.page), Route("/events", page.events)])


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


def serve(
    runs: Sequence[Run], host: str, port: int, began: Callable[[str], Any], statuses: Mapping[Path, LastStatus] | None = None
) -> None:
    """Serves until it is interrupted. `began` is called with the page's address. `statuses`: by a run's folder, what the run says
    of itself."""
    check_parts()
    import uvicorn

    from heloco.uvicorn_internals import EndingServer

    page = Page(lambda: runs, statuses=statuses)
    app = OwnNames(_app(page), names_of_this_machine(host), anywhere=not is_loopback(host))

    listening = listen(host, port)
    url_host = f"[{host}]" if ":" in host else host
    began(f"http://{url_host}:{listening.getsockname()[1]}")
    config = uvicorn.Config(app, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
    EndingServer(config, page.end).run(sockets=[listening])
