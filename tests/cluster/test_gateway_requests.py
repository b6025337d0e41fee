"""Single requests to the HTTPS gateway: what is refused, what is sent twice, and answers while the synchronizer is busy."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from heloco.cluster.gateway.auth import Buckets
from heloco.cluster.protocol.link import LinkDown
from heloco.cluster.protocol.messages import RoundKey, to_plain
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.records.events import Abandon, Receive
from heloco.wire.layout import Layout
from support.gateways import NOBODY, REPORT, Machine
from support.runs import tape

httpx = pytest.importorskip("httpx", reason="httpx is not installed")
pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("cryptography", reason="cryptography is not installed")

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- what is refused


def test_another_models_layout_is_refused_by_name(served):
    link = served.link()
    machine = Machine(link)
    other = Layout(tuple((name, dtype, (*shape[:-1], shape[-1] + 1)) for name, dtype, shape in machine.layout.entries))
    with pytest.raises(Refused, match="This run trains another model") as refused:
        link.join("other", returning=None, layout=other)
    assert refused.value.code is RefusalCode.LAYOUT
    assert link.join("same", returning=None, layout=machine.layout).ticket.machine.startswith("same#")
    key = machine.take()
    shapes = [*machine.contribution.entries]
    shapes[0] = (shapes[0][0], shapes[0][1], shapes[0][2][::-1])
    wrong = Layout(tuple(shapes))
    with pytest.raises(Refused, match="names, shapes or dtypes differ") as refused:
        link.hand_in(machine.ticket, key, wrong, {name: torch.zeros(shape) for name, _, shape in shapes}, REPORT)
    assert refused.value.code is RefusalCode.LAYOUT
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
    for round_key, code in ((other, RefusalCode.NOT_HELD), (late, RefusalCode.FUTURE), (next_round, RefusalCode.NOT_HELD)):
        for ask in (
            lambda round_key=round_key: ours.hand_in(round_key, ours.delta()),
            lambda round_key=round_key: ours.fetch(round_key),
        ):
            with pytest.raises(Refused) as refused:
                ask()
            assert refused.value.code is code
    with pytest.raises(Refused, match="join again") as refused:
        ours.link.beat(NOBODY, 0)
    assert refused.value.code is RefusalCode.UNKNOWN_MACHINE
    with served.raw(ticket=ours.ticket) as client:
        client.headers["heloco-run"] = "0123456789abcdef"
        answer = client.post("/v1/beat", json={"steps": 0})
        assert (answer.status_code, answer.json()["code"]) == (409, "other-run") and "fix the address" in answer.json()["text"]
    assert Receive not in served.events()


def test_nan_is_refused_and_the_data_goes_back(served):
    machine, before = Machine(served.link()), served.digest()
    key, delta = machine.take(), machine.delta()
    delta["pseudo_gradient.1"].view(-1)[3] = float("nan")
    with pytest.raises(Refused) as refused:
        machine.hand_in(key, delta)
    assert refused.value.code is RefusalCode.NOT_FINITE and served.digest() == before
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
            assert refused.value.code is RefusalCode.BUSY
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
    assert refused.value.code is RefusalCode.BUSY


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
    assert refused.value.code is RefusalCode.RATE
