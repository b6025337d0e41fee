"""Transfers through the HTTPS gateway: connections that are cut, frozen or silent, a model from outside, large bodies."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from heloco.cluster.client.run_client import RunClient
from heloco.cluster.protocol.link import LinkDown, digest_of
from heloco.cluster.protocol.messages import RoundKey
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.server.open_run import external_run
from heloco.run import RunConfig, resolve, with_fields
from heloco.wire.layout import Layout
from support.gateways import Machine, Served, train
from support.runs import tape

pytest.importorskip("httpx", reason="httpx is not installed")
pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("cryptography", reason="cryptography is not installed")

pytestmark = pytest.mark.usefixtures("one_thread")


class Proxy:
    """Forwards connections byte by byte and disturbs them: at the n-th byte in a direction, for each n of a list in turn.

    "cut" ends the connection, "freeze" forwards nothing more and says nothing, as a half-open connection does.
    """

    def __init__(self, port: int, up: list[int] | None = None, down: list[int] | None = None, fault: str = "cut") -> None:
        self.target, self.fault = port, fault
        self.limits = {"up": list(up or []), "down": list(down or [])}
        self.struck = 0
        self.passed = {"up": 0, "down": 0}
        """Bytes in all."""
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self.target))
                self._sockets += [near, far]
                frozen = threading.Event()
                for direction, pair in (("up", (near, far)), ("down", (far, near))):
                    threading.Thread(target=self._pump, args=(direction, *pair, frozen), daemon=True).start()

    def _pump(self, direction: str, source: socket.socket, sink: socket.socket, frozen: threading.Event) -> None:
        count = 0
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 14):
                count += len(piece)
                if self._strikes(direction, count):
                    frozen.set()
                    if self.fault == "cut":
                        for end in (source, sink):
                            end.shutdown(socket.SHUT_RDWR)
                            end.close()
                        return
                if not frozen.is_set():
                    sink.sendall(piece)
                    self.passed[direction] += len(piece)
        if not frozen.is_set():
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)

    def _strikes(self, direction: str, count: int) -> bool:
        with self._lock:
            limits = self.limits[direction]
            if not limits or count < limits[0]:
                return False
            limits.pop(0)
            self.struck += 1
            return True

    def close(self) -> None:
        for end in (self._listening, *self._sockets):
            end.close()


@pytest.fixture
def proxied() -> Iterator[Callable[..., Proxy]]:
    proxies: list[Proxy] = []

    def begin(*arguments: Any, **options: Any) -> Proxy:
        proxies.append(Proxy(*arguments, **options))
        return proxies[-1]

    yield begin
    for proxy in proxies:
        proxy.close()


# ---- connections that are cut


def test_an_upload_goes_on_where_it_was_cut_and_the_result_is_the_same(serve, proxied):
    outcomes = []
    for limits in ([], [40_000, 60_000]):
        served = serve()
        proxy = proxied(served.port, up=limits)
        machine = Machine(served.link(proxy.port))
        key = machine.take()
        sizes = []
        for _ in range(len(limits)):
            with pytest.raises(LinkDown):
                machine.hand_in(key, machine.delta())
            sizes.append(_stored(served, machine, key))
        ack = machine.hand_in(key, machine.delta())
        assert proxy.struck == len(limits)
        assert all(size < machine.contribution.size for size in sizes)
        outcomes.append((ack, served.digest()))
    assert outcomes[0] == outcomes[1]


def _stored(served: Served, machine: Machine, key: RoundKey, at_least: int = -1) -> int:
    """How much of a contribution is there; the gateway may notice a cut a moment after we do."""
    until = time.monotonic() + 10
    with served.raw(ticket=machine.ticket) as client:
        while time.monotonic() < until:
            size: int = client.get("/v1/contribution", params=key._asdict()).json()["size"]
            if size > at_least:
                return size
    raise AssertionError("nothing was kept of what came before the cut")


def test_a_download_goes_on_where_it_was_cut_and_is_the_same(served, proxied):
    whole = Machine(served.link(), "a")
    key = whole.take()
    expected = {name: tensor.clone() for name, tensor in whole.fetch(key).items()}
    proxy = proxied(served.port, down=[50_000, 50_000])
    link = served.link(proxy.port)
    link.describe()
    tensors = whole.fetch(key, link)
    assert proxy.struck == 2
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    tensors["parameter.0"].zero_()  # it is the machine's own
    assert torch.equal(whole.fetch(key)["parameter.0"], expected["parameter.0"])


def test_a_download_goes_on_in_the_next_call_too(served, proxied):
    machine = Machine(served.link(), "a")
    key = machine.take()
    proxy = proxied(served.port, down=[50_000, 4_000])  # the second cut comes before a byte of the body
    link = served.link(proxy.port)
    link.describe()
    with pytest.raises(LinkDown):
        machine.fetch(key, link)
    before = proxy.passed["down"]
    tensors = machine.fetch(key, link)
    assert proxy.passed["down"] - before < machine.layout.size - 10_000  # not all of it came again
    expected = machine.fetch(key)
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_half_open_connection_is_noticed_and_left(served, proxied, direction):
    """Nobody says that it is broken: it just stays silent. The next connection takes over where it stopped."""
    proxy = proxied(served.port, **{direction: [40_000]}, fault="freeze")
    link = served.link(proxy.port, timeout_s=1.5)
    machine = Machine(link)
    key = machine.take()
    if direction == "down":
        start = machine.fetch(key)
        assert proxy.struck == 1
        expected = machine.fetch(key, served.other_link())
        assert all(torch.equal(start[name], expected[name]) for name in expected)
    else:
        with pytest.raises(LinkDown):
            machine.hand_in(key, machine.delta())
        assert proxy.struck == 1
        assert 10_000 < _stored(served, machine, key, at_least=10_000) < machine.contribution.size
    assert machine.hand_in(key, machine.delta()).verdict == "applied"


def test_a_member_gets_through_a_bad_line_by_itself(serve, tiny, proxied):
    """Cut and frozen again and again; the parameters are those of an undisturbed run."""
    smooth, rough = serve(arrivals=5), serve(arrivals=5)
    train(tiny, smooth.link(), "m")
    proxy = proxied(rough.port, up=[60_000, 90_000, 150_000], down=[70_000, 50_000, 5_000])
    train(tiny, rough.link(proxy.port), "m")
    assert proxy.struck == 6
    assert [line["digest"] for line in tape(smooth.folder)] == [line["digest"] for line in tape(rough.folder)]


def test_a_connection_that_says_nothing_is_closed(served, monkeypatch):
    monkeypatch.setattr("heloco.cluster.gateway.connection.HEADERS_S", 0.2)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    whole = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
    for request, fragment in ((b"", b""), (b"", whole[:-2]), (whole, b"GET / HT"), (whole, b"")):
        with context.wrap_socket(socket.create_connection(("127.0.0.1", served.port), timeout=10)) as quiet:
            if request:
                quiet.sendall(request)
                assert quiet.recv(1000).startswith(b"HTTP/1.1 401")
            quiet.sendall(fragment)
            if fragment or not request:
                with contextlib.suppress(ConnectionResetError, ssl.SSLError):
                    assert quiet.recv(1000) == b""


def test_headers_without_end_are_refused(served):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with context.wrap_socket(socket.create_connection(("127.0.0.1", served.port), timeout=10)) as talkative:
        answer = b""
        with contextlib.suppress(OSError):
            talkative.sendall(b"GET / HTTP/1.1\r\n")
            for _ in range(100):
                talkative.sendall(b"x: " + b"y" * 2000 + b"\r\n")
        with contextlib.suppress(OSError):
            while piece := talkative.recv(1000):
                answer += piece
    assert answer == b"" or (answer.startswith(b"HTTP/1.1 400") and b'"code": "http"' in answer)


# ---- a model from outside


@pytest.fixture
def external(tmp_path: Path) -> Iterator[Served]:
    settings = {"task": "external", "paces": [1.0], "inner_steps": 2, "arrivals": 4, "method": "heloco", "device": "cpu"}
    folder = tmp_path / "external"
    served = Served(external_run(resolve(with_fields(RunConfig(), settings)), folder), folder)
    yield served
    served.close()


def test_a_model_comes_in_through_the_gateway_and_goes_on_where_it_was_cut(external, proxied):
    model = {"parameter.0": torch.randn(300, 100), "parameter.1": torch.randn(7), "buffer.0": torch.arange(3)}
    layout = Layout.from_tensors(model)
    proxy = proxied(external.port, up=[50_000])
    member = RunClient(external.link(proxy.port), "m", layout=layout, tell=lambda _: None)
    assert member.join().needs_model
    with pytest.raises(Refused, match="name of their own") as refused:
        member.send_model(layout, model, ["a", "a", "c"])
    assert refused.value.code is RefusalCode.MODEL and proxy.struck == 1
    member.send_model(layout, model, ["a", "b", "c"])
    member.send_model(layout, model, ["a", "b", "c"])  # it has one now, and that is no mistake
    taken_round = member.take()
    assert taken_round is not None
    assert all(torch.equal(taken_round.start[name], model[name]) for name in model)
    member.leave()


def test_a_large_body_needs_little_memory_on_its_way_in_and_out(external):
    """64 MB in and out: measured over the whole process, whose client makes and forgets one small piece after another."""
    layout = Layout((("parameter.0", "F32", (1 << 24,)),))
    link = external.link()
    ticket = link.join("m", returning=None, layout=layout).ticket
    zeros = memoryview(bytes(1 << 16))

    def body() -> Iterator[Any]:
        yield layout.header
        yield from (zeros for _ in range(1 << 10))

    with external.raw(ticket=ticket) as client:

        def up() -> None:
            assert client.post("/v1/model", json={"layout": layout.entries}).json()["size"] == 0
            length = {"content-length": str(layout.size)}
            upload = client.put("/v1/model", params={"offset": 0}, content=body(), headers=length)
            assert upload.json()["size"] == layout.size

        def down() -> None:
            key = link.next_round(ticket, 5).key
            with client.stream("GET", "/v1/start", params=key._asdict()) as response:
                assert sum(map(len, response.iter_raw())) == layout.size

        link.probe_up(1 << 22)
        link.probe_down(1 << 22)
        grown_up = _growth(up)
        digest = digest_of(layout, {"parameter.0": torch.zeros(1 << 24)})
        while client.post("/v1/model/commit", json={"names": ["w"], "digest": digest}).status_code == 202:
            pass
        assert grown_up < 12e6
        assert _growth(down) < 12e6


def _growth(work: Callable[[], None]) -> float:
    """By how many bytes the process's memory was larger at its peak than before; files that are cached do not count."""
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("the peak of a process's memory cannot be reset here")

    def value(name: str) -> int:
        lines = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
        return int(lines[0].split()[1]) * 1024

    Path("/proc/self/clear_refs").write_text("5")
    before = value("VmRSS:")
    work()
    return value("VmHWM:") - before
