"""The live page in a process of its own: started by a look, ended with the run or when nobody looks."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

for part in ("starlette", "httptools", "httpx", "plotly", "jinja2"):
    pytest.importorskip(part, reason=f"{part} is not installed")

import httpx  # noqa: E402

from heloco.cluster.server.process import ListenConfig, RunHost  # noqa: E402
from support.page_processes import page_processes  # noqa: E402
from support.small_cluster import Hand, opened  # noqa: E402

LIMIT_S = 60.0


def until_gone(folder: Path) -> None:
    end = time.monotonic() + LIMIT_S
    while page_processes(folder):
        assert time.monotonic() < end


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def host(folder):
    run_host = RunHost(opened(folder), ListenConfig("127.0.0.1", 0, ("localhost",), page="heloco.cli.page:page_of"))
    yield run_host
    run_host.close()
    until_gone(folder)


@pytest.fixture
def browser(host):
    key = host.tokens.first("viewer").secret
    with httpx.Client(
        base_url=host.address, verify=False, trust_env=False, timeout=LIMIT_S, cookies={"heloco-view": key},
        limits=httpx.Limits(max_connections=None),
    ) as client:  # fmt: skip
        yield client


def test_the_first_look_starts_it_and_later_looks_use_it(host, folder, browser):
    hand = Hand(host.service, "m")
    hand.work(1)
    assert page_processes(folder) == []
    page = browser.get("/page/")
    assert page.status_code == 200 and "<html" in page.text and page.headers["cache-control"] == "no-store"
    [process] = page_processes(folder)
    assert browser.get("/page/").status_code == 200
    assert browser.head("/page/").status_code == 200 and browser.get("/page/events?seen=x").status_code == 400
    for strange in ("/page/%00", "/page/nothing", "/page//", "/page/%2e%2e/v1/status"):
        assert browser.get(strange).status_code == 404
    for version in ("", "²", "%00", "1" * 30):
        assert browser.get(f"/page/events?seen={version}").status_code == 400
    for version in ("²".encode(), b"x", b"-", b"\xff"):
        assert browser.get("/page/events", headers=[(b"last-event-id", version)]).status_code == 400
    assert page_processes(folder) == [process]


def test_events_come_through_and_end_with_the_browser(host, folder, browser):
    hand = Hand(host.service, "m")
    with browser.stream("GET", "/page/events?seen=-1") as events:
        assert events.headers["content-type"].startswith("text/event-stream")
        lines = events.iter_lines()
        version = int(next(lines).removeprefix("id: "))
        hand.work(1)
        assert any(line == f"id: {version + 1}" for line in lines)
    hand.work(1)  # nobody is there to see it
    [process] = page_processes(folder)
    end = time.monotonic() + LIMIT_S
    while connections_of(process):
        assert time.monotonic() < end, "the page's process still serves a browser that has gone"


def states_in(lines):
    """The states of the run that a page gets, one after the other."""
    for line in lines:
        if line == "event: state":
            [state] = json.loads(next(lines).removeprefix("data: "))
            yield state


def machine_in(state, name):
    return next(machine for machine in state["machines"] if machine["name"] == name)


def test_the_run_itself_tells_the_page_who_is_here_and_how_it_goes(host, browser):
    """What the journal does not have: signs of life."""
    hand = Hand(host.service, "m")
    with browser.stream("GET", "/page/events?seen=-1") as events:
        states = states_in(events.iter_lines())
        while machine_in(state := next(states), "m")["heard_at"] is None:
            assert state["kind"] == "going"
        assert machine_in(state, "m")["presence"] == "here"
        host.service.pauses.pause("the room is hot")
        while (state := next(states))["kind"] != "paused":
            assert state["kind"] == "going"
        assert state["reason"] == "the room is hot"
        hand.leave("its user went home")
        while machine_in(state := next(states), "m")["presence"] == "here":
            assert state["kind"] == "paused"
        assert machine_in(state, "m")["why"] == "left: its user went home"
        host.stop("enough for today")
        while (state := next(states))["kind"] != "stopped":
            assert state["kind"] == "paused"
        assert state["reason"] == "enough for today"


MANY, SOON_S = 130, 5.0


def test_many_who_look_and_leave_keep_nobody_from_looking(folder, browser):
    with contextlib.ExitStack() as streams:
        lines = [streams.enter_context(browser.stream("GET", "/page/events?seen=-1")).iter_lines() for _ in range(MANY)]
        assert all(next(each).startswith("id: ") for each in lines)
        assert browser.get("/page/", timeout=SOON_S).status_code == 200
        [process] = page_processes(folder)
        assert connections_of(process) >= MANY
    end = time.monotonic() + SOON_S  # nothing happens in the run meanwhile
    while connections_of(process):
        assert time.monotonic() < end, "the page's process still serves browsers that have gone"


def test_who_asks_for_the_head_of_the_events_keeps_nobody_from_looking(folder, browser):
    head = browser.head("/page/events?seen=-1")
    assert head.status_code == 200 and head.headers["content-type"].startswith("text/event-stream")
    assert browser.get("/page/", timeout=SOON_S).status_code == 200
    [process] = page_processes(folder)
    end = time.monotonic() + SOON_S
    while connections_of(process):
        assert time.monotonic() < end, "the page's process still sends events that nobody reads"


def connections_of(process: int) -> int:
    """How many connections its socket has: those in state 03."""
    inodes = set()
    for link in Path(f"/proc/{process}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sum(line[6] in inodes and line[5] == "03" and "heloco-page-" in line[-1] for line in lines)


def test_where_it_is_killed_the_next_look_starts_another(folder, browser):
    assert browser.get("/page/").status_code == 200
    [process] = page_processes(folder)
    os.kill(process, signal.SIGKILL)
    assert browser.get("/page/").status_code == 200
    assert page_processes(folder) not in ([], [process])


def test_it_ends_with_the_process_that_started_it(folder, tmp_path):
    opened(folder).close()
    script = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from heloco.report.page_process import PageProcess\n"
        "page = PageProcess(Path(sys.argv[1]))\n"
        "asyncio.run(page.ready())\n"
        "print('started', flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    starter = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert starter.stdout is not None and starter.stdout.readline() == "started\n"
    assert len(page_processes(folder)) == 1
    assert len(list(tmp_path.glob("heloco-page-*"))) == 1
    starter.kill()
    starter.wait()
    until_gone(folder)
    assert not list(tmp_path.glob("heloco-page-*"))


def test_it_ends_when_nobody_looks(folder, tmp_path):
    opened(folder).close()
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "from heloco.report import page_process\n"
        "page_process.IDLE_S = 0.1\n"
        "page_process.main(Path(sys.argv[1]), Path(sys.argv[2]))\n"
    )
    (tmp_path / "place").mkdir()
    command = [sys.executable, "-c", script, str(folder), str(tmp_path / "place" / "socket")]
    idle = subprocess.Popen(command, stdin=subprocess.PIPE)
    assert idle.wait(LIMIT_S) == 0 and not (tmp_path / "place").exists()
