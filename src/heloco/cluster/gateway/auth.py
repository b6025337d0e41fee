"""Authentication. Without a valid token the answer is empty: no name, no detail, no byte of the run.

A browser with the key of a viewer token gets the page, which is read-only.
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
"""The key under which a request's scope holds its token."""
WRONG_PER_S, WRONG_BURST = 0.2, 10
"""How often one address may show wrong credentials before it gets 429: per second, and at once."""
DISCARDED = 1 << 20
"""An unread body of at most this many bytes is discarded. If it is longer, the connection is closed."""

Scope = Any
Receive = Callable[[], Any]
Send = Callable[[Any], Any]


class Buckets:
    """A rate limit for each name: at most `burst` at once and `per_s` per second. Names unused for longest are forgotten."""

    def __init__(self, per_s: float, burst: float, *, names: int = 4096, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_s, self.burst, self.names, self._clock = per_s, burst, names, clock
        self._balances: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, name: str) -> bool:
        now = self._clock()
        balance, changed_at = self._balances.pop(name, (self.burst, now))
        balance = min(self.burst, balance + (now - changed_at) * self.per_s)
        self._balances[name] = (balance - 1 if balance >= 1 else balance, now)
        if len(self._balances) > self.names:
            self._balances.popitem(last=False)
        return balance >= 1

    def has(self, name: str) -> bool:
        """Whether `take` would succeed."""
        balance, changed_at = self._balances.get(name, (self.burst, 0.0))
        return balance + (self._clock() - changed_at) * self.per_s >= 1


def header(scope: Scope, name: bytes) -> bytes:
    """The value of a header; empty if it is missing or occurs twice."""
    values = [value for key, value in scope["headers"] if key == name]
    return values[0] if len(values) == 1 else b""


def unread(scope: Scope) -> int:
    """Length of the body as the request states it. Without a stated length, it is more than any limit."""
    if header(scope, b"transfer-encoding"):
        return 1 << 62
    length = header(scope, b"content-length")
    return int(length) if length.isdigit() else 0


class Auth:
    """The outermost ASGI middleware. It puts the token of an authenticated request into its scope."""

    def __init__(self, app: Any, tokens: TokenBook) -> None:
        self.app, self.tokens = app, tokens
        self._wrong_credentials = Buckets(WRONG_PER_S, WRONG_BURST)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            path = scope["path"]
            if path == PAGE or path.startswith(f"{PAGE}/"):
                await self._page(scope, receive, send)
                return
            credentials = header(scope, b"authorization")
            token = self.tokens.find(credentials.removeprefix(b"Bearer ")) if credentials.startswith(b"Bearer ") else None
            if token is None:
                await self._turn_away(scope, send, credentials)
            else:
                await self._let_in(scope, receive, send, token)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send, token: Token) -> None:
        scope[TOKEN] = token
        await self.app(scope, receive, send)

    async def _turn_away(self, scope: Scope, send: Send, credentials: bytes) -> None:
        """Answers 401, or 429 and closes the connection after too many wrong credentials.

        Valid credentials are never limited, because many machines may share one address."""
        address = (scope.get("client") or ("",))[0]
        is_tolerated = not credentials or self._wrong_credentials.take(address)
        must_close = not is_tolerated or unread(scope) > DISCARDED
        await answer(send, 401 if is_tolerated else 429, [(b"connection", b"close")] if must_close else [])

    async def _page(self, scope: Scope, receive: Receive, send: Send) -> None:
        query_key = parse_qs(scope["query_string"].decode("latin-1")).get("key", [""])[0].encode("utf-8", "replace")
        credentials = query_key or _cookie(header(scope, b"cookie"))
        token = self.tokens.find(credentials)
        if token is None or token.right == "worker":
            await self._turn_away(scope, send, credentials)
        elif scope["method"] not in ("GET", "HEAD"):
            await answer(send, 405, [(b"allow", b"GET, HEAD")])
        elif scope["path"] == PAGE:  # the page's own addresses are relative to its folder
            location = f"{PAGE}/?key={token.secret}" if query_key else f"{PAGE}/"
            await answer(send, 307, [(b"location", location.encode())])
        else:
            await self._let_in(scope, receive, _with_headers(send, _page_headers(token, set_cookie=bool(query_key))), token)


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
    """Sends an answer without a body."""
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0"), *headers]})
    await send({"type": "http.response.body", "body": b""})
