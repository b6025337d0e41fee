"""Requests that were recorded, changed in one to three ways."""

import copy
import json
import random
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from recorder import Request

CALM = {"wait_s": [0, 0.01, 0.05]}
"""Fields whose values would make an honest answer take longer than a hang."""
NUMBERS = [0, -1, 1, 2, 10**6, 2**31, 2**53, 2**53 + 1, 2**63, 2**64, 10**400, 1e308, -1e308, 0.5, 1e-320]
TEXTS = [
    "", " ", "²", "٣", "９", "1e3", "0x1", "+1", "-0", "1_0", "nan", "inf", "null", "\x00", "a\nb", "\x7f", "\ud800", "ü" * 50,
    "x" * 5000, "../../etc/passwd", "%", "%zz", "{}", "'", '"', "<b>", "machine#1", "0" * 32, "f" * 64,
]  # fmt: skip
METHODS = [
    "GET", "POST", "PUT", "HEAD", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "PRI", "get", "PROPFIND", "X" * 40, "G ET",
    "",
]  # fmt: skip
PATHS = [
    "/", "//", "*", "/v1", "/v1/", "/v2/describe", "/v1/../etc/passwd", "/%2e%2e/%2e%2e", "/v1/describe/", "/v1//status",
    "/v1/status%00", "/v1/stätus", "/page", "/page/", "/page/../v1/status", "/page/events", "/page//events", "http://x/v1/status",
    "/" + "a" * 20_000, "",
]  # fmt: skip
HEADERS = [
    ("content-length", "0"), ("content-length", "-1"), ("content-length", "1" * 30), ("content-length", "+5"),
    ("content-length", "5, 5"), ("content-length", "4000000"), ("transfer-encoding", "chunked"),
    ("transfer-encoding", "gzip, chunked"), ("transfer-encoding", "x"), ("expect", "100-continue"), ("expect", "200-ok"),
    ("connection", "close"), ("connection", "upgrade"), ("upgrade", "websocket"), ("upgrade", "h2c"), ("host", ""),
    ("host", "a, b"), ("range", "bytes=0-"), ("range", "bytes=-5"), ("range", "bytes=9999999-"), ("range", "bytes=1-2,3-4"),
    ("range", "x" * 5000), ("cookie", "heloco-view=x"), ("cookie", "=;;=\"\\"), ("cookie", "x" * 9000),
    ("authorization", "Bearer "), ("authorization", "Basic eDp5"), ("authorization", "Bearer " + "x" * 43),
    ("last-event-id", "²"), ("last-event-id", "-1"), ("content-encoding", "gzip"), ("content-type", "text/plain"),
    ("x" * 300, "y"), ("x", "y" * 30_000), ("x y", "z"), ("", "z"), ("x", "a\x00b"), ("x", "ü"), ("forwarded", "for=1.2.3.4"),
    ("x-forwarded-for", "127.0.0.1"), ("if-modified-since", "x"), ("accept", "*/*"), ("te", "trailers"),
    ("keep-alive", "timeout=999999"),
]  # fmt: skip


