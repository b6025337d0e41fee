"""Answers only requests for names of this machine.

A web page from elsewhere can let its own name point to 127.0.0.1 (DNS rebinding): the browser then
sends its requests here and lets the page read the answers. They still carry the page's name in the
Host header, so they can be told apart. (Starlette's TrustedHostMiddleware knows no IPv6 addresses,
and would need every address of this machine by name.)
"""

import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from heloco.hosts import is_loopback

REFUSAL = (
    "`heloco watch` answers only to names of its own machine: open the address that it printed, or start it with --host NAME."
)
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Any, Callable[[], Awaitable[Any]], Send], Awaitable[None]]


def names_of_this_machine(host: str) -> set[str]:
    """How a page that is served at `host` may be called."""
    names = {host.lower(), socket.gethostname().lower()}
    if not is_loopback(host):
        names |= {socket.getfqdn().lower(), f"{socket.gethostname().lower()}.local"}
    return names


def name_in(host_header: str) -> str:
    """The name without its port."""
    name = host_header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].removesuffix(".")


class OwnNames:
    """ASGI middleware. `anywhere`: the page is served beyond this machine, where routers may translate
    addresses, so every address is taken; an address cannot be rebound."""

    def __init__(self, app: App, names: Iterable[str], *, anywhere: bool) -> None:
        self._app, self._names, self._anywhere = app, frozenset(names), anywhere

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        hosts = [value.decode("latin-1") for key, value in scope["headers"] if key == b"host"]
        if len(hosts) == 1 and self.is_own(name_in(hosts[0])):
            await self._app(scope, receive, send)
        else:
            await _refuse(send)

    def is_own(self, name: str) -> bool:
        """Whether a request for this name is meant for this machine."""
        if is_loopback(name) or name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self._anywhere


async def _refuse(send: Send) -> None:
    text = REFUSAL.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(text))]
    await send({"type": "http.response.start", "status": 421, "headers": headers})
    await send({"type": "http.response.body", "body": text})
