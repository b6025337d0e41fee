"""Request and answer bodies, sent piece by piece. A connection holds about two pieces in memory, whatever the size of the model
and the number of machines."""

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
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.server.transfers import Upload

T = TypeVar("T")
SMALL, LARGE = 1 << 16, 1 << 22
"""Limits for a JSON body in bytes. Large ones hold a layout or names."""
DECODED = 32
"""A decoded message takes up to this many times the bytes of its JSON."""
CHUNK = 1 << 16
"""Bytes that are read from a file or handed to a connection at once. Memory of this size is reused.
Larger pieces would come from the system each time, which costs more than the encryption."""
PIECE = 1 << 21
"""Bytes that are handed to a thread at once. The thread writes them with few calls, because after each call it waits for
Python's lock, which the loop holds most of the time while bytes come in."""
SILENCE_S = 20.0
"""After this many seconds without a byte a connection counts as dead."""
PAUSE_S = 0.2
"""After this many seconds without a byte, the bytes that have arrived are written to the file."""
_RANGE = re.compile(rb"bytes=([0-9]{1,16})-")


def length_of(request: Request, limit: int) -> int:
    """The body's length from its header. Raises `Refused` if it is missing or above the limit, before a byte is read."""
    length = header(request.scope, b"content-length")
    if header(request.scope, b"transfer-encoding") or (not length.isdigit() and request.method in ("POST", "PUT")):
        raise Refused(RefusalCode.LENGTH, "the request must state the length of its body (Content-Length).")
    if len(length) > 16 or int(length or 0) > limit:
        raise Refused(RefusalCode.TOO_LONG, f"the body is longer than the {limit} bytes that are expected here.")
    return int(length or 0)


async def chunks(request: Request, on_pause: Callable[[], Awaitable[None]] | None = None) -> AsyncIterator[bytes]:
    """The body in chunks, as it arrives. `on_pause` is called when nothing arrives for `PAUSE_S`."""
    while True:
        try:
            async with asyncio.timeout(PAUSE_S):
                event = await request.receive()
        except TimeoutError:
            if on_pause is not None:
                await on_pause()
            try:
                async with asyncio.timeout(SILENCE_S):
                    event = await request.receive()
            except TimeoutError:
                raise Refused(
                    RefusalCode.TIMEOUT, f"nothing came for {SILENCE_S:g} s: send the rest over a new connection."
                ) from None
        if event["type"] == "http.disconnect":
            raise ClientDisconnect
        if event.get("body"):
            yield event["body"]
        if not event.get("more_body"):
            return


async def message(request: Request, calls: Calls, kind: type[T], limit: int) -> T:
    """A JSON body. A large one is decoded in a thread, so that beats do not wait for it in the loop."""
    length_of(request, limit)
    content = b"".join([chunk async for chunk in chunks(request)])
    bytearray(DECODED * len(content))  # raises MemoryError, which becomes a refusal; msgspec would crash without memory
    return decode(content, kind) if len(content) <= SMALL else await calls.call_on_file(decode, content, kind)


async def discard(request: Request, limit: int) -> int:
    length_of(request, limit)
    return sum([len(chunk) async for chunk in chunks(request)])


async def take_in(request: Request, calls: Calls, upload: Upload, offset: int, note_transfer: Callable[[], Any]) -> int:
    """Writes a body to the upload while more of it arrives, also the bytes before an interruption. Returns the upload's size."""
    bytes_left = upload.layout.size - offset
    if bytes_left < 0:
        raise Refused(RefusalCode.OFFSET, f"{upload.size} bytes have arrived: continue from there.", size=upload.size)
    length_of(request, bytes_left)
    turn = await calls.call_on_file(upload.begin, offset)
    pieces_held: list[bytes] = []
    size = 0
    write_call: asyncio.Future[None] | None = None

    def write_pieces(pieces: list[bytes]) -> None:
        joined = b"".join(pieces)
        pieces.clear()
        upload.write(turn, joined)
        note_transfer()

    async def write_held() -> None:
        nonlocal pieces_held, size, write_call
        if write_call is not None:
            await write_call
        write_call, pieces_held, size = asyncio.ensure_future(calls.call_on_file(write_pieces, pieces_held)), [], 0

    try:
        async for chunk in chunks(request, on_pause=write_held):
            pieces_held.append(chunk)
            size += len(chunk)
            if size >= PIECE:
                await write_held()
    except ClientDisconnect:
        await write_held()
        raise Refused(RefusalCode.CUT, "the connection was interrupted: send the rest.") from None
    else:
        await write_held()
    finally:
        if write_call is not None:
            await write_call
    return upload.size


