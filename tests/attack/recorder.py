"""A proxy in front of the gateway that records every request.

It shows the gateway's own certificate, which lies in the run's folder, so that machines cannot tell
the difference.
"""

import asyncio
import contextlib
import ssl
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import httptools

from rig import unchecked

REQUEST_LIMIT = 8
"""The last requests of each kind are kept, at most this many, because they are about rounds that still exist."""


@dataclass
class Request:
    method: str
    path: str
    query: str = ""
    headers: list[tuple[str, str]] = field(default_factory=list)
    body: bytes = b""

    @property
    def kind(self) -> tuple[str, str]:
        return self.method, self.path

    def written(self) -> bytes:
        """As it goes over the wire. The headers say what the length is, or do not."""
        target = f"{self.path}?{self.query}" if self.query else self.path
        head = "".join(f"{name}: {value}\r\n" for name, value in self.headers)
        return f"{self.method} {target} HTTP/1.1\r\n{head}\r\n".encode("utf-8", "surrogateescape") + self.body


class Reading:
    """Takes the bytes of one connection apart into requests."""

    def __init__(self) -> None:
        self.complete: list[Request] = []
        self.is_broken = False
        """Whether the bytes are not HTTP, or ask for another protocol."""
        self._begin()
        self._parser = httptools.HttpRequestParser(self)

    def feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.is_broken = True

    def _begin(self) -> None:
        self._target, self._headers, self._body = b"", list[tuple[str, str]](), bytearray()

    def on_message_begin(self) -> None:
        self._begin()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.decode("latin-1"), value.decode("latin-1")))

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        path, _, query = self._target.decode("latin-1").partition("?")
        method = self._parser.get_method().decode()
        self.complete.append(Request(method, path, query, self._headers, bytes(self._body)))


class Recorder:
    """`withheld_paths`: paths whose requests are recorded and not forwarded. Their connection is closed."""

    def __init__(self, port: int, credentials: Path, withheld_paths: Iterable[str] = ()) -> None:
        self.withheld_paths = set(withheld_paths)
        self.requests: dict[tuple[str, str], list[Request]] = {}
        self.port = 0
        self._target = port
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(credentials / "certificate.pem", credentials / "key.pem")
        self._loop = asyncio.new_event_loop()
        ready_event = threading.Event()
        threading.Thread(target=self._run, args=(ready_event,), daemon=True).start()
        ready_event.wait()

    def _run(self, ready_event: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._carry, "127.0.0.1", 0, ssl=self._context))
        self.port = server.sockets[0].getsockname()[1]
        ready_event.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _carry(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError):
            far, forth = await asyncio.open_connection("127.0.0.1", self._target, ssl=unchecked())
            pumps = [asyncio.ensure_future(self._record(near, forth)), asyncio.ensure_future(_pump(far, back))]
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            for pumping in pumps:
                pumping.cancel()
            for writer in (forth, back):
                writer.transport.abort()

    async def _record(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        reading = Reading()
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                reading.feed(data)
                for request in reading.complete:
                    self._note(request)
                if any(request.path in self.withheld_paths for request in reading.complete):
                    return
                reading.complete.clear()
                sink.write(data)
                await sink.drain()

    def _note(self, request: Request) -> None:
        group = self.requests.setdefault(request.kind, [])
        group.append(request)
        del group[:-REQUEST_LIMIT]

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
