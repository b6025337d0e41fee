"""Thousands of malformed messages to a gateway, from somebody who has the token: each is refused by name, and changes nothing."""

import copy
import http.client
import json
import random
import socket
import ssl
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
import torch

from heloco.cluster.protocol.messages import RoundKey
from heloco.records.journal_reader import FOLDER, segments
from support.gateways import NUMBERS, Machine, Serve, Served
from support.programs import wait_until

COUNTS = {"fp32": 3_000, "int4": 1_000}
"""Format of contributions -> how many messages are sent."""
RAW_SHARE = 20
"""One in so many is no HTTP at all; each takes a connection of its own."""
NAMES = {
    "malformed", "path", "method", "length", "too-long", "unknown-machine", "other-run", "not-held", "future", "offset", "layout",
    "incomplete", "has-model", "version", "http", "no-model", "rate", "corrupted", "right", "secret", "scores",
}  # fmt: skip
Request = tuple[str, str, bytes, dict[str, str]]
"""Method, path with query, body, headers."""


class Sender:
    """Keeps its connection, as long as the gateway does."""

    def __init__(self, served: Served, machine: Machine) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.context.check_hostname, self.context.verify_mode = False, ssl.CERT_NONE
        self.port = served.port
        self.headers = {
            "host": "x", "authorization": f"Bearer {served.secret()}", "heloco-run": served.run,
            "heloco-machine": f"{machine.ticket.machine} {machine.ticket.secret}",
        }  # fmt: skip
        self.connection = self._connected()

    def _connected(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=20, context=self.context)

    def send(self, request: Request) -> tuple[int, bytes]:
        method, path, body, headers = request
        self.connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
        for name, value in {**self.headers, **headers}.items():
            self.connection.putheader(name, value)
        if not {"content-length", "transfer-encoding"} & headers.keys() and body:
            self.connection.putheader("content-length", str(len(body)))
        self.connection.endheaders(body or None)
        answer = self.connection.getresponse()
        content = answer.read()
        if answer.will_close:
            self.connection.close()
            self.connection = self._connected()
        return answer.status, content

    def send_raw(self, text: bytes) -> bytes:
        """Whatever comes back before the gateway ends the connection, or after one answer."""
        with self.context.wrap_socket(socket.create_connection(("127.0.0.1", self.port), timeout=20)) as plain:
            plain.sendall(text)
            answer = b""
            while b"\r\n\r\n" not in answer and (piece := plain.recv(4096)):
                answer += piece
            return answer


