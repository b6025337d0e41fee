"""Ruling a run that is served: `heloco tokens`, `evict`, `pause`, `unpause`, `stop`, with tokens from wherever they may come."""

import json
import os
import pty
import stat
import subprocess
import sys

import pytest

from heloco.cluster.client.run_client import RunClient
from heloco.cluster.gateway.https_link import HttpsLink
from heloco.cluster.protocol.messages import Wait
from heloco.cluster.protocol.refusals import Refused
from heloco.cluster.server.process import ListenConfig, RunHost
from heloco.errors import UserError
from heloco.records.events import Part
from heloco.records.journal_reader import FOLDER, read_events
from support.runs import heloco
from support.small_cluster import delta, opened, report

SETTINGS = {"arrivals": 1000, "beat_s": 0.2}
RIGHTS = ("worker", "viewer", "admin")


@pytest.fixture(autouse=True)
def _no_token(monkeypatch):
    for name in ("HELOCO_TOKEN", "HELOCO_TOKEN_FILE", "HELOCO_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def host(tmp_path):
    host = RunHost(opened(tmp_path / "run", None, **SETTINGS), ListenConfig("127.0.0.1", 0))
    yield host
    host.close()


@pytest.fixture
def folder(host):
    return host.service.state.folder


@pytest.fixture
def machine(host):
    links = []

    def join(name, token=None):
        links.append(HttpsLink(host.address, token or host.token("worker")))
        client = RunClient(links[-1], name, tell=lambda _: None, patience_s=5.0)
        client.join()
        return client

    yield join
    for link in links:
        link.close()


def output_of(*command):
    result = heloco(*command)
    assert result.code == 0, result.err
    return result.out


def refused(*command):
    result = heloco(*command)
    assert result.code == 2 and "Traceback" not in result.err, result
    return result.err.replace("\n", " ")


# ---- tokens


def listed(folder):
    return {token["id"]: token for token in json.loads(output_of("tokens", folder, "--json"))}


def test_a_run_has_a_token_of_each_right_and_nobody_else_can_read_them(host, folder):
    tokens = listed(folder)
    assert sorted(token["right"] for token in tokens.values()) == sorted(RIGHTS)
    file = folder / "credentials" / "tokens.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    text = output_of("tokens", folder) + json.dumps(tokens)
    assert not any(host.tokens.first(right).secret in text for right in RIGHTS)


def test_a_new_token_does_what_its_right_says_until_it_is_revoked(host, folder, machine):
    token = json.loads(output_of("tokens", folder, "--new", "worker", "--note", "for Ann", "--json"))
    client = machine("ann", token["token"])
    assert client.take() is not None
    assert listed(folder)[token["id"]]["machines"] == 1 and listed(folder)[token["id"]]["note"] == "for Ann"
    assert token["id"] in output_of("tokens", folder, "--revoke", token["id"])
    assert not host.status().machines
    with pytest.raises(UserError, match="does not accept the token"):
        client.take()
    with pytest.raises(UserError, match="does not accept the token"):
        machine("ann", token["token"])
    assert machine("ben").take() is not None  # the run's first token still holds
    assert listed(folder)[token["id"]]["is_revoked"]


def test_what_each_right_may_not_do(host, machine):
    machine("m")
    for right in ("worker", "viewer"):
        for command in (["stop"], ["pause"], ["unpause"], ["evict", "m"], ["tokens"], ["tokens", "--new", "admin"]):
            err = refused(*command, host.address, "--token", host.token(right))
            assert "heloco tokens" in err and right in err, err
    for right in ("viewer", "admin"):
        with pytest.raises(Refused, match=right):
            machine("m", host.token(right))
    assert host.status().ended is None and len(host.status().machines) == 1


@pytest.mark.usefixtures("host")
def test_mistakes_about_tokens(folder):
    assert "worker" in refused("tokens", folder, "--new", "wroker")
    assert "nobody" in refused("tokens", folder, "--revoke", "nobody")
    [admin] = [token for token in listed(folder).values() if token["right"] == "admin"]
    assert "last" in refused("tokens", folder, "--revoke", admin["id"])
    assert output_of("tokens", folder)


def test_tokens_are_the_same_when_the_run_is_served_again(host, folder):
    before = [host.token(right) for right in RIGHTS]
    new = output_of("tokens", folder, "--new", "viewer").strip()
    host.close()
    second_host = RunHost(opened(folder, None, **SETTINGS), ListenConfig("127.0.0.1", 0))
    try:
        assert [second_host.token(right) for right in RIGHTS] == before
        assert "arrivals" in output_of("status", second_host.address, "--token", new, "--json")
    finally:
        second_host.close()


# ---- where a token may come from


def test_a_token_comes_from_a_flag_a_file_or_the_environment(host, tmp_path, monkeypatch):
    file = tmp_path / "token"
    file.write_text(f"{host.token('viewer')}\n")
    assert output_of("status", host.address, "--token-file", file, "--json")
    monkeypatch.setenv("HELOCO_TOKEN_FILE", str(file))
    assert output_of("status", host.address, "--json")
    monkeypatch.setenv("HELOCO_TOKEN", host.token("worker"))  # nearer than the file
    assert "worker" in refused("status", host.address, "--json")
    assert output_of("status", host.address, "--token", host.token("admin"), "--json")
    monkeypatch.delenv("HELOCO_TOKEN")
    monkeypatch.setenv("HELOCO_TOKEN_FILE", str(tmp_path / "none"))
    assert str(tmp_path / "none") in refused("status", host.address)


def test_a_token_is_asked_for_at_a_terminal_and_does_not_show(host):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "heloco.cli", "status", host.address, "--json"]
    process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, start_new_session=True, text=True)
    os.close(theirs)
    prompt = b""
    while not prompt.rstrip().endswith(b":"):
        prompt += os.read(ours, 1000)
    assert b"Token" in prompt
    os.write(ours, host.token("viewer").encode() + b"\n")
    out, _ = process.communicate()
    os.close(ours)
    assert process.returncode == 0 and json.loads(out)["arrivals"] == 0
    assert host.token("viewer") not in out


