"""The HTTPS gateway: real TLS on loopback, a real server, a real service; connections that are cut, frozen or not let in."""

import contextlib
import json
import os
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from heloco.cluster.client.run_client import RunClient
from heloco.cluster.client.worker import Worker
from heloco.cluster.gateway import check_parts
from heloco.cluster.gateway.auth import Buckets
from heloco.cluster.gateway.credentials import Credentials, self_signed
from heloco.cluster.gateway.https_link import HttpsLink
from heloco.cluster.gateway.server import GatewayServer
from heloco.cluster.protocol.link import LinkDown, digest_of
from heloco.cluster.protocol.messages import Right, RoundKey, Ticket, Wait, to_plain
from heloco.cluster.protocol.refusals import Code, Refused
from heloco.cluster.protocol.tokens import format_token
from heloco.cluster.server.local_link import LocalLink
from heloco.cluster.server.open_run import external_run, new_run
from heloco.errors import UserError
from heloco.records.events import Abandon, Receive
from heloco.run import RunConfig, resolve, with_fields
from heloco.task import Task
from heloco.wire.layout import Layout
from support.gateways import REPORT, SETTINGS, Machine, Serve, Served
from support.runs import evals, on_threads, tape

httpx = pytest.importorskip("httpx", reason="httpx is not installed")
pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("cryptography", reason="cryptography is not installed")

NOBODY = Ticket(machine="m#1", secret="x")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with on_threads(1):
        yield


@pytest.fixture
def served(serve: Serve) -> Served:
    return serve()


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


# ---- whole runs


def test_machines_train_through_the_gateway_and_the_loss_falls(serve, tiny):
    served = serve()
    with ThreadPoolExecutor(2) as threads:
        ends = list(threads.map(lambda i: _train(tiny, served.link(), f"m{i}"), range(2)))
    assert ends == ["The run has ended: all arrivals are in"] * 2
    lines = tape(served.folder)
    assert len(lines) == SETTINGS["arrivals"]
    assert {line["machine"].partition("#")[0] for line in lines} == {"m0", "m1"}
    served.service.finish_evaluations()
    losses = [line["mean"]["loss"] for line in evals(served.folder)]
    assert losses[-1] < losses[0] - 0.5


def _train(tiny: tuple[Task, RunConfig], link: Any, name: str, **options: Any) -> str:
    return Worker(*tiny, tell=lambda _: None).run(link, name, link.describe().run, **options)


def test_one_machine_over_https_computes_what_it_computes_here_to_the_bit(serve, tiny):
    local_run, remote_run = serve(arrivals=8), serve(arrivals=8)
    _train(tiny, LocalLink(local_run.service), "m")
    _train(tiny, remote_run.link(), "m")
    assert [line["digest"] for line in tape(local_run.folder)] == [line["digest"] for line in tape(remote_run.folder)]
    assert local_run.digest() == remote_run.digest()


def test_a_machine_evaluates_over_https_what_the_synchronizer_would_have_found(serve, tiny):
    synchronizers_run, machines_run = serve(arrivals=8, eval_every=2), serve(arrivals=8, eval_every=2)
    for served, evaluates in ((synchronizers_run, False), (machines_run, True)):
        served.service.state.run.finish_evaluations()
        assert _train(tiny, served.link(), "m", evaluates=evaluates) == "The run has ended: all arrivals are in"
        served.service.finish_evaluations()
    by_synchronizer, by_machine = evals(synchronizers_run.folder), evals(machines_run.folder)
    assert [line.pop("machine", "")[:2] for line in by_machine] == ["", "m#", "m#", "m#", "m#"]
    for line in (*by_synchronizer, *by_machine):
        del line["time_s"]
    assert by_machine == by_synchronizer


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


# ---- credentials


def test_credentials_are_made_once_and_are_their_owners_alone(tmp_path):
    credentials = Credentials.load_or_make(tmp_path / "credentials", ["head", "10.0.0.7", "::1"])
    reloaded_credentials = Credentials.load_or_make(tmp_path / "credentials")
    assert credentials.fingerprint == reloaded_credentials.fingerprint
    assert stat.S_IMODE((tmp_path / "credentials").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "credentials").iterdir()} == {0o600}


