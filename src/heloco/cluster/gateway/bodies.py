"""Bodies on their way in and out, a piece at a time: however large a model is, and however many machines send at once, a
connection holds about two pieces in memory."""

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from starlette.requests import ClientDisconnect, Request

from heloco.cluster.gateway.auth import Receive, Scope, Send, header
from heloco.cluster.gateway.calls import Calls
from heloco.cluster.protocol.messages import decode
from heloco.cluster.protocol.refusals import Code, Refused
from heloco.cluster.server.transfers import Upload

T = TypeVar("T")
SMALL, LARGE = 1 << 16, 1 << 22
"""Bytes of a JSON body; the large ones hold a layout or names."""
DECODED = 32
"""A message in memory takes up to so many times the bytes of its JSON."""
CHUNK = 1 << 16
"""Bytes that are read from a file or handed to a connection at once. Memory of this size is used again; that of larger pieces
comes from the system anew each time, which costs more than the encryption."""
PIECE = 1 << 20
"""Bytes that go to a thread at once."""
SILENCE_S = 20.0
"""A connection on which nothing moves for so long is taken for dead."""
PAUSE_S = 0.2
"""A connection on which nothing moves for so long may stay like that: what came is written down."""
_RANGE = re.compile(rb"bytes=([0-9]{1,16})-")


def length_of(request: Request, most: int) -> int:
    """The body's length as its header says: known, and not too long, before a byte of it is read."""
    length = header(request.scope, b"content-length")
    if header(request.scope, b"transfer-encoding") or (not length.isdigit() and request.method in ("POST", "PUT")):
        raise Refused(Code.LENGTH, "the body's length must be told in advance (Content-Length).")
    if len(length) > 16 or int(length or 0) > most:
        raise Refused(Code.TOO_LONG, f"the body is longer than the {most} bytes that are expected here.")
    return int(length or 0)


async def chunks(request: Request, pausing: Callable[[], Awaitable[None]] | None = None) -> AsyncIterator[bytes]:
    """The body as it comes in; `pausing` is called when nothing comes for a moment."""
    while True:
        try:
            async with asyncio.timeout(PAUSE_S):
                event = await request.receive()
        except TimeoutError:
            if pausing is not None:
                await pausing()
            try:
                async with asyncio.timeout(SILENCE_S):
                    event = await request.receive()
            except TimeoutError:
                raise Refused(Code.TIMEOUT, f"nothing came for {SILENCE_S:g} s: send the rest over a new connection.") from None
        if event["type"] == "http.disconnect":
            raise ClientDisconnect
        if event.get("body"):
            yield event["body"]
        if not event.get("more_body"):
            return


async def message(request: Request, calls: Calls, kind: type[T], most: int) -> T:
    """A JSON body. One that may be large is not read in the loop, where signs of life must not wait for it."""
    length_of(request, most)
    content = b"".join([chunk async for chunk in chunks(request)])
    bytearray(DECODED * len(content))  # a MemoryError here is a refusal; where msgspec runs out of memory, it crashes
    return decode(content, kind) if len(content) <= SMALL else await calls.on_file(decode, content, kind)


async def discard(request: Request, most: int) -> int:
    length_of(request, most)
    return sum([len(chunk) async for chunk in chunks(request)])


async def take_in(request: Request, calls: Calls, incoming: Upload, offset: int, moved: Callable[[], Any]) -> int:
    """Writes a body where it belongs, while more of it comes in; also what came before a cut. Gives the size then."""
    left = incoming.layout.size - offset
    if left < 0:
        raise Refused(Code.OFFSET, f"{incoming.size} bytes are here: go on from there.", size=incoming.size)
    length_of(request, left)
    turn = await calls.on_file(incoming.begin, offset)
    held: list[bytes] = []
    size = 0
    writing: asyncio.Future[None] | None = None

    def written(pieces: list[bytes]) -> None:
        for piece in pieces:
            incoming.write(turn, piece)
            moved()

    async def write_held() -> None:
        nonlocal held, size, writing
        if writing is not None:
            await writing
        writing, held, size = asyncio.ensure_future(calls.on_file(written, held)), [], 0

    try:
        async for chunk in chunks(request, pausing=write_held):
            held.append(chunk)
            size += len(chunk)
            if size >= PIECE:
                await write_held()
    except ClientDisconnect:
        await write_held()
        raise Refused(Code.CUT, "the connection was cut: send the rest.") from None
    else:
        await write_held()
    finally:
        if writing is not None:
            await writing
    return incoming.size