def begin_of(request: Request, size: int) -> int:
    """The first byte of a transfer, from the Range header. Only the form `bytes=N-` is accepted."""
    range_header = header(request.scope, b"range")
    if not range_header:
        return 0
    match = _RANGE.fullmatch(range_header)
    if match is None:
        raise Refused(RefusalCode.MALFORMED, "Only ranges of the form bytes=N- are served.")
    if int(match[1]) > size:
        raise Refused(RefusalCode.OFFSET, f"there are only {size} bytes.", size=size)
    return int(match[1])


class FileBody:
    """An answer whose body is a file, from byte `begin` on."""

    def __init__(self, calls: Calls, file: BinaryIO, begin: int, size: int, note_transfer: Callable[[], Any]) -> None:
        self.calls, self.file, self.begin, self.size, self.note_transfer = calls, file, begin, size, note_transfer

    @classmethod
    async def open(cls, calls: Calls, path: Path, begin: int, size: int, note_transfer: Callable[[], Any]) -> "FileBody":
        def open_file() -> BinaryIO:
            file = path.open("rb", buffering=0)
            file.seek(begin)
            return file

        calls.begin_download()
        try:
            return cls(calls, await calls.call_on_file(open_file), begin, size, note_transfer)
        except BaseException as error:
            calls.end_download()
            if isinstance(error, FileNotFoundError):
                raise Refused(RefusalCode.NOT_HELD, "the start file of this round is gone: take a fresh round.") from None
            raise

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        disconnection = asyncio.ensure_future(_wait_for_disconnect(receive))
        read_call: asyncio.Future[list[bytes]] | None = None
        bytes_left = self.size - self.begin
        try:
            await _start(send, bytes_left, 206 if self.begin else 200, f"bytes {self.begin}-{self.size - 1}/{self.size}")
            while not disconnection.done():
                pieces = await (read_call or self._read(bytes_left))
                bytes_left -= sum(map(len, pieces))
                read_call = self._read(bytes_left)
                await _send_all(send, pieces, more=bytes_left > 0)
                self.note_transfer()
                if not bytes_left:
                    return
        finally:
            disconnection.cancel()
            try:
                with contextlib.suppress(OSError, MemoryError):
                    await (read_call or asyncio.sleep(0))
            finally:
                self.file.close()
                self.calls.end_download()

    def _read(self, limit: int) -> "asyncio.Future[list[bytes]]":
        return asyncio.ensure_future(self.calls.call_on_file(_read, self.file, limit))


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


def _read(file: BinaryIO, limit: int) -> list[bytes]:
    pieces, limit = [], min(limit, PIECE)
    while limit and (piece := file.read(min(limit, CHUNK))):
        pieces.append(piece)
        limit -= len(piece)
    if limit:
        raise OSError("the file is shorter than it was")
    return pieces


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Zeros:
    """An answer of `size` zero bytes, to measure a connection."""

    def __init__(self, size: int) -> None:
        self.size = size

    async def __call__(self, _: Scope, receive: Receive, send: Send) -> None:
        disconnection = asyncio.ensure_future(_wait_for_disconnect(receive))
        await _start(send, self.size)
        bytes_left = self.size
        while not disconnection.done():
            piece = bytes(min(bytes_left, CHUNK))
            bytes_left -= len(piece)
            await _send_all(send, [piece], more=bytes_left > 0)
            if not bytes_left:
                break
        disconnection.cancel()
