"""Accepts TCP connections one by one, closes those for which there is no place, and starts TLS on the
others."""

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
from collections.abc import Callable, Sequence

from heloco.cluster.gateway.admission import Admission, Visitor
from heloco.cluster.server.resident_memory import return_free_memory

STRANGER_S = 6.0
"""Seconds that a connection has for TLS and its first request with valid credentials."""
FAREWELL_S = 2.0
"""Seconds that the other side has to agree to the end of TLS."""
PAUSE_S = 0.1
"""Seconds before the next try, when the system could not accept a connection."""
TIDY_S, MANY = 5.0, 32
"""Seconds between two looks at whether that many connections have ended."""
log = logging.getLogger("heloco.gateway")
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing forgets the connection at once, on both sides."""

MakeProtocol = Callable[[Visitor], asyncio.BaseProtocol]


class Listener:
    """Accepts from the moment it is made, in the loop, until `close`, which also closes the sockets."""

    def __init__(
        self, sockets: Sequence[socket.socket], context: ssl.SSLContext, admission: Admission, make_protocol: MakeProtocol
    ) -> None:
        self._context, self._admission, self._make_protocol = context, admission, make_protocol
        self._loop = asyncio.get_running_loop()
        self._greetings: set[asyncio.Task[None]] = set()
        self._tidying = self._loop.create_task(self._tidy())
        self._accepting = [self._loop.create_task(self._accept(listening)) for listening in sockets]

    def close(self) -> None:
        for task in (self._tidying, *self._accepting, *self._greetings):
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.wait([self._tidying, *self._accepting, *self._greetings])

    async def _tidy(self) -> None:
        """After many connections have ended, the memory they had goes back to the system."""
        returned = 0
        while True:
            await asyncio.sleep(TIDY_S)
            if self._admission.ended - returned >= MANY:
                returned = self._admission.ended
                await asyncio.to_thread(return_free_memory)

    async def _accept(self, listening: socket.socket) -> None:
        """Until it is cancelled. Whatever goes wrong with one connection, the next one is accepted."""
        listening.setblocking(False)
        with listening:
            while True:
                try:
                    taken, address = await self._loop.sock_accept(listening)
                    self._receive(taken, address[0])
                    await asyncio.sleep(0)  # while many wait outside, accepting never does: let others run
                except Exception as error:
                    if not isinstance(error, OSError | MemoryError):  # it is gone again, or nothing is left for it
                        log.error("A connection could not be accepted: %r", error)
                    await asyncio.sleep(PAUSE_S)

    def _receive(self, taken: socket.socket, address: str) -> None:
        visitor = self._admission.arrive(address, taken.close)
        if visitor is None:
            with contextlib.suppress(OSError):
                taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            taken.close()
            return
        greeting = self._loop.create_task(self._greet(taken, visitor))
        visitor.end = greeting.cancel
        self._greetings.add(greeting)
        greeting.add_done_callback(self._greetings.discard)

    async def _greet(self, taken: socket.socket, visitor: Visitor) -> None:
        """TLS; then the protocol has the connection, and tells when it is over."""
        self._loop.call_later(STRANGER_S, _end_stranger, visitor)
        try:
            await self._loop.connect_accepted_socket(
                lambda: self._make_protocol(visitor), taken, ssl=self._context, ssl_handshake_timeout=STRANGER_S,
                ssl_shutdown_timeout=FAREWELL_S,
            )  # fmt: skip
        except (OSError, MemoryError, RuntimeError):  # no TLS, too slow, cut (uvloop: RuntimeError): there is nobody to tell
            self._admission.leave(visitor)
        except BaseException:
            self._admission.leave(visitor)
            raise


def _end_stranger(visitor: Visitor) -> None:
    if not visitor.is_admitted:
        visitor.end()