class Malformed:
    """Makes messages that are wrong in one way each."""

    def __init__(self, seed: int, machine: Machine, key: RoundKey) -> None:
        self.random = random.Random(seed)
        about = key._asdict()
        layout = json.loads(json.dumps(machine.layout.entries))
        self.bodies: dict[str, dict[str, Any]] = {
            "/v1/join": {"name": "x", "version": "0.1.0", "layout": layout},
            "/v1/round": {"wait_s": 0},
            "/v1/beat": {"steps": 1},
            "/v1/abandon": {"text": "r"},
            "/v1/leave": {"text": "r"},
            "/v1/stop": {"text": "r"},
            "/v1/suspend": {"text": "r"},
            "/v1/tokens": {"right": "admin", "note": "n"},
            "/v1/model": {"layout": layout},
            "/v1/model/commit": {"names": ["a", "b"], "digest": "0" * 32},
            "/v1/contribution/commit": about | NUMBERS | {"digest": "0" * 32},
            "/v1/evaluation": {"arrival": 0, "scores": {"a": {"loss": 1.0}, "b": {"accuracy": 1.0}}},
            "/v1/scores": about | {"own_steps": 0, "scores": {"a": {"loss": 1.0}}},
        }
        self.optional = {"layout", "loss", "last_loss", "samples", "units", "note"}
        self.queries: dict[tuple[str, str], dict[str, Any]] = {
            ("GET", "/v1/start"): about,
            ("GET", "/v1/contribution"): about,
            ("PUT", "/v1/contribution"): about | {"offset": 0},
            ("PUT", "/v1/model"): {"offset": 0},
            ("GET", "/v1/probe"): {"bytes": 1},
            ("GET", "/v1/file"): {"name": "tape.jsonl", "offset": 0},
        }
        self.file = machine.content(machine.delta())
        self.header = len(machine.contribution.header)
        self.kinds: list[Callable[[], Request]] = [
            self.noise, self.cut_json, self.wrong_body, self.wrong_value, self.deep, self.wrong_query, self.wrong_place,
            self.wrong_tensors, self.wrong_path, self.wrong_headers, self.strange_json,
        ]  # fmt: skip

    def __iter__(self) -> Iterator[Request]:
        while True:
            yield self.random.choice(self.kinds)()

    def _bytes(self, limit: int = 300) -> bytes:
        return self.random.randbytes(self.random.randint(1, limit))

    def _body(self) -> tuple[str, dict[str, Any]]:
        path = self.random.choice(list(self.bodies))
        return path, copy.deepcopy(self.bodies[path])

    def _junk(self) -> Any:
        """A value that no field takes."""
        big = self.random.choice([10**400, -(10**400), 2**64, -1, 1e308, -1e308])
        return self.random.choice([
            big, [], {}, [[]], {"a": 1}, True, False, "", "\x00", "a\nb", "\ud800", "x" * 5000, [None], [1, "a"],
            [["parameter.0"]],
            [["parameter.0", "F32", [-1]]], [["parameter.0", "F33", [1]]], [["parameter.1", "F32", [1]]],
            [["../x", "F32", [1]]], [["parameter.0", "F32", [2**39, 2**39]]], [["parameter.0", "F32", [1]]] * 2,
        ])  # fmt: skip

    # ---- kinds

    def noise(self) -> Request:
        path, _ = self._body()
        return "POST", path, self._bytes(), {}

    def cut_json(self) -> Request:
        path, body = self._body()
        text = json.dumps(body).encode()
        return "POST", path, text[: self.random.randint(1, len(text) - 1)], {}

    def wrong_body(self) -> Request:
        """A field too few, too many, or no fields at all."""
        path, body = self._body()
        kind = self.random.randrange(3)
        if kind == 0 and (needed := [name for name in body if name not in self.optional]):
            body.pop(self.random.choice(needed))
        elif kind == 1:
            body[f"field{self.random.randrange(9)}"] = self._junk()
        else:
            return "POST", path, json.dumps([body, list(body), 1, None, "x"][self.random.randrange(1, 5)]).encode(), {}
        return "POST", path, json.dumps(body).encode(), {}

    def wrong_value(self) -> Request:
        path, body = self._body()
        name = self.random.choice(list(body))
        value = self._junk()
        if (name in ("text", "name", "note") and value in ("\x00", "a\nb")) or (name in ("text", "note") and value == ""):
            value = 7  # what is for people is only cleaned
        if name in ("loss", "last_loss") and isinstance(value, float | int) and not isinstance(value, bool):
            value = 10**400
        if name == "names" and value == []:
            value = 7
        body[name] = value
        return "POST", path, json.dumps(body).encode(), {}

    def deep(self) -> Request:
        path, body = self._body()
        depth = self.random.choice([50, 900, 5000, 20_000])
        opening, closing = self.random.choice([("[", "]"), ('{"a":', "}")])
        name = self.random.choice(list(body))
        text = f'{{"{name}":{opening * depth}1{closing * depth}}}'
        return "POST", path, text.encode(), {}

    def strange_json(self) -> Request:
        path, body = self._body()
        name = self.random.choice(list(body))
        value = self.random.choice(
            ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "0x10", "'a'", "01", '"\\ud800"']
        )
        rest = json.dumps({n: v for n, v in body.items() if n != name})
        text = f'{rest[:-1]}{", " if len(body) > 1 else ""}"{name}":{value}}}'.encode()
        return "POST", path, self.random.choice([b"", b"\xef\xbb\xbf", b"\xff\xfe"]) + text, {}

    def wrong_query(self) -> Request:
        (method, path), parameters = self.random.choice(list(self.queries.items()))
        parameters = dict(parameters)
        name = self.random.choice(list(parameters))
        kind = self.random.randrange(4)
        if kind == 0:
            parameters.pop(name)
        elif kind == 1:
            parameters[name] = self.random.choice(
                ["-1", "1e3", "0x1", " 1", "９", "1" * 30, "", "a\x00b", "\x7f", "1_0", "+1", "nan"]
            )
        elif kind == 2:
            parameters["more"] = 1
        else:
            query = quote(self._bytes(), safe="&=;%+")
            return method, f"{path}?{query}&{name}", b"x" if method == "PUT" else b"", {}
        return method, f"{path}?{urlencode(parameters)}", b"x" if method == "PUT" else b"", {}

    def wrong_place(self) -> Request:
        """Well formed, but of another machine, another run, another time."""
        (method, path), parameters = self.random.choice([item for item in self.queries.items() if "worker" in item[1]])
        wrong: dict[str, Any] = self.random.choice([
            {}, {"version": self.random.randint(1, 2**53)}, {"round": self.random.randint(1, 2**53)},
            {"worker": self.random.randint(3, 2**31)},
        ])  # fmt: skip
        others: list[dict[str, str]] = [
            {"heloco-machine": f"nobody#{self.random.randrange(9)} secret"}, {"heloco-run": "0" * 16}, {"heloco-machine": ""},
            {"heloco-machine": "x" * 5000}, {"heloco-machine": " "}, {"heloco-run": "\u00fc"},
        ]  # fmt: skip
        headers = {} if wrong else self.random.choice(others)
        return method, f"{path}?{urlencode(parameters | wrong)}", self._bytes() if method == "PUT" else b"", headers

    def wrong_tensors(self) -> Request:
        """To the round that is held: another model's, too long, at the wrong place, too early a commit."""
        parameters = dict(self.queries["PUT", "/v1/contribution"])
        kind = self.random.randrange(4)
        body = bytearray(self.file[: self.random.randint(1, self.header)])
        if kind == 0:
            at = self.random.randrange(len(body))
            body[at] ^= self.random.randint(1, 255)
        elif kind == 1:
            parameters["offset"] = self.random.choice(
                [1, len(self.file), len(self.file) + 1, 2**50, self.random.randint(1, 2**53)]
            )
        elif kind == 2:
            body = bytearray(self.file + self._bytes())
        else:
            commit = self.bodies["/v1/contribution/commit"] | {"digest": self.random.randbytes(16).hex()}
            return "POST", "/v1/contribution/commit", json.dumps(commit).encode(), {}
        return "PUT", f"/v1/contribution?{urlencode(parameters)}", bytes(body), {}

    def wrong_path(self) -> Request:
        paths = [*self.bodies, *[path for _, path in self.queries], "/v1/describe", "/v1/status", "/v1/clock"]
        path = self.random.choice(paths)
        kind = self.random.randrange(4)
        if kind == 0:
            return self.random.choice(["DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"]), path, b"", {}
        if kind == 1:
            return (
                "GET",
                self.random.choice(["/", "//", "/v1", "/v1/", "/v2/describe", "/v1/../etc/passwd", "/v1/describe/", "*"]),
                b"",
                {},
            )
        if kind == 2:
            return "POST", "/" + quote(self._bytes(40)), b"", {"content-length": "0"}
        return "GET", f"{path}{quote(self.random.choice(['%00', '/..', '.json', 'ü', '//']))}", b"", {}

    def wrong_headers(self) -> Request:
        path, body = self._body()
        text = json.dumps(body).encode()
        kind = self.random.randrange(5)
        if kind == 0:
            return "POST", path, b"", {}  # no length at all
        if kind == 1:
            return "POST", path, f"{len(text):x}\r\n".encode() + text + b"\r\n0\r\n\r\n", {"transfer-encoding": "chunked"}
        if kind == 2:
            query = urlencode(self.queries["GET", "/v1/start"])
            wrong = ["bytes=-1", "bytes=1-2", "bytes=0-0,5-9", "x", "bytes=99999999999-", "bytes=" + "1" * 40 + "-", "items=0-"]
            return "GET", f"/v1/start?{query}", b"", {"range": self.random.choice(wrong)}
        if kind == 3:
            announced = {"content-length": str(self.random.choice([5_000_000, 10**15, 10**18]))}  # and nothing of it sent
            return (
                ("POST", path, b"", announced) if self.random.random() < 0.2 else ("POST", path, text + b" " * 70_000 + b"x", {})
            )
        return (
            "POST",
            path,
            zlib.compress(text),
            {"content-encoding": "deflate", "x-noise": "y" * 5000, "content-type": "text/plain"},
        )