def test_a_bad_host_name_and_a_broken_folder_are_sentences(tmp_path):
    with pytest.raises(UserError, match="neither the name nor the address"):
        Credentials.load_or_make(tmp_path / "a", ["gerät"])
    folder = tmp_path / "credentials"
    Credentials.load_or_make(folder)
    for name in ("certificate.pem", "key.pem"):
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(b"broken")
        with pytest.raises(UserError, match=r"restore it|remove .*|belongs together"):
            Credentials.load_or_make(folder)
        (folder / name).write_bytes(before)


def _write_pair(folder: Path, begin_days: int, end_days: int) -> dict[str, str]:
    now = datetime.now(UTC)
    folder.mkdir(parents=True, exist_ok=True)
    certificate, key = self_signed(["head"], now + timedelta(days=begin_days), now + timedelta(days=end_days))
    (folder / "certificate.pem").write_bytes(certificate)
    (folder / "key.pem").write_bytes(key)
    return {"cert": str(folder / "certificate.pem"), "key": str(folder / "key.pem")}


def test_our_certificate_outlives_every_run_and_stays_even_where_an_old_one_has_expired(tmp_path):
    credentials = Credentials.load_or_make(tmp_path)
    ends = ssl._ssl._test_decode_cert(str(credentials.certificate))["notAfter"]  # type: ignore[attr-defined]
    assert ends == "Dec 31 23:59:59 9999 GMT"
    _write_pair(tmp_path, -400, -30)
    old = Credentials.load_or_make(tmp_path)
    assert old.fingerprint != credentials.fingerprint
    assert Credentials.load_or_make(tmp_path) == old


def test_a_certificate_of_ones_own(tiny, tmp_path):
    own = _write_pair(tmp_path / "own", -10, 10)
    served = Served(new_run(*tiny, tmp_path / "run"), tmp_path / "run", **own)
    assert served.link().describe().run == served.run
    served.close()
    with pytest.raises(UserError, match="belong together"):
        Credentials.load_or_make(tmp_path / "c", cert=own["cert"])
    with pytest.raises(UserError, match=r"valid from .* not today: give one .*one that does not expire is made"):
        Credentials.load_or_make(tmp_path / "c", **_write_pair(tmp_path / "old", -30, -1))
    other = _write_pair(tmp_path / "other", -1, 1)["key"]
    with pytest.raises(UserError, match="is not the key of"):
        Credentials.load_or_make(tmp_path / "c", cert=own["cert"], key=other)


@pytest.mark.parametrize("days", [(-30, -1), (1, 30), (-20_000, -10_000), (10_000, 20_000)])
def test_a_certificate_is_judged_by_its_fingerprint_and_not_by_the_clock_of_a_machine(tiny, tmp_path, days):
    """For a clock that is wrong by years, a good certificate is what this one is for ours."""
    folder = tmp_path / "run"
    service = new_run(*tiny, folder)
    _write_pair(folder / "credentials", *days)
    served = Served(service, folder)
    link, token = served.link(), served.host.token("worker")
    assert link.describe().run == served.run
    link.close()
    served.server.stop()
    _write_pair(folder / "credentials", *days)
    changed = GatewayServer(served.host, Credentials.load_or_make(folder / "credentials"), "127.0.0.1", served.port)
    changed.start()
    with pytest.raises(UserError, match="is not the one in the token"):
        link.describe()
    with pytest.raises(UserError, match="is not the one in the token"):
        HttpsLink(changed.address, token).describe()
    changed.stop()
    served.close()


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


# ---- what is refused


def test_another_models_layout_is_refused_by_name(served):
    link = served.link()
    machine = Machine(link)
    other = Layout(tuple((name, dtype, (*shape[:-1], shape[-1] + 1)) for name, dtype, shape in machine.layout.entries))
    with pytest.raises(Refused, match="This run trains another model") as refused:
        link.join("other", returning=None, layout=other)
    assert refused.value.code is Code.LAYOUT
    assert link.join("same", returning=None, layout=machine.layout).ticket.machine.startswith("same#")
    key = machine.take()
    shapes = [*machine.contribution.entries]
    shapes[0] = (shapes[0][0], shapes[0][1], shapes[0][2][::-1])
    wrong = Layout(tuple(shapes))
    with pytest.raises(Refused, match="names, shapes or dtypes differ") as refused:
        link.hand_in(machine.ticket, key, wrong, {name: torch.zeros(shape) for name, _, shape in shapes}, REPORT)
    assert refused.value.code is Code.LAYOUT
    assert machine.hand_in(key, machine.delta()).verdict == "applied"


