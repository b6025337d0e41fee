"""`heloco watch`: a run that grows is seen to grow, in a real browser, over plain HTTP and in the terminal."""

import http.client
import json
import re
import shutil
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from heloco.report.own_names import OwnNames, name_in, names_of_this_machine
from heloco.report.run_reader import read_runs
from support.browsers import silent_page
from support.page_changes import with_changes
from support.programs import Program, Programs
from support.runs import TINY, heloco

pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("plotly", reason="plotly is not installed")
ARRIVALS = 8
WATCHED = r"http://([\d.]+:\d+)"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "finished"
    heloco("train", *TINY, "--eval-every", "2", "--out", folder)
    return folder


@pytest.fixture
def growing(tmp_path: Path, finished: Path) -> Path:
    """The same run when half of it was done."""
    folder = tmp_path / "growing"
    shutil.copytree(finished, folder)
    cut(folder / "tape.jsonl", ARRIVALS // 2)
    cut(folder / "evals.jsonl", 3)
    return folder


def cut(path: Path, lines: int) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))


def grow(folder: Path, finished: Path, lines: int | None = None) -> None:
    """The run goes on: whole lines are added to its files, as a run does it."""
    for name in ("tape.jsonl", "evals.jsonl"):
        present_lines = (folder / name).read_text().splitlines(keepends=True)
        rest = (finished / name).read_text().splitlines(keepends=True)[len(present_lines) :]
        with (folder / name).open("a") as file:
            file.writelines(rest[:lines])


@pytest.fixture
def served(growing: Path, programs: Programs) -> Iterator[str]:
    """host:port of a real `heloco watch`."""
    program = programs.heloco("watch", growing, "--port", "0")
    yield program.match_output(WATCHED)[1]
    assert_ends_at_ctrl_c(program)


def assert_ends_at_ctrl_c(program: Program) -> None:
    program.process.send_signal(signal.SIGINT)
    result = program.end()
    assert result.code in (0, 130) and result.err in ("", "heloco: interrupted.\n"), result.err


def get(address: str, path: str, headers: dict[str, str] | None = None) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(address, timeout=20)
    connection.request("GET", path, headers=headers or {})
    return connection.getresponse()


def next_event(stream: http.client.HTTPResponse, page_data: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    """The number of the next event, and what a page that shows this then shows."""
    lines = iter(lambda: stream.readline().decode(), "")
    number = int(next(line for line in lines if line.startswith("id: ")).removeprefix("id: "))
    line = stream.readline().decode()
    if line == "event: change\n":
        assert page_data is not None
        return number, with_changes(page_data, json.loads(stream.readline().decode().removeprefix("data: ")))
    return number, json.loads(line.removeprefix("data: "))


def losses(data: dict[str, Any]) -> list[float]:
    [chart] = [chart for chart in data["charts"] if chart["name"] == "scores"]
    points: list[float] = chart["views"][0]["panels"][0]["lines"][0]["y"]
    return points


def test_what_is_new_is_told_at_once(served: str, growing: Path, finished: Path) -> None:
    page = get(served, "/")
    text = page.read().decode()
    assert page.status == 200 and "connect-src 'self'" in text and page.headers["Cache-Control"] == "no-store"
    embedded = json.loads(re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)[0])
    stream = get(served, f"/events?seen={embedded['version']}")
    assert stream.headers["Content-Type"].startswith("text/event-stream")
    grow(growing, finished, 1)
    lines_before = len(losses(embedded))
    number, data = next_event(stream, embedded)
    assert number > embedded["version"] and len(losses(data)) == lines_before + 1
    grow(growing, finished)
    while len(losses(data)) < 5:
        number, data = next_event(stream, data)
    everything = next_event(get(served, "/events"))[1]
    assert {**data, "version": 0} == {**everything, "version": 0}
    evals = [json.loads(line) for line in (finished / "evals.jsonl").read_text().splitlines()]
    assert losses(data) == pytest.approx([line["mean"]["loss"] for line in evals], rel=1e-5)


def test_who_was_away_gets_everything_and_nothing_else_is_served(served: str) -> None:
    for version in ("-7", "0", "17"):  # 17: of a process that showed the page before
        _, data = next_event(get(served, "/events", {"Last-Event-ID": version}))
        assert len(losses(data)) == 3
    for path in ("/tape.jsonl", "/../config.toml", "/events/x"):
        assert get(served, path).status == 404
    for version in ("rubbish", "%C2%B2", "1" * 20):
        assert get(served, f"/events?seen={version}").status == 400


