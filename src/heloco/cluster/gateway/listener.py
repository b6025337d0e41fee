"""Accepts TCP connections one by one, closes those for which there is no place, and starts TLS on the
others."""

import asyncio
import contextlib
import ctypes
import logging
import socket
import ssl
import struct
import sys
from collections.abc import Callable, Sequence

from heloco.cluster.gateway.admission import Admission, Visitor

STRANGER_S = 6.0
"""Timeout for TLS and the first request with valid credentials."""
FAREWELL_S = 2.0
"""Timeout for the other side's answer to the end of TLS."""
PAUSE_S = 0.1
"""Seconds until the next try after the system could not accept a connection."""
TIDY_S, TIDY_AFTER = 5.0, 32
"""Interval in seconds, and the number of closed connections after which free memory goes back to the system."""
log = logging.getLogger("heloco.gateway")
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing forgets the connection at once, on both sides."""
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None

MakeProtocol = Callable[[Visitor], asyncio.BaseProtocol]


class Listener:
    """Accepts from the moment it is made, in the loop, until `close`, which also closes the sockets."""

    def __init__(
        self, sockets: Sequence[socket.socket], context: ssl.SSLContext, admission: Admission, make_protocol: MakeProtocol
    ) -> None:
        self._context, self._admission, self._make_protocol = context, admission, make_protocol
        self._loop = asyncio.get_running_loop()
        self._greetings: set[asyncio.Task[None]] = set()
        self._tidy_task = self._loop.create_task(self._tidy())
        self._accept_tasks = [self._loop.create_task(self._accept(listening)) for listening in sockets]

    def close(self) -> None:
        for task in (self._tidy_task, *self._accept_tasks, *self._greetings):
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.wait([self._tidy_task, *self._accept_tasks, *self._greetings])

    async def _tidy(self) -> None:
        """Returns memory to the system after many connections have closed."""
        closed_at_last_return = 0
        while True:
            await asyncio.sleep(TIDY_S)
            if self._admission.closed - closed_at_last_return >= TIDY_AFTER:
                closed_at_last_return = self._admission.closed
                await asyncio.to_thread(_return_free_memory)

    async def _accept(self, listening: socket.socket) -> None:
        """Accepts connections until it is cancelled. An error with one connection does not affect the next."""
        listening.setblocking(False)
        with listening:
            while True:
                try:
                    connection, address = await self._loop.sock_accept(listening)
                    self._receive(connection, address[0])
                    await asyncio.sleep(0)  # accepting does not yield while many connections wait
                except Exception as error:
                    if not isinstance(error, OSError | MemoryError):  # it was closed again, or resources ran out
                        log.error("A connection could not be accepted: %r", error)
                    await asyncio.sleep(PAUSE_S)

    def _receive(self, connection: socket.socket, address: str) -> None:
        visitor = self._admission.arrive(address, connection.close)
        if visitor is None:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            connection.close()
            return
        greeting = self._loop.create_task(self._greet(connection, visitor))
        visitor.end = greeting.cancel
        self._greetings.add(greeting)
        greeting.add_done_callback(self._greetings.discard)

    async def _greet(self, connection: socket.socket, visitor: Visitor) -> None:
        """Does the TLS handshake and hands the connection to its protocol."""
        self._loop.call_later(STRANGER_S, _end_stranger, visitor)
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make_protocol(visitor), connection, ssl=self._context, ssl_handshake_timeout=STRANGER_S,
                ssl_shutdown_timeout=FAREWELL_S,
            )  # fmt: skip
        except (OSError, MemoryError, RuntimeError):  # no TLS, too slow, or closed (uvloop: RuntimeError)
            self._admission.leave(visitor)
        except BaseException:
            self._admission.leave(visitor)
            raise


def _return_free_memory() -> None:
    """Returns free memory between used blocks to the system, which glibc does only on request."""
    with contextlib.suppress(AttributeError):  # another C library may lack it
        if _libc is not None:
            _libc.malloc_trim(0)


def _end_stranger(visitor: Visitor) -> None:
    if not visitor.is_admitted:
        visitor.end()
