"""Which connections may stay open.

A connection counts from the moment TCP accepts it, before a byte of TLS. Until it has shown valid
credentials it is a stranger, and strangers have few places. Then it is admitted, and has a place
that no stranger can take. All places together need fewer descriptors than the process may have, so
that files can always be opened.

When there is no place left, the address that holds the most connections gives one up. So a client
that opens many connections only pushes out its own.
"""

import ipaddress
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from heloco.cluster.gateway.auth import Buckets
from heloco.errors import UserError

RESERVED_DESCRIPTORS = 192
"""Descriptors reserved for files, which include `calls.SPARE_DOWNLOADS`, and for everything else that
the process has open."""
STRANGER_LIMIT, ADMITTED_LIMIT = 256, 4096
"""At most this many connections of each kind, if there are enough descriptors. An open connection takes
about 50 KB of memory."""
ADDRESS_DIVISOR = 2
"""One address may hold the strangers' places divided by this. Many machines behind one router share an
address; each needs its place for some hundredths of a second."""
STRANGER_MINIMUM = 8
"""With fewer places for strangers than this, machines could hardly get in."""
UNDISTURBED_S = 1.0
"""For this many seconds a stranger cannot lose its place to another from its own address."""
FRUITLESS_PER_S, FRUITLESS_BURST = 32.0, 1024.0
"""How many connections one address may open and close without showing credentials. Each costs the
server a TLS handshake. A machine makes one such connection, to look at the certificate before it
joins."""
ADMIT = "heloco.admit"
"""The extension of a request's scope by which its connection is admitted."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Places:
    """How many connections may be open at once."""

    strangers: int = STRANGER_LIMIT
    strangers_per_address: int = STRANGER_LIMIT // ADDRESS_DIVISOR
    admitted: int = ADMITTED_LIMIT

    @classmethod
    def within(cls, descriptors: int, seats: int) -> "Places":
        """As many places as the descriptors allow. Each seat of the run needs one descriptor for a file: a
        contribution that comes in, or a start that goes out."""
        available = descriptors - RESERVED_DESCRIPTORS - seats
        strangers = min(STRANGER_LIMIT, available // 4)
        if strangers < STRANGER_MINIMUM:
            raise UserError(
                f"A run of {seats} workers cannot be served with {descriptors} open files: raise the limit, for example with "
                f"`ulimit -n {RESERVED_DESCRIPTORS + seats + 1024}`."
            )
        return cls(
            strangers, max(STRANGER_MINIMUM // 2, strangers // ADDRESS_DIVISOR), min(ADMITTED_LIMIT, available - strangers)
        )


@dataclass(eq=False, slots=True)
class Visitor:
    """A connection. `end` closes it at once."""

    address: str
    arrived_s: float
    end: Callable[[], Any]
    is_admitted: bool = False


class Crowd:
    """Connections by address. Within an address, the one that has been quiet for longest comes first."""

    def __init__(self) -> None:
        self.size = 0
        self._by_address: dict[str, dict[Visitor, None]] = {}

    def count(self, address: str) -> int:
        return len(self._by_address.get(address, ()))

    def add(self, visitor: Visitor) -> None:
        self._by_address.setdefault(visitor.address, {})[visitor] = None
        self.size += 1

    def discard(self, visitor: Visitor) -> bool:
        """Removes a connection. True if it was present."""
        group = self._by_address.get(visitor.address, {})
        if visitor not in group:
            return False
        del group[visitor]
        self.size -= 1
        if not group:
            del self._by_address[visitor.address]
        return True

    def mark_recent(self, visitor: Visitor) -> None:
        group = self._by_address.get(visitor.address, {})
        if visitor in group:
            del group[visitor]
            group[visitor] = None

    def quietest(self, address: str) -> Visitor:
        return next(iter(self._by_address[address]))

    def largest(self) -> str:
        """The address that holds the most connections."""
        return max(self._by_address, key=lambda address: len(self._by_address[address]))


class Admission:
    """All connections of a server. Not thread-safe: only the server's loop may use it."""

    def __init__(self, places: Places, clock: Callable[[], float] = time.monotonic) -> None:
        self.places, self._clock = places, clock
        self._strangers, self._admitted = Crowd(), Crowd()
        self._fruitless = Buckets(FRUITLESS_PER_S, FRUITLESS_BURST, clock=clock)
        self.closed = 0
        """Number of connections that had a place and are closed."""

    @property
    def strangers(self) -> int:
        return self._strangers.size

    @property
    def admitted(self) -> int:
        return self._admitted.size

    def arrive(self, address: str, end: Callable[[], Any]) -> Visitor | None:
        """Gives a stranger from this address a place; None if there is none."""
        visitor = Visitor(group_of(address), self._clock(), end)
        if not self._fruitless.has(visitor.address) or not self._make_room(visitor.address):
            return None
        self._strangers.add(visitor)
        return visitor

    def _make_room(self, address: str) -> bool:
        crowd = self._strangers
        if crowd.count(address) >= self.places.strangers_per_address:
            return self._replace_old(crowd.quietest(address))
        if crowd.size < self.places.strangers:
            return True
        largest = crowd.largest()
        if crowd.count(largest) > crowd.count(address) + 1:
            self._send_away(crowd, crowd.quietest(largest))
            return True
        return self._replace_old(crowd.quietest(largest))

    def _replace_old(self, visitor: Visitor) -> bool:
        """Closes a stranger's connection unless it is younger than `UNDISTURBED_S`: a young one may
        be about to show its token."""
        if self._clock() - visitor.arrived_s < UNDISTURBED_S:
            return False
        self._send_away(self._strangers, visitor)
        return True

    def admit(self, visitor: Visitor) -> bool:
        """Admits a connection that has shown valid credentials. False if it cannot stay, because all
        places are taken by addresses that hold no more than its own."""
        if visitor.is_admitted:
            self._admitted.mark_recent(visitor)
            return True
        crowd = self._admitted
        if crowd.size >= self.places.admitted:
            largest = crowd.largest()
            if crowd.count(largest) <= crowd.count(visitor.address) + 1:
                return False
            self._send_away(crowd, crowd.quietest(largest))
        if self._strangers.discard(visitor):
            visitor.is_admitted = True
            crowd.add(visitor)
        return True

    def leave(self, visitor: Visitor) -> None:
        """Frees the place of a connection that was closed."""
        (self._admitted if visitor.is_admitted else self._strangers).discard(visitor)
        if not visitor.is_admitted:
            self._fruitless.take(visitor.address)
        visitor.end = _end_nothing
        self.closed += 1

    def _send_away(self, crowd: Crowd, visitor: Visitor) -> None:
        crowd.discard(visitor)
        visitor.end()


def _end_nothing() -> None:
    """There is nothing left to end."""


def group_of(address: str) -> str:
    """The group that an address counts for. An IPv6 network of 64 bits is one group, because one machine can
    use all of its addresses."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    if ip.ipv4_mapped is not None:
        return str(ip.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(ip) >> 64 << 64, 64)))


class Admit:
    """ASGI middleware for the inner side of the guard. A request that gets this far has shown valid
    credentials, so its connection is admitted."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        admit = scope.get("extensions", {}).get(ADMIT) if scope["type"] == "http" else None
        if admit is None or admit():
            await self._app(scope, receive, send)
        else:
            await _answer_busy(send)


async def _answer_busy(send: Send) -> None:
    """Refuses and closes the connection. The client may find a place over a new one."""
    text = json.dumps({"code": "busy", "text": "The gateway has no place for another connection: try again."}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(text)), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": text})
