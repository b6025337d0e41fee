"""A run that goes on, as real processes: `heloco serve`, `join`, `status`, `stop`, `doctor`, `watch`."""

import http.client
import json
import re
import signal
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from heloco.cli.announcement import reachable
from heloco.cli.mirror import FIXED, GROWING, FolderMirror
from heloco.cli.serve import check_port, outward_address, own_names
from heloco.cli.status_poll import StatusPoll
from heloco.cluster.client.connect import connect
from heloco.cluster.gateway.https_link import HttpsLink
from heloco.cluster.server.process import ListenConfig, ServeSpec
from heloco.errors import UserError
from heloco.records.journal_reader import FOLDER, segments
from heloco.report.run_reader import read_runs
from heloco.report.run_state import watch_states
from support.programs import HERE, SMALL, Program, Programs, Served, assert_whole, get, wait_until
from support.runs import assert_refused, checkpoints, heloco, tape, write_text

for part in ("uvicorn", "starlette", "httpx", "cryptography"):
    pytest.importorskip(part, reason=f"{part} is not installed")


# ---- a machine that joins, and those who look on


@dataclass
class Going(Served):
    worker: Program
    page: Program


@pytest.fixture(scope="module")
def going(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Going:
    """A run of 150 arrivals with a machine that was stopped in the middle of it: it stands still."""
    folder = tmp_path_factory.mktemp("going") / "run"
    served = programs.serve(folder, *SMALL, "--seats", "2", "--arrivals", "150", "--patience", "1000")
    worker = programs.join(served, "--name", "guest")
    page = programs.heloco("watch", served.address, "--port", "0", HELOCO_TOKEN=served.viewer)
    wait_until(lambda: served.arrivals() >= 12, "twelve arrivals")
    worker.signal(signal.SIGSTOP)
    assert served.arrivals() < 140
    return Going(**vars(served), worker=worker, page=page)


def test_status_shows_who_takes_part(going: Going) -> None:
    status = going.status()
    [machine] = status["machines"]
    assert status["ended"] is status["paused"] is None and status["seats"] == 2
    assert machine["name"] == "guest" and machine["seat"] == 0 and machine["pace_s"] > 0
    assert status["participants"] == [machine["machine"]] and status["participation_window"] == 8
    assert 12 <= machine["arrivals"] == status["arrivals"] <= going.arrivals() and status["arrival_goal"] == 150
    assert machine["share"] == 1 and 0 < machine["per_minute"] == status["per_minute"]
    status_text = going.ask("status").out
    assert (
        "going" in status_text
        and "guest" in status_text
        and "1 machine for 2 workers, 1 contributed to the last 8 arrivals" in status_text
    )


def test_the_doctor_finds_nothing_wrong(going: Going) -> None:
    result = going.ask("doctor")
    assert result.code == 0 and "BAD" not in result.out, result.out
    findings = {finding["subject"]: finding for finding in json.loads(going.ask("doctor", "--json").out)}
    whats = {"this machine", "GPU", "kernels", "connection", "run", "clock", "latency", "download", "upload"}
    assert set(findings) == whats | {"data", "tokenizer", "memory", "inner step"}
    assert "a round of 3 steps takes" in findings["inner step"]["text"]
    assert all(finding["is_good"] for finding in findings.values())


def test_the_doctor_names_what_is_wrong(going: Going) -> None:
    result = heloco("doctor", going.address, "--token", "heloco-worker.short")
    assert result.code == 2 and re.search(r"^BAD  connection +The token is not whole", result.out, re.M)


def test_the_doctor_finds_out_that_this_machine_cannot_do_the_runs_rounds(going: Going, tmp_path: Path) -> None:
    """Before it joins, and not after an hour."""
    text = write_text(tmp_path / "text", **dict.fromkeys(("arzhan", "auren", "thelis", "vesnar", "zumeri"), "other words"))
    for flags, finding in (
        (("--data", str(text)), "BAD  data +The data here is not the run's"),
        (("--data", str(tmp_path / "none")), "BAD  data +"),
        (("--tokenizer", str(tmp_path / "none.json")), "BAD  tokenizer +There is no tokenizer"),
        (("--device", "cuda:99"), "BAD  memory +The device 'cuda:99' cannot be used here"),
    ):
        result = going.ask("doctor", *flags)
        assert result.code == 2 and re.search(f"^{finding}", result.out, re.M) and "inner step" not in result.out, result.out
    assert len(going.status()["machines"]) == 1, "the doctor takes no part"


def test_the_live_page_needs_its_key(going: Going) -> None:
    assert get(going, f"/page?key={going.key}")[0] in (200, 307)
    status, content = get(going, f"/page/?key={going.key}")
    assert status == 200 and "<script" in content and "heloco-adaptive" in content
    for path in ("/page", "/page/", "/page/?key=wrong", f"/describe?key={going.key}"):
        status, content = get(going, path)
        assert status == 401 and not content, path


def test_a_run_elsewhere_is_watched_here(going: Going) -> None:
    match = going.page.match_output(r"Watching at http://([\d.]+:\d+)")
    connection = http.client.HTTPConnection(match[1], timeout=20)
    connection.request("GET", "/")
    answer = connection.getresponse()
    run = going.status()["run"]
    assert answer.status == 200 and f"run-{run[:8]}" in answer.read().decode()


def test_a_watcher_that_is_ended_leaves_no_copy_behind(going: Going, programs: Programs, tmp_path: Path) -> None:
    for text in ((), ("--text",)):
        place = tmp_path / f"copies{len(text)}"
        place.mkdir()
        watcher = programs.heloco("watch", going.address, "--port", "0", *text, HELOCO_TOKEN=going.viewer, TMPDIR=str(place))
        watcher.match_output("arrival" if text else "Watching at")
        assert list(place.glob("heloco-watch-*"))
        watcher.signal(signal.SIGTERM)
        assert watcher.end().code == 128 + signal.SIGTERM and not list(place.iterdir())


def test_what_is_watched_is_what_is_there(going: Going) -> None:
    run_folder = Path(going.status()["folder"])
    mirror = FolderMirror(HttpsLink(going.address, going.viewer))
    mirror.start()
    try:
        journal = segments(run_folder / FOLDER)[0][1].relative_to(run_folder)
        for name in (*FIXED, *(str(journal) if name == FOLDER else name for name in GROWING)):
            copy = (mirror.folder / name).read_bytes() if (mirror.folder / name).exists() else b""
            assert (run_folder / name).read_bytes().startswith(copy) and (copy or name == "tape.jsonl"), name
    finally:
        mirror.close()


def test_a_watcher_asks_the_run_for_its_status_over_its_address_and_on_its_own_machine(going: Going) -> None:
    mirror, poll = FolderMirror(HttpsLink(going.address, going.viewer)), StatusPoll(Path(going.status()["folder"]))
    mirror.start()
    poll.start()
    try:
        heard = wait_until(lambda: poll.last_status.heard, "a status")
        assert mirror.last_status.heard is not None and mirror.last_status.is_copy and not poll.last_status.is_copy
        assert heard.status.run == mirror.last_status.heard.status.run == going.status()["run"]
        [state] = [watch.look() for watch in watch_states(read_runs([mirror.folder]), {mirror.folder: mirror.last_status})]
        assert state.kind in ("going", "paused") and [machine.heard_at for machine in state.machines]
    finally:
        mirror.close()
        poll.close()


# ---- what is wrong, beside a run that goes on


def test_wrong_tokens(going: Going, tmp_path: Path) -> None:
    start, secret, print_ = going.token.split(".")
    turned = secret[::-1] if secret[::-1] != secret else f"A{secret[1:]}"
    for command in ("join", "status", "stop", "pause", "tokens", "watch"):
        assert_refused(
            tmp_path, command, going.address, "--token", f"{start}.{turned}.{print_}", says="does not accept the token"
        )
    other = f"{start}.{secret}.{print_[::-1]}"
    result = heloco("join", going.address, "--token", other)
    assert result.code == 2 and "certificate" in result.sentence and "token" in result.sentence, result.err
    assert_refused(tmp_path, "join", going.address, "--token", going.token[:-1], says="The token is not whole")


def test_no_token(going: Going, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HELOCO_TOKEN", raising=False)
    monkeypatch.delenv("HELOCO_ADDRESS", raising=False)
    assert_refused(tmp_path, "join", going.address, says="needs a token: give the one that `heloco serve` printed")
    assert_refused(tmp_path, "join", says="There is no address: give the one that `heloco serve` printed")


def test_wrong_addresses(going: Going, tmp_path: Path) -> None:
    plain = going.address.replace("https:", "http:")
    for command in ("join", "status", "watch"):
        assert_refused(tmp_path, command, plain, "--token", going.token, says="it must begin with https://")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"https://127.0.0.1:{nobody.getsockname()[1]}"
        for command in ("join", "status", "stop", "watch"):
            assert_refused(
                tmp_path, command, address, "--token", going.token, says="Check the address, and that `heloco serve` runs"
            )


def test_other_text_is_refused_and_named(going: Going, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text", **dict.fromkeys(("arzhan", "auren", "thelis", "vesnar", "zumeri"), "other words"))
    result = going.ask("join", "--data", str(text), "--device", "cpu")
    assert result.code == 2 and "The data here is not the run's" in result.sentence and "--data DIR" in result.sentence
    assert len(going.status()["machines"]) == 1


def test_a_port_in_use(going: Going, tmp_path: Path) -> None:
    begin = ("serve", *SMALL, "--arrivals", "9", "--seats", "1", *HERE, "--port", going.port)
    assert_refused(
        tmp_path, *begin, "--out", tmp_path / "run", says=f"port {going.port} is taken: stop what listens there, or choose"
    )
    assert_refused(tmp_path, *begin, says=f"port {going.port} is taken", cwd=tmp_path)


def test_nobody_serves_a_run_twice(going: Going) -> None:
    before = tape(going.folder)
    result = heloco("serve", going.folder, *HERE, "--port", "0")
    assert result.code == 2 and str(going.folder) in result.sentence, result.err
    assert tape(going.folder) == before


# ---- leaving, stopping, going on


def test_leaving_stopping_and_going_on(going: Going, programs: Programs) -> None:
    going.worker.signal(signal.SIGINT)
    going.worker.signal(signal.SIGCONT)
    worker_result = going.worker.end()
    became = r"round \d+ of worker [01] was (given back undone|handed in and is applied)"
    assert worker_result.code == 0 and re.search(
        rf"Left the run \(stopped by SIGINT\): ({became}|nothing was under way)\.\n$", worker_result.out
    ), worker_result
    wait_until(lambda: not going.status()["machines"], "the machine is gone")

    link = connect(going.address, going.token)
    silent = link.join("silent", returning=None, layout=None).ticket  # whoever is here is waited for a while
    stop_result = going.ask("stop")
    assert stop_result.code == 0 and "stopped and saved" in stop_result.out
    assert "The run has ended: stopped by `heloco stop`" in going.ask("join").sentence
    assert going.ask("doctor").code == 2
    link.leave(silent, "enough")
    link.close()
    stopped = going.program.end()
    ending = f"Stopped for all machines, and saved. `heloco serve {going.folder}` goes on.\n"
    assert stopped.code == 0 and ending in stopped.out, stopped
    half = going.arrivals()
    assert checkpoints(going.folder)[-1].name == f"arrival-{half:08d}"

    second_service = programs.serve(going.folder, port="")
    assert second_service.token == going.token and second_service.address == going.address, "it is where it was"
    other = programs.join(second_service, "--name", "other")
    watched = second_service.ask("watch", "--text")  # until the run has ended
    assert watched.code == 0 and "arrival     10/150" in watched.out and "arrival    150/150" in watched.out, watched
    assert second_service.program.end().code == 0 and other.end().code == 0
    assert_whole(going.folder, 150)
    assert {line["machine"].partition("#")[0].partition("~")[0] for line in tape(going.folder)[half:]} == {"other"}
    going.page.signal(signal.SIGINT)
    assert going.page.end().code in (0, 130)


def test_kill_of_the_synchronizer(programs: Programs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    served = programs.serve(run, *SMALL, "--seats", "2", "--arrivals", "120")
    worker = programs.join(served)
    wait_until(lambda: served.arrivals() >= 20, "twenty arrivals")
    served.program.signal(signal.SIGKILL)
    assert served.program.end().code == -signal.SIGKILL
    assert served.arrivals() < 120
    worker.match_output("cannot be reached|broke off|closed|Trying again")
    second_service = programs.serve(run, port=served.port)
    assert second_service.program.end().code == 0
    worker_result = worker.end()
    assert worker_result.code == 0 and worker_result.out.endswith("The run has ended: all arrivals are in\n"), worker_result
    assert_whole(run, 120)


def test_a_port_that_becomes_free_is_waited_for() -> None:
    """The child of a `heloco serve` that was killed holds the port for a moment."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} is taken"):
            check_port("127.0.0.1", port)
        release = threading.Timer(0.3, taken.close)
        release.start()
        check_port("127.0.0.1", port, wait_s=30)
        release.join()


def test_how_others_call_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "vm")
    monkeypatch.setattr(socket, "getfqdn", lambda: "localhost.localdomain")
    assert own_names("0.0.0.0") == ("vm",) and own_names("10.1.2.3") == ("10.1.2.3",)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert [name.startswith("localhost") for name in own_names("0.0.0.0")] in ([False], [outward_address() == "localhost"])
    listen = ListenConfig("127.0.0.1", 8443, ("head.example",))
    assert reachable("https://127.0.0.1:8443", ServeSpec("run", listen=listen)) == "https://head.example:8443"
    listen = ListenConfig("::", 8443, ("fd00::1",))
    assert reachable("https://[::]:8443", ServeSpec("run", listen=listen)) == "https://[fd00::1]:8443"