def test_another_version_of_heloco_is_refused(served):
    with served.raw() as client:
        request = {"name": "m", "version": "99.0.0"}
        answer = client.post("/v1/join", json=request)
    assert (answer.status_code, answer.json()["code"]) == (409, "version")


def test_other_runs_other_machines_and_other_times_are_refused_by_code(served):
    ours, theirs = Machine(served.link(), "a"), Machine(served.link(), "b")
    key, other = ours.take(), theirs.take()
    late, next_round = key._replace(version=7), key._replace(round=9)
    for round_key, code in ((other, Code.NOT_HELD), (late, Code.FUTURE), (next_round, Code.NOT_HELD)):
        for ask in (
            lambda round_key=round_key: ours.hand_in(round_key, ours.delta()),
            lambda round_key=round_key: ours.fetch(round_key),
        ):
            with pytest.raises(Refused) as refused:
                ask()
            assert refused.value.code is code
    with pytest.raises(Refused, match="join again") as refused:
        ours.link.beat(NOBODY, 0)
    assert refused.value.code is Code.UNKNOWN_MACHINE
    with served.raw(ticket=ours.ticket) as client:
        client.headers["heloco-run"] = "0123456789abcdef"
        answer = client.post("/v1/beat", json={"steps": 0})
        assert (answer.status_code, answer.json()["code"]) == (409, "other-run") and "fix the address" in answer.json()["text"]
    assert Receive not in served.events()


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
    assert refused.value.code is Code.BARRED
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
    assert refused.value.code is Code.BARRED
    with pytest.raises(Refused) as refused:
        admin.evict("nobody", "")
    assert refused.value.code is Code.NO_SUCH


def test_nan_is_refused_and_the_data_goes_back(served):
    machine, before = Machine(served.link()), served.digest()
    key, delta = machine.take(), machine.delta()
    delta["pseudo_gradient.1"].view(-1)[3] = float("nan")
    with pytest.raises(Refused) as refused:
        machine.hand_in(key, delta)
    assert refused.value.code is Code.NOT_FINITE and served.digest() == before
    assert served.events()[-1] is Abandon
    assert machine.take().round == key.round + 1


def test_a_body_that_is_too_long_is_refused_before_a_byte_is_read(served):
    machine = Machine(served.link())
    key, size = machine.take(), machine.contribution.size
    with served.raw(ticket=machine.ticket) as client:
        about = key._asdict()
        read = []

        def endless() -> Iterator[bytes]:
            while len(read) < 64:
                read.append(1)
                yield bytes(1 << 16)

        too_long = {"content-length": str(64 << 16)}
        with contextlib.suppress(httpx.TransportError):  # the connection may end while we still send
            answer = client.put("/v1/contribution", params=about | {"offset": 0}, content=endless(), headers=too_long)
            assert (answer.status_code, answer.json()["code"]) == (413, "too-long")
        answer = client.put("/v1/contribution", params=about | {"offset": size}, content=b"x")
        assert (answer.status_code, answer.json()["code"]) == (413, "too-long")
        answer = client.put("/v1/contribution", params=about | {"offset": 0}, content=iter([b"chunked"]))
        assert (answer.status_code, answer.json()["code"]) == (411, "length")
        answer = client.put("/v1/contribution", params=about | {"offset": 5}, content=b"x")
        assert (answer.status_code, answer.json()) == (409, answer.json() | {"code": "offset", "size": 0})
        assert client.get("/v1/contribution", params=about).json() == {"size": 0, "ack": None}
    assert machine.hand_in(key, machine.delta()).verdict == "applied"


def test_what_was_changed_on_its_way_is_sent_again(served):
    machine = Machine(served.link())
    key, delta = machine.take(), machine.delta()
    content = bytearray(machine.content(delta))
    content[-1] ^= 1
    with served.raw(ticket=machine.ticket) as client:
        upload = client.put("/v1/contribution", params=key._asdict() | {"offset": 0}, content=bytes(content))
        assert upload.json()["size"] == len(content)
        commit = machine.commit(key, delta)
        answer = client.post("/v1/contribution/commit", json=commit)
        assert (answer.status_code, answer.json()["code"]) == (422, "corrupted")
        answer = client.post("/v1/contribution/commit", json=commit)
        assert (answer.status_code, answer.json()["code"]) == (409, "incomplete")
    assert machine.hand_in(key, delta).verdict == "applied"


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
    link = served.link(proxy.port, timeout_s=0.5)
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
    _train(tiny, smooth.link(), "m")
    proxy = proxied(rough.port, up=[60_000, 90_000, 150_000], down=[70_000, 50_000, 5_000])
    _train(tiny, rough.link(proxy.port), "m")
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


