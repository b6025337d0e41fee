"""What `heloco/uvicorn_internals.py` uses of uvicorn and does not find in its documentation. Where one of these fails, a new
version of uvicorn has other names or another order: that module has to follow, before anything else is looked at."""

import asyncio
import inspect
import re
import socket
import subprocess
import sys
from typing import Any

import pytest

uvicorn = pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("httptools", reason="httptools is not installed")

from uvicorn.protocols.http import httptools_impl  # noqa: E402
from uvicorn.server import ServerState  # noqa: E402

from heloco.uvicorn_internals import EndingServer, Http, OwnListener  # noqa: E402
from support.repository import REPOSITORY  # noqa: E402


async def app(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
    await asyncio.Event().wait()


class Wire(asyncio.Transport):
    """A connection that keeps what is written to it."""

    def __init__(self) -> None:
        super().__init__({"sslcontext": True, "peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", 6)})
        self.output = b""

    def write(self, data: Any) -> None:
        self.output += bytes(data)

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...


class Owner:
    def __init__(self) -> None:
        self.refused: list[bool] = []
        self.shut, self.scopes = 0, list[Any]()

    async def serve(self, served: Any, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append((served, scope["path"]))
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await (await asyncio.sleep(0, receive))()
        await send({"type": "http.response.body", "body": b""})

    def refuse(self, *, pipelined: bool) -> None:
        self.refused.append(pipelined)

    def shut_down(self) -> None:
        self.shut += 1


def open_http() -> tuple[Http, Owner, Wire]:
    config = uvicorn.Config(app, log_config=None)
    owner, wire = Owner(), Wire()
    http = Http(config, ServerState(), {}, owner)
    http.connection_made(wire)
    return http, owner, wire


REQUEST = b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n"


async def until_answered(http: Http) -> None:
    while http.is_answering:
        await asyncio.sleep(0)


def test_a_request_is_served_by_the_owner_with_the_app_and_only_then_is_the_connection_free():
    async def run() -> None:
        http, owner, wire = open_http()
        assert not http.is_answering and not http.feed(memoryview(REQUEST[:20]))
        assert http.feed(memoryview(REQUEST[20:])) and http.is_answering and http.is_discarding
        assert http.feed(memoryview(b"ab")) and not http.is_discarding
        await until_answered(http)
        assert [path for _, path in owner.scopes] == ["/a"] and owner.scopes[0][0] is http.served_app
        assert wire.output.startswith(b"HTTP/1.1 200 OK\r\n") and http.timeout_keep_alive_task is not None
        http.connection_lost(ConnectionResetError())
        assert http.timeout_keep_alive_task is None, "the timer of a connection that was cut holds it in memory"

    asyncio.run(run())


@pytest.mark.parametrize("second", [REQUEST, REQUEST * 1000, b"GET"])
def test_a_second_request_before_the_answer_is_refused_before_it_takes_memory(second):
    async def run() -> None:
        http, owner, _ = open_http()
        http.feed(memoryview(REQUEST + b"ab" + second))
        assert owner.refused == [True] and not http.pipeline
        await until_answered(http)
        assert len(owner.scopes) == 1

    asyncio.run(run())


def test_what_is_no_http_and_the_servers_end_are_the_owners_business():
    async def run() -> None:
        http, owner, _ = open_http()
        http.feed(memoryview(b"\x16\x03\x01 no HTTP\r\n\r\n"))
        assert owner.refused == [False]
        http, owner, _ = open_http()
        http.shutdown()
        assert owner.shut == 1 and http in http.server_state.connections
        http.feed(memoryview(REQUEST))
        http.finish()
        assert not http.cycle.keep_alive

    asyncio.run(run())


def test_the_server_calls_what_is_overridden():
    for overridden in (uvicorn.Server.startup, uvicorn.Server.shutdown):
        assert list(inspect.signature(overridden).parameters) == ["self", "sockets"]
    assert inspect.signature(httptools_impl.HttpToolsProtocol.__init__).parameters.keys() >= {
        "config", "server_state", "app_state",
    }  # fmt: skip
    source = inspect.getsource(uvicorn.Server)
    for used in ("self.lifespan = ", "await self.startup(", "self.server_state", "server.close()", "await server.wait_closed()",
                 "self.started", "connection.shutdown()", "await self.shutdown(", "if self.should_exit:"):  # fmt: skip
        assert used in source, used


def test_a_server_starts_with_a_listener_of_ours_and_closes_it():
    happened: list[str] = []

    class Listening:
        def close(self) -> None:
            happened.append("closed")

        async def wait_closed(self) -> None:
            happened.append("waited")

    async def lifespan(scope: Any, receive: Any, send: Any) -> None:
        assert scope["type"] == "lifespan"
        for kind in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{kind}.complete"})
            happened.append(kind)

    def open_listener(make_http: Any) -> Listening:
        assert isinstance(make_http(Owner()), Http)
        happened.append("opened")
        server.end_soon()
        return Listening()

    server = OwnListener(uvicorn.Config(lifespan, lifespan="on", log_config=None), open_listener)
    asyncio.run(server.serve())
    assert happened == ["startup", "opened", "closed", "waited", "shutdown"]


def test_a_server_says_that_it_ends_before_it_waits_for_open_streams():
    """The stream would otherwise go on for ever, and be cancelled after the time limit with a traceback."""
    over, happened = asyncio.Event(), list[str]()

    async def stream(scope: Any, receive: Any, send: Any) -> None:  # noqa: ARG001
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await over.wait()
        await send({"type": "http.response.body", "body": b""})
        happened.append("the stream ended")

    def before_end() -> None:
        happened.append("it ends")
        over.set()

    async def run() -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(stream, lifespan="off", log_config=None, timeout_graceful_shutdown=30)
        server = EndingServer(config, before_end)
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        server.should_exit = True
        await serving
        writer.close()

    asyncio.run(run())
    assert happened == ["it ends", "the stream ended"]


def test_what_uvicorn_imports_when_a_server_starts_is_imported_before():
    """A child that `heloco serve` forks then shares it with its parent."""
    code = """
import sys, uvicorn
from heloco.cluster.gateway.connection import fastest_loop
before = set(sys.modules)
config = uvicorn.Config(print, loop=fastest_loop(), ws="none", lifespan="on", log_config=None)
config.load()
config.get_loop_factory()
print(*(name for name in set(sys.modules) - before if name.startswith("uvicorn")))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.split() == []


INSIDE = re.compile(
    r"from uvicorn|uvicorn\.(?!Config\b|Server\(|$)[A-Za-z]|\(uvicorn\.Server\):|should_exit|force_exit|\bconfig\.load(ed)?\b"
)


@pytest.fixture
def names() -> set[str]:
    """What uvicorn's protocol has beyond asyncio's documented methods, and `Http` does not define itself."""

    async def everything() -> set[str]:
        http, _, _ = open_http()
        return {*dir(http)}

    return asyncio.run(everything()) - {*dir(asyncio.Protocol), *vars(Http)}


def uses_insides(text: str, names: set[str]) -> bool:
    return bool(INSIDE.search(text)) or not names.isdisjoint(re.findall(r"_http\.(\w+)", text))


def test_nothing_else_of_the_package_uses_uvicorns_insides(names):
    source = REPOSITORY / "src" / "heloco"
    users = {path.name for path in source.rglob("*.py") if uses_insides(path.read_text(), names)}
    assert users == {"uvicorn_internals.py"}


@pytest.mark.parametrize(
    "line",
    [
        "self._deadline = self._http.loop.call_later(1.0, end)", "self._http.cycle is None", "config.load()",
        "server.should_exit = True", "from uvicorn.server import Server",
    ],
)  # fmt: skip
def test_the_search_for_uvicorns_insides_finds_every_form(line, names):
    assert uses_insides(line, names)
    assert not uses_insides("uvicorn.Server(uvicorn.Config(app)), self._http.feed(data), self._http.eof_received()", names)