class Mutator:
    """A stream of changed requests, the same for the same seed and the same requests."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._changes: list[Callable[[Request], Any]] = [
            self.change_method, self.change_path, self.change_query, self.change_query, self.add_header, self.drop_header,
            self.double_header, self.change_header, self.change_body, self.change_body, self.change_body, self.change_length,
        ]  # fmt: skip

    def mutate(self, request: Request, *, must_break: bool) -> bytes:
        """`must_break`: as it is, or nearly so, the request would end the run."""
        changed = copy.deepcopy(request)
        self._calm(changed)
        for _ in range(self.random.choice([1, 1, 1, 2, 3])):
            self.random.choice(self._changes)(changed)
        if must_break and self.random.random() < 0.99:
            changed.headers = [(name, value) for name, value in changed.headers if name.lower() != "authorization"]
        return self._on_the_wire(changed.written())

    def _on_the_wire(self, text: bytes) -> bytes:
        kind = self.random.random()
        if kind < 0.04:
            return text[: self.random.randrange(len(text) + 1)]
        if kind < 0.07:
            return text + self.random.choice([text, b"\r\n", b"GET / HTTP/1.1\r\n\r\n", self.random.randbytes(40)])
        if kind < 0.10:
            return self._flipped(text)
        if kind < 0.12:
            return text.replace(b"HTTP/1.1", self.random.choice([b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9.9", b"HTCPCP/1.0", b""]), 1)
        if kind < 0.13:
            return text.replace(b"\r\n", self.random.choice([b"\n", b"\r", b"\r\r\n", b" \r\n"]))
        return text

    def packets(self, text: bytes) -> list[bytes]:
        """Most requests come in one piece; some in several, cut anywhere."""
        if self.random.random() > 0.15 or len(text) < 2:
            return [text]
        ends = sorted(self.random.randrange(1, len(text)) for _ in range(self.random.choice([1, 2, 5])))
        return [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)], strict=True) if a < b]

    # ---- what may change

    def change_method(self, request: Request) -> None:
        request.method = self.random.choice(METHODS)

    def change_path(self, request: Request) -> None:
        kind = self.random.randrange(4)
        if kind == 0:
            request.path = self.random.choice(PATHS)
        elif kind == 1:
            request.path += self.random.choice(["/", "//", "/..", "%00", "%2f", ".json", ";x", "?", "#", "ü", "%C2%B2"])
        elif kind == 2:
            request.path = quote(request.path, safe="") if self.random.random() < 0.5 else request.path.upper()
        else:
            at = self.random.randrange(len(request.path) + 1)
            request.path = request.path[:at] + self.random.choice(["%", "%41", "\t", "/", ".", "x"]) + request.path[at:]

    def change_query(self, request: Request) -> None:
        pairs = parse_qsl(request.query, keep_blank_values=True) or [("a", "b")]
        at, kind = self.random.randrange(len(pairs)), self.random.randrange(6)
        if kind == 0:
            pairs.pop(at)
        elif kind == 1:
            pairs.append(pairs[at])
        elif kind == 2:
            pairs.append(("seen", self._text()))
        elif kind == 3:
            self.random.shuffle(pairs)
        else:
            pairs[at] = (pairs[at][0], self._text())
        request.query = urlencode(pairs, errors="surrogatepass")
        if self.random.random() < 0.1:
            request.query += self.random.choice(["&", "&&", "&%", "&=", "#x", "&a=%zz", "²", "&" * 50])

    def _text(self) -> str:
        return self.random.choice([*TEXTS, str(self.random.choice(NUMBERS)), f"{self.random.getrandbits(128):x}"])

    def add_header(self, request: Request) -> None:
        request.headers.insert(self.random.randrange(len(request.headers) + 1), self.random.choice(HEADERS))

    def drop_header(self, request: Request) -> None:
        if request.headers:
            request.headers.pop(self.random.randrange(len(request.headers)))

    def double_header(self, request: Request) -> None:
        if request.headers:
            request.headers.append(self.random.choice(request.headers))

    def change_header(self, request: Request) -> None:
        if request.headers:
            at = self.random.randrange(len(request.headers))
            name, value = request.headers[at]
            changes = [value[:-1], value + "x", value.upper(), "", f" {value}", value.replace("e", "é"), f"{value}, {value}"]
            request.headers[at] = (name, self.random.choice(changes))

    def change_length(self, request: Request) -> None:
        wrong = len(request.body) + self.random.choice([-1, 1, -5, 100, 5_000_000, 10**18, -len(request.body)])
        request.headers = [(n, v) for n, v in request.headers if n.lower() != "content-length"]
        request.headers.append(("content-length", str(wrong)))

    def change_body(self, request: Request) -> None:
        """The length is right for it, unless something else changes that."""
        try:
            values = json.loads(request.body)
        except (ValueError, RecursionError):
            values = None
        if values is not None and self.random.random() < 0.8:
            self._change_value(values)
            request.body = json.dumps(values, ensure_ascii=self.random.random() < 0.9).encode("utf-8", "surrogatepass")
        else:
            request.body = self._changed_bytes(request.body)
        request.headers = [(n, v) for n, v in request.headers if n.lower() != "content-length"]
        request.headers.append(("content-length", str(len(request.body))))

    def _changed_bytes(self, body: bytes) -> bytes:
        kind = self.random.randrange(5)
        if kind == 0:
            return body[: self.random.randrange(len(body) + 1)]
        if kind == 1:
            return body + self.random.randbytes(self.random.choice([1, 100, 5000]))
        if kind == 2:
            return self.random.randbytes(self.random.choice([1, 50, 3000]))
        if kind == 3:
            depth = self.random.choice([10, 1000, 30_000])
            deep = [b"[" * depth, b'{"a":' * depth, b"[" * depth + b"]" * depth]
            return self.random.choice([*deep, b"\xff\xfe{}", b"\xef\xbb\xbf{}"])
        return self._flipped(body)

    def _flipped(self, content: bytes) -> bytes:
        flipped = bytearray(content or b"\0")
        for _ in range(self.random.choice([1, 1, 3, 20])):
            flipped[self.random.randrange(len(flipped))] ^= 1 << self.random.randrange(8)
        return bytes(flipped)

    def _change_value(self, values: Any) -> None:
        """Somewhere in it: a value that is no good, one too few, one too many."""
        places = list(_places(values))
        if not places:
            return
        holder, name = self.random.choice(places)
        kind = self.random.randrange(5)
        if kind == 0:
            holder.pop(name)
        elif kind == 1 and isinstance(holder, dict):
            holder[self._text()] = self._value()
        elif kind == 1:
            holder.insert(name, self._value())
        else:
            holder[name] = self.random.choice(CALM.get(name, [self._value()])) if isinstance(name, str) else self._value()

    def _value(self) -> Any:
        simple = [None, True, False, [], {}, [[]], {"a": 1}, [None], self.random.choice(NUMBERS), self._text()]
        shapes = [[["parameter.0", "F32", [2**39, 2**39]]], [["parameter.0", "F32", [-1]]], [["parameter.0", "BOOL", [3]]]]
        return self.random.choice([*simple, self.random.choice(NUMBERS), self._text(), self.random.choice(shapes)])

    @staticmethod
    def _calm(request: Request) -> None:
        try:
            values = json.loads(request.body)
        except (ValueError, RecursionError):
            return
        if isinstance(values, dict) and CALM.keys() & values.keys():
            request.body = json.dumps(values | dict.fromkeys(CALM.keys() & values.keys(), 0)).encode()
            request.headers = [(n, v) for n, v in request.headers if n.lower() != "content-length"]
            request.headers.append(("content-length", str(len(request.body))))


def _places(values: Any) -> Any:
    """(holder, key or index) of every value inside."""
    inside = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for name, value in list(inside):
        yield values, name
        yield from _places(value)
