"""The gateway's server: ports, stopping and starting again, the packages it needs, the page, files and status it serves."""

import contextlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from heloco.cluster.gateway import check_parts
from heloco.cluster.gateway.https_server import GatewayServer
from heloco.cluster.protocol.link import LinkDown
from heloco.cluster.protocol.messages import Wait
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.errors import UserError
from support.gateways import Machine

pytest.importorskip("httpx", reason="httpx is not installed")
pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("cryptography", reason="cryptography is not installed")

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- packages


def test_missing_packages_are_named_with_the_remedy():
    with pytest.raises(UserError, match=r'needs no_such_package: pip install "heloco\[cluster\]"'):
        check_parts("httpx", "no_such_package")


def test_the_links_side_loads_no_server_and_the_package_neither():
    heavy = ("uvicorn", "starlette", "httpx", "cryptography")
    code = f"import heloco.cluster.gateway.https_link, sys; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr


# ---- listening


def test_a_port_that_is_taken_and_an_address_of_others_are_sentences(served):
    for host, port, says in (("127.0.0.1", served.port, "is taken"), ("192.0.2.1", 0, "not an address of this machine"),
                             ("no.such.host.invalid", 0, "not an address to listen at")):  # fmt: skip
        with pytest.raises(UserError, match=says):
            GatewayServer(served.host, served.server.credentials, host, port).start()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may listen everywhere")
def test_a_privileged_port_is_a_sentence(served):
    with pytest.raises(UserError, match="from 1024 on"):
        GatewayServer(served.host, served.server.credentials, "127.0.0.1", 443).start()


def test_it_stops_while_machines_wait_and_can_be_started_again(served):
    link = served.link()
    first = Machine(link, "a")
    first.take()
    second = Machine(link, "b")
    second.take()
    third = link.join("c", returning=None, layout=None).ticket
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(served.other_link().next_round, third, 8.0)
        with contextlib.suppress(LinkDown):
            began = time.monotonic()
            served.server.stop()
            assert isinstance(waiting.result(), Wait)
        assert time.monotonic() - began < 5
    with pytest.raises(LinkDown):
        link.describe()
    server = GatewayServer(served.host, served.server.credentials, "127.0.0.1", served.port)
    server.start()
    assert link.describe().run == served.run
    server.stop()


def test_a_machine_that_waits_is_given_a_round_as_soon_as_there_is_one(served):
    machines = [Machine(served.link(), name) for name in "ab"]
    for machine in machines:
        machine.take()
    spare = served.link()
    third = spare.join("c", returning=None, layout=None).ticket
    assert spare.next_round(third, 0) == Wait(kind="no-seat", text="all workers' rounds are under way")
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(spare.next_round, third, 8.0)
        machines[0].link.leave(machines[0].ticket, "it\nleft")
        assert waiting.result().worker == 0


# ---- what else it serves


def test_the_page_is_for_who_has_the_view_key_and_the_key_lets_nobody_join(serve):
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    async def show(request: Any) -> Any:
        return PlainTextResponse(f"the page at {request.scope['root_path']}")

    served = serve(page=Starlette(routes=[Route("/", show), Route("/events", show)]))
    key = served.secret("viewer")
    with served.raw() as client:
        client.headers.pop("authorization")
        for wrong in ("/page/", "/page", "/page/?key=", f"/page/?key={served.secret('worker')}", f"/page/?key={key}x"):
            answer = client.get(wrong)
            assert (answer.status_code, answer.content) == (401, b"")
        moved = client.get(f"/page?key={key}")
        assert (moved.status_code, moved.headers["location"]) == (307, f"/page/?key={key}")
        answer = client.get(f"/page/?key={key}")
        assert (answer.status_code, answer.text) == (200, "the page at /page")
        cookie = answer.headers["set-cookie"]
        assert all(word in cookie for word in ("HttpOnly", "Secure", "SameSite=Strict", "Path=/page"))
        assert client.get("/page/events").text == "the page at /page"  # by the cookie
        assert client.post("/page/").status_code == 405
        client.headers["authorization"] = f"Bearer {key}"
        answer = client.post("/v1/join", json={"name": "m", "version": "0.1.0"})
        assert (answer.status_code, answer.json()["code"]) == (403, "right")


def test_the_runs_files_can_be_read_from_elsewhere_and_no_others(served):
    link, config = served.link(right="viewer"), (served.folder / "config.toml").read_bytes()
    assert link.read("config.toml", 0) == config and link.read("config.toml", 10) == config[10:]
    assert link.read("config.toml", len(config)) == b"" == link.read("tape.jsonl", 1 << 40)
    for name in ("credentials/tokens.json", "../run-0/credentials/tokens.json", "/etc/passwd", "journal/acknowledged"):
        with pytest.raises(Refused) as refused:
            link.read(name, 0)
        assert refused.value.code is RefusalCode.PATH


def test_status_stop_clock_and_bandwidth(served):
    link = served.link(right="admin")
    assert link.status().run == served.run
    assert abs(link.clock() - time.time()) < 5
    with served.raw() as client:
        assert client.head("/v1/describe").status_code == 405
    assert link.probe_down(3_000_000) > 0 and link.probe_up(3_000_000) > 0 and link.probe_down(0) > 0
    with pytest.raises(Refused, match="At most 67108864 bytes"):
        link.probe_down(1 << 27)
    link.stop("enough for today")
    assert served.service.state.ended.text == "enough for today"
    with pytest.raises(Refused, match="enough for today") as refused:
        served.link().join("m", returning=None, layout=None)
    assert (refused.value.code, refused.value.refusal.end) == (RefusalCode.ENDED, "stopped")
    link.stop("again")
