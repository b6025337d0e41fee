"""Who gets in. Without a token that holds there is an empty answer and nothing else: no name, no detail, no byte of the run.

A browser that has a viewer's key gets in to the page, which only shows.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from heloco.cluster.server.token_book import Token, TokenBook

PAGE = "/page"
COOKIE = "heloco-view"
TOKEN = "heloco.token"
"""The key of a request's scope under which its token is."""
WRONG_PER_S, WRONG_AT_ONCE = 0.2, 10
"""Wrong credentials that one address may show before it is told to go away."""
DISCARDED = 1 << 20
"""Bytes of an unread body that are let in and thrown away; with more to come the connection ends."""

Scope = Any
Receive = Callable[[], Any]
Send = Callable[[Any], Any]


class Buckets:
    """At most `at_once` at once and `per_s` a second, for each of the names; the longest unused are forgotten."""

    def __init__(self, per_s: float, at_once: float, *, names: int = 4096, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_s, self.at_once, self.names, self._clock = per_s, at_once, names, clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, name: str) -> bool:
        now = self._clock()
        left, then = self._left.pop(name, (self.at_once, now))
        left = min(self.at_once, left + (now - then) * self.per_s)
        self._left[name] = (left - 1 if left >= 1 else left, now)
        if len(self._left) > self.names:
            self._left.popitem(last=False)
        return left >= 1

    def has(self, name: str) -> bool:
        """Whether one could be taken."""
        left, then = self._left.get(name, (self.at_once, 0.0))
        return left + (self._clock() - then) * self.per_s >= 1


def header(scope: Scope, name: bytes) -> bytes:
    """A header that may stand there once; twice is as bad as wrong."""
    values = [value for key, value in scope["headers"] if key == name]
    return values[0] if len(values) == 1 else b""


def unread(scope: Scope) -> int:
    """Bytes of body that a request says it has; without a number, more than any limit."""
    if header(scope, b"transfer-encoding"):
        return 1 << 62
    length = header(scope, b"content-length")
    return int(length) if length.isdigit() else 0


class Auth:
    """ASGI middleware before everything else. The token of a request that got in is in its scope."""

    def __init__(self, app: Any, tokens: TokenBook) -> None:
        self.app, self.tokens = app, tokens
        self._wrong = Buckets(WRONG_PER_S, WRONG_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            path = scope["path"]
            if path == PAGE or path.startswith(f"{PAGE}/"):
                await self._page(scope, receive, send)
                return
            shown = header(scope, b"authorization")
            token = self.tokens.find(shown.removeprefix(b"Bearer ")) if shown.startswith(b"Bearer ") else None
            if token is None:
                await self._turn_away(scope, send, shown)
            else:
                await self._let_in(scope, receive, send, token)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send, token: Token) -> None:
        scope[TOKEN] = token
        await self.app(scope, receive, send)

    async def _turn_away(self, scope: Scope, send: Send, shown: bytes) -> None:
        """401, or 429 for who keeps showing wrong ones; then every try also costs a new connection.

        Right credentials are never limited: behind one address there may be many machines."""
        address = (scope.get("client") or ("",))[0]
        is_tolerated = not shown or self._wrong.take(address)
        closing = not is_tolerated or unread(scope) > DISCARDED
        await answer(send, 401 if is_tolerated else 429, [(b"connection", b"close")] if closing else [])

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = parse_qs(scope["query_string"].decode("latin-1")).get("key", [""])[0].encode("utf-8", "replace")
        shown = asked or _cookie(header(scope, b"cookie"))
        token = self.tokens.find(shown)
        if token is None or token.right == "worker":
            await self._turn_away(scope, send, shown)
        elif scope["method"] not in ("GET", "HEAD"):
            await answer(send, 405, [(b"allow", b"GET, HEAD")])
        elif scope["path"] == PAGE:  # the page's own addresses are relative to its folder
            where = f"{PAGE}/?key={token.secret}" if asked else f"{PAGE}/"
            await answer(send, 307, [(b"location", where.encode())])
        else:
            await self._let_in(scope, receive, _with_headers(send, _page_headers(token, set_cookie=bool(asked))), token)


def _page_headers(token: Token, *, set_cookie: bool) -> list[tuple[bytes, bytes]]:
    cookie = f"{COOKIE}={token.secret}; Path={PAGE}; HttpOnly; Secure; SameSite=Strict".encode()
    return [(b"referrer-policy", b"no-referrer"), *([(b"set-cookie", cookie)] if set_cookie else [])]


def _cookie(text: bytes) -> bytes:
    try:
        morsel = SimpleCookie(text.decode("latin-1")).get(COOKIE)
    except CookieError:
        return b""
    return morsel.value.encode("utf-8", "replace") if morsel else b""


def _with_headers(send: Send, more: Iterable[tuple[bytes, bytes]]) -> Send:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *more]}
        await send(message)

    return sending


async def answer(send: Send, status: int, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """Without a body."""
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0"), *headers]})
    await send({"type": "http.response.body", "body": b""})