def begin_of(request: Request, size: int) -> int:
    """Where a transfer goes on: of the ranges only `bytes=N-` makes sense here."""
    asked = header(request.scope, b"range")
    if not asked:
        return 0
    found = _RANGE.fullmatch(asked)
    if found is None:
        raise Refused(Code.MALFORMED, "Only ranges of the form bytes=N- are served.")
    if int(found[1]) > size:
        raise Refused(Code.OFFSET, f"there are only {size} bytes.", size=size)
    return int(found[1])


class FileBody:
    """The answer that is a file from some byte on."""

    def __init__(self, calls: Calls, file: BinaryIO, begin: int, size: int, moved: Callable[[], Any]) -> None:
        self.calls, self.file, self.begin, self.size, self.moved = calls, file, begin, size, moved

    @classmethod
    async def of(cls, calls: Calls, path: Path, begin: int, size: int, moved: Callable[[], Any]) -> "FileBody":
        def opened() -> BinaryIO:
            file = path.open("rb", buffering=0)
            file.seek(begin)
            return file

        calls.begin_download()
        try:
            return cls(calls, await calls.on_file(opened), begin, size, moved)
        except BaseException as error:
            calls.end_download()
            if isinstance(error, FileNotFoundError):
                raise Refused(Code.NOT_HELD, "what this round starts from is gone: take a fresh one.") from None
            raise

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_disconnected(receive))
        reading: asyncio.Future[list[bytes]] | None = None
        left = self.size - self.begin
        try:
            await _start(send, left, 206 if self.begin else 200, f"bytes {self.begin}-{self.size - 1}/{self.size}")
            while not gone.done():
                pieces = await (reading or self._read(left))
                left -= sum(map(len, pieces))
                reading = self._read(left)
                await _send_all(send, pieces, more=left > 0)
                self.moved()
                if not left:
                    return
        finally:
            gone.cancel()
            try:
                with contextlib.suppress(OSError, MemoryError):
                    await (reading or asyncio.sleep(0))
            finally:
                self.file.close()
                self.calls.end_download()

    def _read(self, most: int) -> "asyncio.Future[list[bytes]]":
        return asyncio.ensure_future(self.calls.on_file(_read, self.file, most))


async def _start(send: Send, length: int, status: int = 200, range_: str = "") -> None:
    headers = [
        (b"content-type", b"application/octet-stream"),
        (b"content-length", str(length).encode()),
        *([(b"content-range", range_.encode())] if status == 206 else []),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _send_all(send: Send, pieces: Iterable[bytes], *, more: bool) -> None:
    for piece in pieces:
        async with asyncio.timeout(SILENCE_S):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    if not more:
        await send({"type": "http.response.body", "body": b""})


def _read(file: BinaryIO, most: int) -> list[bytes]:
    found, most = [], min(most, PIECE)
    while most and (piece := file.read(min(most, CHUNK))):
        found.append(piece)
        most -= len(piece)
    if most:
        raise OSError("the file is shorter than it was")
    return found


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Zeros:
    """The answer of so many bytes, to measure a connection."""

    def __init__(self, size: int) -> None:
        self.size = size

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_disconnected(receive))
        await _start(send, self.size)
        left = self.size
        while not gone.done():
            piece = bytes(min(left, CHUNK))
            left -= len(piece)
            await _send_all(send, [piece], more=left > 0)
            if not left:
                break
        gone.cancel()