def _refused(status: int, content: bytes) -> str:
    assert 400 <= status < 500, (status, content)
    answer = json.loads(content)
    assert set(answer) >= {"code", "text"} and answer["text"]
    assert answer["code"] in NAMES, answer
    return str(answer["code"])


def raw_noise(seed: int) -> Iterator[bytes]:
    """What is no HTTP, or HTTP that is broken before it says who it is."""
    generator = random.Random(seed)
    length = b"GET / HTTP/1.1\r\nContent-Length: "
    starts = [
        b"\0", b"GET", b"GET / HTTP/9.9\r\n", b"\x16\x03\x01", b"PRI * HTTP/2.0", b"CONNECT x:1 HTTP/1.1\r\n",
        b"GET http:///// HTTP/1.1\r\n", b"GET \xff HTTP/1.1\r\n", b"GET / HTTP/1.1\r\n: empty\r\n", length + b"x\r\n",
        length + b"-1\r\n", length + b"1\r\nTransfer-Encoding: chunked\r\n", length + b"1\r\nContent-Length: 2\r\n",
    ]  # fmt: skip
    while True:
        yield generator.choice(starts) + generator.randbytes(generator.randint(0, 60)) + b"\r\n\r\n\r\n\r\n"


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("wire", COUNTS)
def test_thousands_of_malformed_messages_are_refused_by_name_and_change_nothing(serve: Serve, wire: str) -> None:
    count, raw_count = COUNTS[wire], COUNTS[wire] // RAW_SHARE
    served = serve(beat_s=60.0, wire=wire)  # the machine does nothing meanwhile, and must not count as lost
    machine = Machine(served.link())
    key = machine.take()
    wait_until(lambda: has_evaluated(served.folder), "the first evaluation is written")
    [(_, events)] = segments(served.folder / FOLDER)
    before = (served.digest(), events.read_bytes(), _files(served.folder))
    sender, messages, names = Sender(served, machine), iter(Malformed(0, machine, key)), Counter[str]()
    for _ in range(count - raw_count):
        request = next(messages)
        status, content = sender.send(request)
        try:
            names[_refused(status, content)] += 1
        except (AssertionError, ValueError) as error:
            raise AssertionError(
                f"{request[0]} {request[1]} {request[2][:200]!r} {request[3]}: {status} {content[:200]!r}"
            ) from error
    noise = raw_noise(0)
    for _ in range(raw_count):
        text = next(noise)
        answer = sender.send_raw(text)
        assert answer.startswith(b"HTTP/1.1 4"), (text, answer)
        names["http" if answer.startswith(b"HTTP/1.1 400") else "401"] += 1
    assert {"malformed", "path", "method", "length", "too-long", "unknown-machine", "not-held", "future", "offset", "layout",
            "other-run", "incomplete", "http", "right", "secret"} <= names.keys(), names  # fmt: skip
    assert sum(names.values()) == count
    assert (served.digest(), events.read_bytes(), _files(served.folder)) == before
    assert not served.service.state.ended
    _still_works(machine, key)
    assert len(served.service.state.roster.present) == 1


def has_evaluated(folder: Path) -> bool:
    lines, copies = folder / "evals.jsonl", folder / "evaluating"
    return lines.exists() and lines.stat().st_size > 0 and not (copies.exists() and any(copies.iterdir()))


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.stat().st_size or path.is_dir())


def _still_works(machine: Machine, key: RoundKey) -> None:
    start = machine.fetch(key)
    assert all(torch.isfinite(tensor).all() for tensor in start.values())
    ack = machine.hand_in(key, machine.delta())
    assert (ack.verdict, ack.arrival) == ("applied", 1)