# ---- exactly once, and never behind a tensor


def test_a_commit_that_is_sent_twice_gets_the_same_answer_and_counts_once(served):
    machine = Machine(served.link())
    key, delta = machine.take(), machine.delta()
    with served.raw(ticket=machine.ticket) as client, ThreadPoolExecutor(4) as threads:
        client.put("/v1/contribution", params=key._asdict() | {"offset": 0}, content=machine.content(delta))
        commit = machine.commit(key, delta)
        answers = [
            answer.json() for answer in threads.map(lambda _: client.post("/v1/contribution/commit", json=commit), range(4))
        ]
        later = client.post("/v1/contribution/commit", json=commit).json()
    assert answers == [later] * 4
    assert to_plain(machine.hand_in(key, delta)) == later
    assert served.events().count(Receive) == 1 and len(tape(served.folder)) == 1


def test_beats_are_answered_while_the_synchronizer_is_busy(served, monkeypatch):
    monkeypatch.setattr("heloco.cluster.gateway.calls.ANSWER_S", 0.3)
    machine = Machine(served.link())
    key, delta = machine.take(), machine.delta()
    viewer = served.link(right="viewer")
    viewer.describe()
    with served.raw(ticket=machine.ticket) as client, ThreadPoolExecutor(1) as threads:
        client.put("/v1/contribution", params=key._asdict() | {"offset": 0}, content=machine.content(delta))
        commit = machine.commit(key, delta)
        with served.service.state.lock:
            assert client.post("/v1/contribution/commit", json=commit).status_code == 202
            with pytest.raises(Refused) as refused:
                viewer.status()
            assert refused.value.code is Code.BUSY
            assert served.other_link().next_round(machine.ticket, 0).kind == "busy"
            for steps in range(20):
                assert machine.link.beat(machine.ticket, steps).round == key
            second_commit = threads.submit(client.post, "/v1/contribution/commit", json=commit)
        assert second_commit.result().status_code in (200, 202)
        while (answer := client.post("/v1/contribution/commit", json=commit)).status_code == 202:
            pass
    assert answer.json()["verdict"] == "applied"
    assert to_plain(machine.hand_in(key, delta)) == answer.json()
    assert served.events().count(Receive) == 1


def test_a_status_is_answered_while_the_synchronizer_is_busy(served, monkeypatch):
    monkeypatch.setattr("heloco.cluster.gateway.calls.ANSWER_S", 0.3)
    viewer, admin = served.link(right="viewer"), served.link(right="admin")
    before = viewer.status()
    admin.describe()
    with served.service.state.lock:
        assert viewer.status() == before
        with pytest.raises(Refused) as refused:  # after an order an old status would be misleading
            admin.status()
    assert refused.value.code is Code.BUSY


def test_an_error_of_our_own_ends_one_request_and_no_more(served, caplog):
    class Unkind(dict[str, Any]):
        def get(self, *_: Any) -> Any:
            raise ZeroDivisionError("a secret detail")

    roster = served.service.state.roster
    present, roster.present = roster.present, Unkind(roster.present)
    link = served.other_link()
    with served.raw(ticket=NOBODY) as client:
        answer = client.post("/v1/beat", json={"steps": 0})
    assert answer.status_code == 500 and answer.json()["code"] == "internal" and "secret detail" not in answer.text
    with pytest.raises(LinkDown):
        link.beat(NOBODY, 0)
    roster.present = present
    assert "ZeroDivisionError" in caplog.text
    assert Machine(link).take() == RoundKey(0, 0, 0)


def test_a_machine_that_asks_far_too_often_is_told_so(served, monkeypatch):
    machine = Machine(served.link())
    monkeypatch.setattr(served.server.api, "requests_allowed", Buckets(0.001, 3))
    for _ in range(3):
        machine.link.beat(machine.ticket, 0)
    with pytest.raises(Refused) as refused:
        machine.link.beat(machine.ticket, 0)
    assert refused.value.code is Code.RATE


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
    assert refused.value.code is Code.MODEL and proxy.struck == 1
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
            assert client.post("/v1/model", json={"layout": layout.as_json()}).json()["size"] == 0
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
        assert refused.value.code is Code.PATH


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
    assert refused.value.code is Code.ENDED
    link.stop("again")