# ---- evicting, pausing, stopping


def test_an_evicted_machine_is_gone_for_good_and_the_others_do_not_notice(host, folder, machine):
    bad, good = machine("bad"), machine("good")
    taken_round = bad.take()
    assert f"heloco tokens {folder} --revoke" in output_of("evict", "bad", folder, "--reason", "it sends rubbish")
    assert [m.name for m in host.status().machines] == ["good"]
    with pytest.raises(Refused, match="it sends rubbish"):
        bad.hand_in(taken_round.key, delta(1), report())
    with pytest.raises(Refused, match="it sends rubbish"):
        RunClient(bad.link, "bad", returning=bad.joined.ticket, tell=lambda _: None).join()
    theirs = good.take()
    assert good.hand_in(theirs.key, delta(2), report()).arrival == 1
    parts = [event for event, _ in read_events(folder / FOLDER) if isinstance(event, Part)]
    assert [(part.kind, part.text) for part in parts if part.kind == "evicted"] == [("evicted", "it sends rubbish")]


def test_which_machine_is_meant(host, folder, machine):
    machine("twin")
    machine("twin")
    err = refused("evict", "twin", folder)
    ids = [m.machine for m in host.status().machines]
    assert all(one in err for one in ids)
    output_of("evict", ids[0], folder)
    assert [m.machine for m in host.status().machines] == ids[1:]
    assert ids[1] in refused("evict", "nobody", folder)
    assert "never a machine" in refused("evict", "nobody#00000000", folder)


def test_a_machine_that_has_left_can_be_evicted_by_its_id(folder, machine):
    client = machine("gone")
    client.leave()
    assert "may not come back" in output_of("evict", client.joined.ticket.machine, folder, "--reason", "we know it")
    with pytest.raises(Refused, match="we know it"):
        RunClient(client.link, "gone", returning=client.joined.ticket, tell=lambda _: None).join()


def test_a_pause_by_hand_lasts_until_it_is_ended(folder, machine):
    client = machine("m")
    taken_round = client.take()
    assert "unpause" in output_of("pause", folder, "--reason", "the room is hot")
    assert "the room is hot" in output_of("status", folder)
    assert client.hand_in(taken_round.key, delta(1), report()).arrival == 1  # what is under way counts
    answer = client.link.next_round(client.joined.ticket, 0.0)
    assert isinstance(answer, Wait) and answer.kind == "paused" and "the room is hot" in answer.text
    output_of("unpause", folder)
    assert client.take() is not None


def test_a_pause_by_hand_outlives_the_process(host, folder):
    output_of("pause", folder, "--reason", "for the night")
    host.close()
    second_host = RunHost(opened(folder, None, **SETTINGS), ListenConfig("127.0.0.1", 0))
    try:
        assert "for the night" in output_of("status", folder)
        output_of("unpause", folder)
        assert "for the night" not in output_of("status", folder)
    finally:
        second_host.close()


def test_a_run_is_stopped_from_its_folder(host, folder):
    assert "saved" in output_of("stop", folder)
    assert host.status().ended.kind == "stopped"


def test_a_folder_that_was_never_served(tmp_path):
    (tmp_path / "empty").mkdir()
    assert "was never served" in refused("status", tmp_path / "empty")
