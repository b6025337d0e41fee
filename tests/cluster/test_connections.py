"""Connections to the gateway over real TLS: how long a stranger may stay, what a machine keeps, one request at a time, and an
answer to every request. On both loops that the gateway may run on."""

import contextlib
import gc
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("httptools", reason="httptools is not installed")
pytest.importorskip("cryptography", reason="cryptography is not installed")

from heloco.cluster.gateway.admission import Places
from heloco.cluster.gateway.calls import started_pool
from heloco.cluster.gateway.connection import PIPELINED, Connection
from heloco.cluster.gateway.credentials import Credentials
from heloco.cluster.gateway.https_server import GatewayServer
from heloco.cluster.protocol.messages import Right, Ticket
from heloco.cluster.server.process import RunHost
from heloco.cluster.server.token_book import TokenBook
from heloco.report import live
from rig import connect, connect_many, is_open, unchecked, until
from support import small_cluster

STRANGER, MACHINE = "127.9.0.1", "127.0.0.1"
ADMINS = ("/v1/stop",)
PLACES = Places(strangers=12, strangers_per_address=6, admitted=20)


class Gate:
    """A gateway over a small run, and raw connections to it."""

    def __init__(self, folder: Path) -> None:
        self.service = small_cluster.opened(folder / "run")
        self.host = RunHost(self.service)
        self.host.tokens = TokenBook(folder / "credentials")
        credentials, page = Credentials.load_or_make(folder / "credentials"), live.app_of_folder(folder / "run")
        self.server = GatewayServer(self.host, credentials, "127.0.0.1", 0, page=page, places=PLACES)
        self.server.start()
        self.sockets: list[socket.socket] = []

    def tcp(self, address: str) -> socket.socket:
        self.sockets.append(connect(self.server.port, address))
        return self.sockets[-1]

    def tls(self, address: str) -> ssl.SSLSocket:
        self.sockets.append(connection := unchecked().wrap_socket(self.tcp(address)))
        return connection

    def machine(self) -> ssl.SSLSocket:
        """A connection that has shown the token."""
        connection = self.tls(MACHINE)
        connection.sendall(self.request())
        assert answer_of(connection).startswith(b"HTTP/1.1 200")
        return connection

    def request(self, method: str = "GET", path: str = "/v1/clock", more: str = "") -> bytes:
        token = f"authorization: Bearer {self.secret('admin' if path in ADMINS else 'worker')}\r\n"
        return f"{method} {path} HTTP/1.1\r\nhost: x\r\n{token}{more}\r\n".encode()

    def secret(self, right: Right = "worker") -> str:
        assert self.host.tokens is not None
        return self.host.tokens.first(right).secret

    def ticket(self, ticket: Ticket) -> str:
        """The headers of a machine."""
        return f"heloco-machine: {ticket.machine} {ticket.secret}\r\nheloco-run: {self.service.state.run_id}\r\n"

    def close(self) -> None:
        for connection in self.sockets:
            connection.close()
        self.server.stop()
        self.host.close()


