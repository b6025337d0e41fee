"""Who gets into the HTTPS gateway, and what a token allows: wrong tokens and certificates, rights, tokens that are revoked."""

import json
import socket
import ssl
import warnings
from typing import Any

import pytest

from heloco.cluster.gateway.auth import Buckets
from heloco.cluster.gateway.https_link import HttpsLink
from heloco.cluster.protocol.link import LinkDown
from heloco.cluster.protocol.messages import Right, Ticket, Wait
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.protocol.tokens import format_token
from heloco.errors import UserError
from support.gateways import NOBODY, Machine

httpx = pytest.importorskip("httpx", reason="httpx is not installed")
pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("cryptography", reason="cryptography is not installed")

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- who gets in


PATHS = [
    ("GET", "/v1/describe"), ("POST", "/v1/join"), ("GET", "/v1/start"), ("PUT", "/v1/contribution"), ("POST", "/v1/beat"),
    ("POST", "/v1/stop"), ("GET", "/v1/probe?bytes=10"), ("GET", "/"), ("GET", "/page/"), ("DELETE", "/nothing"),
]  # fmt: skip


@pytest.mark.parametrize("secret", ["", "x" * 43, "é"], ids=["none", "wrong", "no ASCII"])
def test_without_the_token_there_is_an_empty_401_and_nothing_else(served, secret):
    with served.raw() as client:
        client.headers = httpx.Headers([(b"authorization", f"Bearer {secret}".encode())] if secret else [])
        for method, path in PATHS:
            answer = client.request(method, path, content=b"x" * 10 if method != "GET" else None)
            assert (answer.status_code, answer.content) == (401, b"")
            assert set(answer.headers) <= {"content-length", "date", "connection"}


def test_who_keeps_showing_wrong_credentials_is_sent_away_but_the_right_ones_get_in(served):
    with served.raw("wrong") as client:
        statuses = [client.get("/v1/describe").status_code for _ in range(15)]
        assert client.get("/v1/describe").content == b""
    assert set(statuses[:10]) == {401} and statuses[-1] == 429
    assert served.link().describe().run == served.run


def test_buckets_fill_again_with_time_and_forget_the_oldest():
    now = [0.0]
    buckets = Buckets(2, 3, names=2, clock=lambda: now[0])
    assert [buckets.take("a") for _ in range(4)] == [True, True, True, False]
    now[0] = 0.6
    assert [buckets.take("a"), buckets.take("a")] == [True, False]
    assert buckets.take("b") and buckets.take("c")
    assert [buckets.take("a") for _ in range(4)] == [True, True, True, False]  # forgotten, so begun anew


def test_a_wrong_token_is_a_sentence_for_the_person_who_pasted_it(served):
    wrong = format_token("worker", "x" * 43, served.server.fingerprint)
    with pytest.raises(UserError, match=r"does not accept the token.*Paste the one"):
        served.link(token=wrong).describe()
    with pytest.raises(UserError, match="not whole"):
        served.link(token=served.host.token("worker")[:-1])
    with pytest.raises(UserError, match="needs a token"):
        HttpsLink("https://x:1", "")
    for address in ("http://x:1", "https://", "https://x:1/path", "https://u@x:99999"):
        with pytest.raises(UserError, match="is not the address of a gateway"):
            HttpsLink(address, served.host.token("worker"))


def test_another_certificate_is_refused_before_anything_is_told(served):
    other = format_token("worker", served.secret(), "0" * 64)
    with pytest.raises(UserError, match=r"is not the one in the token.*Paste"):
        served.link(token=other).describe()


def test_a_certificate_that_changes_while_a_machine_is_joined_is_refused(served, serve):
    link = served.link()
    link.describe()
    link.close()
    link.address = serve().server.address
    with pytest.raises(UserError, match="is not the one in the token"):
        link.describe()
    with pytest.raises(LinkDown, match="is not the one in the token"):
        link.beat(NOBODY, 0)  # in a thread of its own: it goes on, the others end the machine


def test_the_gateway_speaks_no_old_tls(served):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(("127.0.0.1", served.port)) as plain, pytest.raises(OSError):
        context.wrap_socket(plain)


def test_no_gateway_at_the_address_is_to_be_tried_again(served):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(LinkDown, match="cannot be reached"):
        served.link(port).describe()


# ---- what a token allows