def test_it_ends_without_a_traceback_while_pages_are_open(growing: Path, programs: Programs) -> None:
    """A process from nothing, so that Python itself ends it too."""
    program = programs.start("watch", [sys.executable, "-m", "heloco.cli", "watch", str(growing), "--port", "0"])
    address = program.match_output(WATCHED)[1]
    streams = [get(address, f"/events?seen={version}") for version in (-1, 0, 0)]
    assert len(losses(next_event(streams[0])[1])) == 3
    assert_ends_at_ctrl_c(program)


@pytest.mark.parametrize("path", ["/", "/events", "/nothing"])
def test_only_names_of_this_machine_are_answered(served: str, path: str) -> None:
    """A web page whose name was made to point here must not read the run's data."""
    port = served.rpartition(":")[2]
    evil = ("evil.example", f"evil.example:{port}", "localhost.evil.example", "127.0.0.1.evil.example", "", "10.1.2.3", "::1")
    for name in evil:
        answer = get(served, path, {"Host": name})
        assert answer.status == 421 and b"names of its own machine" in answer.read(), name
    for name in (f"localhost:{port}", "LOCALHOST", f"127.0.0.1:{port}", "127.9.9.9", "[::1]:80", "a.localhost", "localhost."):
        assert get(served, path, {"Host": name}).status == (404 if path == "/nothing" else 200), name
    assert get(served, path, {"Host": f"{socket.gethostname()}:{port}"}).status != 421


def test_a_page_that_is_served_to_others_answers_to_its_addresses_and_names() -> None:
    everywhere = names_of_this_machine("0.0.0.0")
    assert {socket.gethostname().lower(), socket.getfqdn().lower()} <= everywhere
    guarded_app = OwnNames(lambda *_: None, names_of_this_machine("Head.Example"), anywhere=True)  # type: ignore[arg-type,return-value]
    assert all(guarded_app.is_own(name_in(name)) for name in ("head.example:8765", "HEAD.EXAMPLE", "10.1.2.3:80", "[fe80::1]:80"))
    assert not guarded_app.is_own(name_in("evil.example"))


def test_a_browser_shows_new_arrivals(served: str, growing: Path, finished: Path, browser_path: str | None) -> None:
    with silent_page(browser_path) as page:
        page.goto(f"http://{served}/")
        count = "window.heloco.cards.get('scores').chart.views[0].panels[0].lines[0].y.length"
        assert page.evaluate(count) == 3
        grow(growing, finished)
        for _ in range(40):  # the issue asks for two seconds
            if page.evaluate(count) == 5:
                break
            page.wait_for_timeout(50)
        assert page.evaluate(count) == 5


def test_in_the_terminal_until_the_run_has_ended(growing: Path, finished: Path, programs: Programs) -> None:
    program = programs.heloco("watch", growing, "--text")
    program.match_output(r"arrival +0/8")
    grow(growing, finished)
    result = program.end()
    arrivals = re.findall(r"arrival +(\d+)/8", result.out)
    assert result.code == 0 and arrivals == ["0", "2", "4", "6", "8"] and "Workers" in result.out


def test_a_run_is_whole_with_its_last_evaluation(growing: Path, finished: Path) -> None:
    (run,) = read_runs([growing])
    shutil.copy(finished / "tape.jsonl", growing)
    run.refresh()
    assert run.summary.arrivals == ARRIVALS and not run.is_whole, "its last evaluation is not there yet"
    shutil.copy(finished / "evals.jsonl", growing)
    run.refresh()
    assert run.is_whole


def test_a_port_in_use_and_other_mistakes(finished: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from heloco.cli.main import run

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert run(["watch", str(finished), "--port", str(listener.getsockname()[1])]) == 2
    assert "--port 0" in capsys.readouterr().err
    for arguments, sentence in (
        ([str(tmp_path)], "no run folder"),
        (["https://127.0.0.1:9"], "needs a token"),
        (["https://127.0.0.1:9", "--token", f"heloco-viewer.{'x' * 43}.{'0' * 64}"], "cannot be reached"),
        (["http://127.0.0.1:9"], "must begin with https://"),
        ([str(finished), "--port", "many"], "0 to 65535"),
        ([str(finished), "--port", "²"], "0 to 65535"),
        ([str(finished), "--host", "no.such.host.invalid"], "served"),
    ):
        assert run(["watch", *arguments]) == 2
        assert sentence in capsys.readouterr().err


def test_a_tape_that_can_no_longer_be_read_is_said_on_the_page(served: str, growing: Path) -> None:
    stream = get(served, "/events?seen=0")
    _, data = next_event(stream)
    with (growing / "tape.jsonl").open("a") as file:
        file.write("no record\n")
    _, data = next_event(stream, data)
    assert any("line 5 was edited" in note for note in data["notes"]) and len(losses(data)) == 3
