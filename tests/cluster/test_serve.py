"""A run on real machines as a person types it: `heloco serve`, `join`, `status`, `stop`, `doctor`, `watch`, `replay`.

Real processes and real TLS on loopback. A worker that is stopped (SIGSTOP) holds a run still while it is looked at.
"""

import http.client
import json
import re
import shutil
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from heloco.cli.mirror import FIXED, GROWING, Mirror
from heloco.cli.serve import outward_address, own_names, reachable
from heloco.cluster.client.connect import connect
from heloco.cluster.gateway.https_link import HttpsLink
from heloco.cluster.server.process import ListenConfig, ServeSpec
from heloco.records.journal_reader import FOLDER, segments
from support.programs import HERE, SMALL, Program, Programs, Served, assert_whole, get, wait_until
from support.repository import REPOSITORY
from support.runs import assert_refused, checkpoints, evals, heloco, tape, write_text

for part in ("uvicorn", "starlette", "httpx", "cryptography"):
    pytest.importorskip(part, reason=f"{part} is not installed")


# ---- two workers of this machine, to the end


@pytest.fixture(scope="module")
def finished_run(programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that two local workers did. Only look at it."""
    folder = tmp_path_factory.mktemp("ended") / "run"
    config_file = folder.parent / "run.toml"
    config_file.write_text("[run]\narrivals = 40\neval_every = 10\n[rounds]\ninner_steps = 3\n")
    served = programs.serve(folder, *SMALL, "--workers", "2", config=config_file)
    result = served.program.end()
    assert result.code == 0, (result.out, result.err)
    assert f"The run's folder: {folder}" in result.out and "arrival     40/40" in result.out and "local-1 is here" in result.out
    return folder


def test_two_workers_do_a_run(finished_run: Path) -> None:
    assert_whole(finished_run, 40)
    assert {line["worker"] for line in tape(finished_run)} == {0, 1}
    assert [line["arrival"] for line in evals(finished_run)] == [0, 10, 20, 30, 40]
    assert checkpoints(finished_run)[-1].name == "arrival-00000040"
    assert len(list((finished_run / "journal").glob("*.safetensors"))) == 40 and len(segments(finished_run / FOLDER)) == 1
    assert (finished_run / "credentials" / "key.pem").stat().st_mode & 0o777 == 0o600
    assert "The run has ended: all arrivals are in" in (finished_run / "workers" / "0.log").read_text()


def test_real_machines_keep_the_state_of_muon(programs: Programs, tmp_path: Path) -> None:
    muon = ("--inner-optimizer", "muon", "--keep-state", "--arrivals", "8", "--inner-steps", "3")
    result = programs.serve(tmp_path / "run", *SMALL, "--workers", "2", *muon).program.end()
    assert result.code == 0, (result.out, result.err)
    assert_whole(tmp_path / "run", 8)


def test_replay_in_json(finished_run: Path) -> None:
    replay_result = json.loads(heloco("replay", finished_run, "--json").out)
    assert (replay_result["begun_at"], replay_result["lines"], replay_result["difference"]) == (0, 40, "")
    assert replay_result["digest"] == tape(finished_run)[-1]["digest"]


def test_a_real_run_is_reported_and_compared(finished_run: Path, tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="plotly is not installed")
    result = heloco("report", finished_run, "--out", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    data = json.loads(re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)[0])
    assert result.code == 0 and "real time (s)" in json.dumps(data) and "virtual" not in json.dumps(data)
    rows = [[cell["text"] for cell in row] for row in data["tables"][1]["rows"]]
    assert [row[0] for row in rows] == ["local-0", "local-1"] and sum(int(row[2]) for row in rows) == 40
    assert "are here" in data["tables"][2]["rows"][0][-1]["text"]  # until the first machine came, the run paused
    result = heloco("compare", finished_run, finished_run)
    assert result.code == 0 and "s of real time" in result.out, result.err
    simulated = ("--arrivals", "4", "--paces", "1,2", "--out", tmp_path / "simulated")
    assert heloco("train", *SMALL, *simulated).code == 0
    assert (
        "Virtual seconds are not real ones" in heloco("compare", finished_run, tmp_path / "simulated", "--format", "markdown").out
    )
    assert heloco("report", finished_run, tmp_path / "simulated", "--out", tmp_path / "both.html").code == 0
    assert "Simulated time is not real time: run ran on real machines." in (tmp_path / "both.html").read_text()


def test_a_real_run_goes_on_with_serve_only(finished_run: Path) -> None:
    assert_refused(finished_run, "resume", finished_run, says=f"`heloco serve {finished_run}` goes on with it.")


def test_serving_a_finished_run_says_so_and_changes_nothing(finished_run: Path) -> None:
    before = tape(finished_run)
    result = heloco("serve", finished_run, *HERE, "--port", "0")
    assert (
        result.code == 0
        and result.out == f"{finished_run} is finished: all 40 arrivals are in.\n"
        and tape(finished_run) == before
    )


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
    assert 12 <= machine["arrivals"] == status["arrivals"] <= going.arrivals() and status["planned"] == 150
    assert machine["share"] == 1 and 0 < machine["per_minute"] == status["per_minute"]
    shown = going.ask("status").out
    assert "going" in shown and "guest" in shown and "1 machine for 2 workers, 1 contributed to the last 8 arrivals" in shown


def test_the_doctor_finds_nothing_wrong(going: Going) -> None:
    result = going.ask("doctor")
    assert result.code == 0 and "BAD" not in result.out, result.out
    findings = {finding["subject"]: finding for finding in json.loads(going.ask("doctor", "--json").out)}
    whats = {"this machine", "GPU", "kernels", "connection", "run", "clock", "latency", "download", "upload"}
    assert whats == set(findings)
    assert all(finding["is_good"] for finding in findings.values())


def test_the_doctor_names_what_is_wrong(going: Going) -> None:
    result = heloco("doctor", going.address, "--token", "heloco-worker.short")
    assert result.code == 2 and re.search(r"^BAD  connection +The token is not whole", result.out, re.M)


def test_the_live_page_needs_its_key(going: Going) -> None:
    assert get(going, f"/page?key={going.key}")[0] in (200, 307)
    status, content = get(going, f"/page/?key={going.key}")
    assert status == 200 and "<script" in content and "heloco-ramp" in content
    for path in ("/page", "/page/", "/page/?key=wrong", f"/describe?key={going.key}"):
        status, content = get(going, path)
        assert status == 401 and not content, path


def test_a_run_elsewhere_is_watched_here(going: Going) -> None:
    match = going.page.said(r"Watching at http://([\d.]+:\d+)")
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
        watcher.said("arrival" if text else "Watching at")
        assert list(place.glob("heloco-watch-*"))
        watcher.signal(signal.SIGTERM)
        assert watcher.end().code == 128 + signal.SIGTERM and not list(place.iterdir())


def test_what_is_watched_is_what_is_there(going: Going) -> None:
    run_folder = Path(going.status()["folder"])
    mirror = Mirror(HttpsLink(going.address, going.viewer))
    mirror.start()
    try:
        journal = segments(run_folder / FOLDER)[0][1].relative_to(run_folder)
        for name in (*FIXED, *(str(journal) if name == FOLDER else name for name in GROWING)):
            copy = (mirror.folder / name).read_bytes() if (mirror.folder / name).exists() else b""
            assert (run_folder / name).read_bytes().startswith(copy) and (copy or name == "tape.jsonl"), name
    finally:
        mirror.close()


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
    assert stopped.code == 0 and f"Stopped and saved. `heloco serve {going.folder}` goes on.\n" in stopped.out, stopped
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
    worker.said("cannot be reached|broke off|closed|Trying again")
    second_service = programs.serve(run, port=served.port)
    assert second_service.program.end().code == 0
    worker_result = worker.end()
    assert worker_result.code == 0 and worker_result.out.endswith("The run has ended: all arrivals are in\n"), worker_result
    assert_whole(run, 120)


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


# ---- folders and settings that are wrong


def test_folders_that_are_none(tmp_path: Path, unbroken: Callable[..., Path]) -> None:
    (tmp_path / "empty").mkdir()
    for command in ("serve", "replay"):
        assert_refused(tmp_path, command, tmp_path / "empty", says="is no run folder")
    assert_refused(tmp_path, "serve", tmp_path / "nothing.toml", says="There is no config file")
    simulated = unbroken()
    assert_refused(simulated, "replay", simulated, says="it was a simulation. The same config gives the same run")
    assert_refused(simulated, "serve", simulated, *HERE, "--port", "0", says=f"`heloco resume {simulated}` goes on with it")


def test_settings_that_are_wrong(finished_run: Path, tmp_path: Path) -> None:
    assert_refused(
        finished_run,
        "serve",
        finished_run,
        "--arrivals",
        "99",
        says="--arrivals cannot change in a run that has begun: leave it out.",
    )
    assert_refused(
        tmp_path, "serve", *SMALL, "--workers", "abc", says="workers cannot be 'abc': give a whole number", cwd=tmp_path
    )
    assert_refused(tmp_path, "serve", *SMALL, "--workers", "-1", says="give a whole number", cwd=tmp_path)
    assert_refused(tmp_path, "serve", *SMALL, "--port", "70000", says="0 to 65535", cwd=tmp_path)
    assert_refused(tmp_path, "serve", *SMALL, "--prot", "1", says="--port", cwd=tmp_path)
    assert_refused(finished_run, "serve", *SMALL, "--out", finished_run, says=str(finished_run))


def cut_journal(finished_run: Path, folder: Path, cut: Callable[[list[str]], list[str]]) -> Path:
    """A copy of the run as a kill would have left it after its first checkpoint, but for its journal."""
    shutil.copytree(finished_run, folder)
    for path in checkpoints(folder)[1:]:
        shutil.rmtree(path)
    [(_, events)] = segments(folder / FOLDER)
    events.write_text("".join(cut(events.read_text().splitlines(keepends=True))))
    return folder


def test_a_journal_that_was_cut(finished_run: Path, tmp_path: Path) -> None:
    run = cut_journal(finished_run, tmp_path / "edited", lambda lines: [*lines[:20], *lines[21:]])
    for command in ("serve", "replay"):
        more = (*HERE, "--port", "0") if command == "serve" else ()
        result = heloco(command, run, *more)
        assert result.code == 2 and "the line of event 20 was edited, or lines before it are missing" in result.sentence, (
            result.err
        )
        assert "Restore the file" in result.sentence and f"heloco rollback {run}" in result.sentence
    run = cut_journal(finished_run, tmp_path / "short", lambda lines: lines[: len(lines) // 2])
    before = tape(run)
    result = heloco("serve", run, *HERE, "--port", "0")
    assert result.code == 2 and "is cut short: it reaches to event" in result.sentence and "Restore it" in result.sentence, (
        result.err
    )
    assert before == tape(finished_run)


def test_a_journal_shorter_than_the_checkpoint(finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    [(_, events)] = segments(run / FOLDER)
    events.write_text("".join(events.read_text().splitlines(keepends=True)[:30]))
    result = heloco("serve", run, *HERE, "--port", "0")  # all that was acknowledged is in the checkpoint
    assert result.code == 0 and result.out.endswith("is finished: all 40 arrivals are in.\n"), (result.out, result.err)


def test_too_few_machines(tmp_path: Path) -> None:
    run = tmp_path / "run"
    few = ("--min-workers", "2", "--give-up-after-s", "0.5")
    assert_refused(tmp_path, "serve", *SMALL, "--seats", "1", *few, *HERE, "--out", run, says="that many machines can never take")
    result = heloco("serve", *SMALL, "--arrivals", "6", "--seats", "2", *few, *HERE, "--port", "0", "--out", run)
    assert result.code == 2 and "The run pauses: 0 of at least 2 machines are here." in result.out
    assert (
        "0 of at least 2 machines are here, for more than 0.5 s" in result.sentence
        and f"`heloco serve {run}` goes on" in result.sentence
    )
    result = heloco("serve", run, "--give-up-after-s", "3600", "--min-workers", "1", "--workers", "1", *HERE, "--port", "0")
    assert result.code == 0, (result.out, result.err)
    assert_whole(run, 6)


# ---- a loop of one's own


def test_a_script_joins_by_its_environment(programs: Programs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ("--task", "external", "--seats", "1", "--inner-steps", "5", "--arrivals", "6", "--device", "cpu")
    early = programs.serve(run, *settings)
    assert "join it from a training script" in early.ask("join").sentence
    assert "no machine has brought its model yet" in get(early, f"/page/?key={early.key}")[1]
    early.program.signal(signal.SIGINT)
    result = early.program.end()
    assert result.code == 130 and f"the same command with --out {run} starts again" in result.out, result

    served = programs.serve(run, *settings)
    assert served.token == early.token
    watching = programs.heloco("watch", served.address, "--text", HELOCO_TOKEN=served.viewer)  # waits for a model
    script = REPOSITORY / "examples" / "plain_loop.py"
    loop = programs.start(
        "loop", [sys.executable, str(script), "--steps", "100"], HELOCO_ADDRESS=served.address, HELOCO_TOKEN=served.token
    )
    assert served.program.end().code == 0
    result = loop.end()
    assert result.code == 0 and "29 steps, the last loss is" in result.out and "After 6 contributions from here" in result.out, (
        result
    )
    assert_whole(run, 6)
    assert {line["worker"] for line in tape(run)} == {0} and all(line["loss"] > 0 for line in tape(run))
    watched = watching.end()
    assert watched.code == 0 and "arrival      6/6  real " in watched.out and "mean training loss" in watched.out, watched
    assert "mean training loss" in served.program.out.read_text()
