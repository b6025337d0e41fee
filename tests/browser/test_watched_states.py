"""The state of a run on the page of `heloco watch`, in a real browser: the run goes, dies and stops, and the server ends."""

import re
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.browsers import started_browser
from support.programs import Program, Programs
from support.runs import TINY

pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("plotly", reason="plotly is not installed")
LONG = (*TINY, "--inner-steps", "40", "--arrivals", "2000", "--eval-every", "10", "--checkpoint-every", "10")
CLOCK = r"\d\d:\d\d:\d\d"


@pytest.fixture(scope="module")
def browser(browser_path: str | None) -> Iterator[Any]:
    with started_browser(browser_path) as browser:
        yield browser


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    context = browser.new_context()
    yield context.new_page()
    context.close()


@pytest.fixture
def training(programs: Programs, tmp_path: Path) -> Program:
    """A run that goes on for long."""
    program = programs.heloco("train", *LONG, "--out", tmp_path / "run")
    program.match_output(r"arrival +10/")
    return program


@pytest.fixture
def watcher(programs: Programs, training: Program, tmp_path: Path) -> Program:  # noqa: ARG001 - the run has begun
    return programs.heloco("watch", tmp_path / "run", "--port", "0")


def address_of(watcher: Program) -> tuple[str, int]:
    host, port = watcher.match_output(r"http://([\d.]+):(\d+)").groups()
    return host, int(port)


def go_to(page: Any, watcher: Program) -> None:
    host, port = address_of(watcher)
    page.goto(f"http://{host}:{port}/")


def await_state(page: Any, pattern: str, limit_s: float = 60.0) -> str:
    """The words about the states, when they match."""
    states = page.locator("#states")
    states.filter(has_text=re.compile(pattern)).wait_for(timeout=1000 * limit_s)
    return str(states.inner_text())


def test_a_browser_sees_a_run_go_die_go_on_and_stop_and_the_server_end(
    page: Any, watcher: Program, training: Program, programs: Programs, tmp_path: Path
) -> None:
    go_to(page, watcher)
    words = await_state(page, r"going.*arrivals · [\d.,]+ a minute · about [\d:]+ left")
    assert re.search(rf"of 2,000 arrivals.*last news {CLOCK}", words) and "Connection lost" not in words
    assert 0 < page.locator("#states progress").evaluate("bar => bar.value / bar.max") < 1
    training.signal(signal.SIGKILL)
    words = await_state(page, rf"not heard of since {CLOCK}")
    assert "the process that carried it on is gone" in words and f"heloco resume {tmp_path / 'run'} goes on with it" in words
    assert page.title() == "(not heard of) HeLoCo: run"
    resumed = programs.heloco("resume", tmp_path / "run")
    await_state(page, "going")
    assert page.title() == "HeLoCo: run"
    resumed.signal(signal.SIGINT)
    words = await_state(page, "stopped")
    assert "it was stopped and saved" in words and "left" not in words
    watcher.signal(signal.SIGTERM)
    words = await_state(page, rf"Connection lost: the last news came at {CLOCK}")
    assert "stopped" in words and page.title() == "(connection lost) HeLoCo: run"


def test_a_page_notices_that_nothing_comes_any_more_and_comes_back(page: Any, watcher: Program, training: Program) -> None:
    """The server hangs: the browser itself has no way to know."""
    page.clock.install()
    go_to(page, watcher)
    await_state(page, "going")
    watcher.signal(signal.SIGSTOP)
    page.clock.fast_forward(30_000)
    await_state(page, "Connection lost")
    training.signal(signal.SIGKILL)
    watcher.signal(signal.SIGCONT)
    assert "Connection lost" not in await_state(page, rf"^\s*not heard of since {CLOCK}")


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_prints_no_traceback_while_a_browser_has_the_page_open_and_another_reads_nothing(
    page: Any, watcher: Program, presses: int
) -> None:
    go_to(page, watcher)
    await_state(page, "going")
    with socket.socket() as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.connect(address_of(watcher))
        idle.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")  # the page is larger than what fits on the way
        assert idle.recv(1) == b"H"
        for _ in range(presses):
            watcher.signal(signal.SIGINT)
        result = watcher.end()
    assert result.code in (0, 130) and result.err in ("", "heloco: interrupted.\n"), result.err
    await_state(page, "Connection lost")