REQUESTS: list[tuple[str, str, Any, set[Right]]] = [
    ("GET", "/v1/describe", None, {"worker", "viewer", "admin"}),
    ("POST", "/v1/join", {"name": "m", "version": "0.1.0"}, {"worker"}),
    ("POST", "/v1/model", {"layout": []}, {"worker"}),
    ("PUT", "/v1/model?offset=0", b"x", {"worker"}),
    ("POST", "/v1/model/commit", {"names": [], "digest": "0" * 32}, {"worker"}),
    ("POST", "/v1/round", {"wait_s": 0}, {"worker"}),
    ("GET", "/v1/start?worker=0&round=0&version=0", None, {"worker"}),
    ("GET", "/v1/evaluation?arrival=0", None, {"worker"}),
    ("POST", "/v1/evaluation", {"arrival": 0, "scores": {"x": {"loss": 1.0}}}, {"worker"}),
    ("POST", "/v1/scores", {"worker": 0, "round": 0, "version": 0, "own_steps": 0, "scores": {}}, {"worker"}),
    ("GET", "/v1/final", None, {"worker"}),
    ("GET", "/v1/contribution?worker=0&round=0&version=0", None, {"worker"}),
    ("PUT", "/v1/contribution?worker=0&round=0&version=0&offset=0", b"x", {"worker"}),
    ("POST", "/v1/contribution/commit", {"worker": 0, "round": 0, "version": 0, "digest": "0" * 32}, {"worker"}),
    ("POST", "/v1/beat", {"steps": 0}, {"worker"}),
    ("POST", "/v1/abandon", {"text": ""}, {"worker"}),
    ("POST", "/v1/leave", {"text": ""}, {"worker"}),
    ("GET", "/v1/status", None, {"viewer", "admin"}),
    ("GET", "/v1/file?name=config.toml&offset=0", None, {"viewer", "admin"}),
    ("POST", "/v1/pause", {"text": "x"}, {"admin"}),
    ("POST", "/v1/unpause", None, {"admin"}),
    ("POST", "/v1/evict", {"machine": "nobody"}, {"admin"}),
    ("GET", "/v1/tokens", None, {"admin"}),
    ("POST", "/v1/tokens", {"right": "viewer"}, {"admin"}),
    ("POST", "/v1/tokens/revoke", {"id": "viewer-2"}, {"admin"}),
    ("GET", "/v1/clock", None, {"worker", "viewer", "admin"}),
    ("GET", "/v1/probe?bytes=3", None, {"worker", "viewer", "admin"}),
    ("POST", "/v1/probe", b"x", {"worker", "viewer", "admin"}),
    ("POST", "/v1/stop", {"text": "x"}, {"admin"}),
    ("POST", "/v1/suspend", {"text": "x"}, {"admin"}),
]


@pytest.mark.parametrize("right", ["worker", "viewer", "admin"])
def test_a_token_allows_what_its_right_says_and_nothing_else(served, right):
    machine = Machine(served.link())
    api = {(path, method) for route in served.server.api.routes() for path in [route.path] for method in route.methods}
    assert api == {(path.partition("?")[0], method) for method, path, _, _ in REQUESTS}  # every path is tried
    with served.raw(served.secret(right), machine.ticket) as client:
        for method, path, body, rights in REQUESTS:
            content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            answer = client.request(method, path, content=content)
            if right in rights:
                assert answer.status_code not in (401, 403), (path, answer.text)
            else:
                assert (answer.status_code, answer.json()["code"]) == (403, "right"), path
    assert (served.service.state.ended is not None) == (right == "admin")


def test_a_worker_with_its_own_ticket_acts_for_itself_and_for_nobody_else(served):
    """Everything the review's attack did with another machine's id."""
    victim, attacker = Machine(served.link(), "victim"), Machine(served.link(), "attacker")
    key = victim.take()
    forged = Ticket(machine=victim.ticket.machine, secret=attacker.ticket.secret)
    before = served.events()
    with served.raw(ticket=forged) as client:
        for method, path, body, rights in REQUESTS:
            if "worker" in rights and path.split("?")[0] not in ("/v1/describe", "/v1/join", "/v1/clock", "/v1/probe"):
                content = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
                answer = client.request(method, path, content=content)
                assert (answer.status_code, answer.json()["code"]) == (401, "secret"), path
    with pytest.raises(Refused, match="does not allow this"):
        attacker.link.status()
    assert served.events() == before
    assert victim.hand_in(key, victim.delta()).verdict == "applied"


def test_a_revoked_token_lets_nobody_in_and_its_machines_are_sent_away(served):
    admin = served.link(right="admin")
    answer = admin.new_token("worker", "for the other site")
    link = served.link(token=answer.token)
    machine = Machine(link, "guest")
    assert [(t.id, t.machines) for t in admin.tokens().tokens if t.right == "worker"] == [("worker-1", 0), ("worker-2", 1)]
    assert all(not token.token for token in admin.tokens().tokens)
    admin.revoke_token("worker-2")
    with pytest.raises(UserError, match="does not accept the token"):
        link.next_round(machine.ticket, 0)
    assert not served.service.state.roster.present
    with pytest.raises(Refused) as refused:
        served.other_link().next_round(machine.ticket, 0)  # with a token that holds, but it is barred
    assert refused.value.code is RefusalCode.BARRED
    Machine(served.link())  # others are not concerned


def test_pausing_evicting_and_going_on(served):
    admin, machine = served.link(right="admin"), Machine(served.link(), "m")
    admin.pause("the night")
    assert machine.link.next_round(machine.ticket, 0) == Wait(kind="paused", text="the night")
    assert admin.status().paused.kind == "admin"
    admin.unpause()
    key = machine.take()
    admin.evict(machine.ticket.machine, "enough")
    with pytest.raises(Refused, match="enough") as refused:
        machine.hand_in(key, machine.delta())
    assert refused.value.code is RefusalCode.BARRED
    with pytest.raises(Refused) as refused:
        admin.evict("nobody", "")
    assert refused.value.code is RefusalCode.NO_SUCH