@pytest.fixture(params=["uvloop", "asyncio"])
def gate(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    if request.param == "uvloop":
        pytest.importorskip("uvloop", reason="uvloop is not installed")
    monkeypatch.setattr("heloco.cluster.gateway.connection.fastest_loop", lambda: request.param)
    new_gate = Gate(tmp_path)
    yield new_gate
    new_gate.close()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heloco.cluster.gateway.listener.STRANGER_S", 0.5)


def answer_of(connection: socket.socket) -> bytes:
    """One answer, with as much of a body as it says."""
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(4096)
        assert piece, data
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    size = int(lengths[0].split(b":")[1]) if lengths else 0
    while len(body) < size:
        body += connection.recv(4096)
    return head + b"\r\n\r\n" + body


def closes(connection: socket.socket, within_s: float = 20.0) -> bool:
    connection.settimeout(within_s)
    with contextlib.suppress(ConnectionResetError, ssl.SSLError):
        while connection.recv(4096):
            pass
    return True


# ---- how long who may stay


@pytest.mark.usefixtures("hasty")
def test_who_shows_no_token_is_sent_away_whatever_it_does_instead(gate):
    silent, greeter, asker, slow = gate.tcp(STRANGER), gate.tls(STRANGER), gate.tls(STRANGER), gate.tls(STRANGER)
    asker.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert answer_of(asker).startswith(b"HTTP/1.1 401")
    slow.sendall(b"GET / HTTP/1.1\r\nx: y")
    machine = gate.machine()
    assert all(closes(connection) for connection in (silent, greeter, asker, slow))
    machine.sendall(gate.request())
    assert answer_of(machine).startswith(b"HTTP/1.1 200")


def test_strangers_cannot_push_out_machines_and_one_address_cannot_push_out_others(gate):
    machines = [gate.machine() for _ in range(8)]
    for n in (1, 2, 3):
        gate.sockets += connect_many(gate.server.port, f"127.9.0.{n}", 30)
    flood = gate.sockets[16:]
    other = gate.tls("127.10.0.1")
    other.sendall(gate.request())
    assert answer_of(other).startswith(b"HTTP/1.1 200")
    until(lambda: sum(map(is_open, flood)) <= PLACES.strangers, "those without a place are closed", 20.0)
    for machine in machines:
        machine.settimeout(10)
        machine.sendall(gate.request())
        assert answer_of(machine).startswith(b"HTTP/1.1 200")


def test_without_a_place_among_the_admitted_there_is_a_refusal_that_machines_understand(gate):
    addresses = [f"127.{n}.0.1" for n in range(20, 41)]
    for address in addresses[:-1]:
        gate.tls(address).sendall(gate.request())
        assert answer_of(gate.sockets[-1]).startswith(b"HTTP/1.1 200")
    last = gate.tls(addresses[-1])
    last.sendall(gate.request())
    answer = answer_of(last)
    assert answer.startswith(b"HTTP/1.1 503") and b'"code": "busy"' in answer and closes(last)


def test_an_admitted_connection_that_shows_wrong_credentials_loses_its_place(gate):
    stranger, machine = gate.tls(STRANGER), gate.machine()
    for connection, is_admitted in ((stranger, False), (machine, True)):
        connection.sendall(b"GET /v1/clock HTTP/1.1\r\nhost: x\r\n\r\n")
        answer = answer_of(connection)
        assert answer.startswith(b"HTTP/1.1 401") and (b"connection: close" in answer) == is_admitted
    assert closes(machine)


def test_nothing_of_a_connection_that_is_over_stays_in_memory(gate):
    gc.collect()
    gc.disable()  # what only the collector would free may stay for hours
    try:
        for ending in ("close", "reset"):
            open_connections = [gate.machine() for _ in range(5)] + [gate.tls(STRANGER) for _ in range(3)]
            assert connections() >= 8
            for connection in open_connections:
                if ending == "reset":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                connection.close()
            until(lambda: connections() == 0, f"no connection in memory after {ending}", 20.0)
    finally:
        gc.enable()


def connections() -> int:
    return sum(type(instance) is Connection for instance in gc.get_objects())


def test_it_stops_at_once_with_connections_in_every_state(gate):
    gate.machine(), gate.tls(STRANGER), gate.tcp(STRANGER)
    gate.tls(MACHINE).sendall(gate.request()[:-10])
    began = time.monotonic()
    gate.server.stop()
    assert time.monotonic() - began < 4
    with pytest.raises(OSError):
        gate.tcp(MACHINE)


# ---- one request at a time


@pytest.mark.parametrize("together", [True, False])
def test_a_second_request_before_the_first_was_answered_is_refused_and_the_connection_ends(gate, together):
    connection = gate.tls(MACHINE)
    first, second = gate.request(), gate.request("POST", "/v1/stop", "content-length: 14\r\n") + b'{"reason":"x"}'
    if together:
        connection.sendall(first + second)
    else:
        waiting, ticket_header = b'{"wait_s":5}', gate.ticket(join(gate))
        round_request = gate.request("POST", "/v1/round", f"{ticket_header}content-length: {len(waiting)}\r\n") + waiting
        connection.sendall(round_request)
        connection.sendall(second)
    answer = answer_of(connection)
    assert answer.startswith(b"HTTP/1.1 400") and PIPELINED.encode() in answer and closes(connection)
    assert gate.service.state.ended is None


def join(gate: Gate) -> Ticket:
    """Four machines for three seats: the last one has to wait."""
    for name in "abc":
        small_cluster.Hand(gate.service, name).take()
    return small_cluster.Hand(gate.service, "d").ticket


def test_requests_one_after_the_other_are_answered_on_one_connection(gate):
    connection = gate.machine()
    for _ in range(200):
        connection.sendall(gate.request())
        assert answer_of(connection).startswith(b"HTTP/1.1 200")


# ---- an answer to everything


def test_head_is_answered_at_once_and_without_a_body_on_every_path(gate):
    connection, key = gate.tls(MACHINE), gate.secret("viewer")
    paths = {"/v1/clock": 405, "/v1/start": 405, "/nowhere": 404, "/page/": 200, f"/page?key={key}": 307}
    for path, status in {**paths, f"/page/events?seen=-1&key={key}": 200}.items():
        path = path if "key=" in path or "/page" not in path else f"{path}?key={key}"
        for _ in range(2):  # the connection goes on: the answer is over
            connection.sendall(gate.request("HEAD", path))
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += connection.recv(1)
            assert head.startswith(b"HTTP/1.1 %d " % status), (path, head)
            assert status < 400 or b"content-length: 0\r\n" in head, "a client that knows no HEAD would wait for the body"
    stranger = gate.tls(STRANGER)
    stranger.sendall(b"HEAD /v1/clock HTTP/1.1\r\nhost: x\r\n\r\n")
    assert answer_of(stranger).startswith(b"HTTP/1.1 401")


def test_who_asks_before_it_sends_a_body_is_told_to_or_refused(gate):
    body = b'{"reason":"x"}'
    asking = f"expect: 100-continue\r\ncontent-length: {len(body)}\r\n"
    ours = gate.ticket(small_cluster.Hand(gate.service, "a").ticket) + asking
    connection = gate.tls(MACHINE)
    connection.sendall(gate.request("POST", "/v1/beat", ours))
    assert answer_of(connection) == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.sendall(body)
    assert b'"code":"malformed"' in answer_of(connection)
    connection.sendall(gate.request("POST", "/v1/beat", ours) + body)  # some do not wait
    assert answer_of(connection).startswith(b"HTTP/1.1 100 Continue")
    assert answer_of(connection).startswith(b"HTTP/1.1 400")
    for refused, status in ((gate.request("POST", "/nowhere", asking), 404), (strangers_request(asking), 401)):
        connection = gate.tls(MACHINE)
        connection.sendall(refused)
        assert answer_of(connection).startswith(b"HTTP/1.1 %d" % status) and closes(connection)


def strangers_request(more: str) -> bytes:
    return f"POST /v1/beat HTTP/1.1\r\nhost: x\r\n{more}\r\n".encode()


@pytest.mark.parametrize("version", ["²", "%C2%B2", "%D9%A3", "1e3", "--1", "1" * 30, "%00", "x", "", "1_0", "-"])
def test_what_a_page_has_seen_is_a_number_or_refused(gate, version):
    connection = gate.tls(MACHINE)
    connection.sendall(f"GET /page/events?key={gate.secret('viewer')}&seen={version} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    assert answer_of(connection).startswith(b"HTTP/1.1 400")


# ---- files that go out


def test_when_too_many_files_go_out_the_next_one_has_to_wait(gate, monkeypatch):
    monkeypatch.setattr("heloco.cluster.gateway.calls.SPARE_DOWNLOADS", 0)
    calls, connection = gate.server.api.calls, gate.tls(MACHINE)
    machine = small_cluster.Hand(gate.service, "a")
    machine.take()
    assert machine.key is not None
    seats = gate.service.state.roster.seats
    asking = gate.request("GET", f"/v1/start?{urlencode(machine.key._asdict())}", gate.ticket(machine.ticket))
    for _ in range(seats):
        calls.begin_download()
    connection.sendall(asking)
    answer = answer_of(connection)
    assert answer.startswith(b"HTTP/1.1 503") and b'"code":"busy"' in answer
    calls.end_download()
    for _ in range(5):
        connection.sendall(asking)
        assert answer_of(connection).startswith(b"HTTP/1.1 200")
        until(lambda: calls.downloads == seats - 1, "it is over", 20.0)


# ---- threads


def test_all_threads_of_a_pool_run_from_its_start():
    pool = started_pool(5, "started")
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("started")}
    together = threading.Barrier(5)
    assert sorted(pool.map(lambda _: together.wait(10), range(5))) == [0, 1, 2, 3, 4]
    assert len(threads) == 5 and {thread for thread in threading.enumerate() if thread.name.startswith("started")} == threads
    pool.shutdown()


def test_the_gateway_starts_no_thread_once_it_runs(gate):
    """So that it needs none of a system that has no more to give."""
    before = {thread.ident for thread in threading.enumerate()}
    with ThreadPoolExecutor(1) as one:  # ours, so that requests come from elsewhere
        mine = one.submit(threading.get_ident).result()
        asks: list[Callable[[ssl.SSLSocket], Any]] = [
            lambda c: c.sendall(gate.request("GET", "/v1/describe")),
            lambda c: c.sendall(gate.request("GET", "/v1/probe?bytes=1000")),
            lambda c: c.sendall(gate.request("GET", f"/page/?key={gate.secret('viewer')}")),
        ]
        for ask in asks * 3:
            connection = gate.tls(MACHINE)
            ask(connection)
            assert one.submit(answer_of, connection).result().startswith(b"HTTP/1.1 200")
    assert {thread.ident for thread in threading.enumerate()} <= before | {mine}
