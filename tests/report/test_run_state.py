"""The state of a run that is watched: from its folder's lock and end, from its journal, and from what the run says of itself."""

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from heloco.cli import watch
from heloco.cluster.server.service import Service
from heloco.report import run_state
from heloco.report.run_reader import Run
from heloco.report.run_state import LastStatus, RunState, StateWatch
from heloco.report.state_terminal import state_line
from heloco.run import RunFolder
from support.runs import TINY, assert_refused, heloco
from support.small_cluster import Clock, Hand, opened

ARRIVALS = 8


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "finished"
    heloco("train", *TINY, "--eval-every", "2", "--out", folder)
    return folder


@pytest.fixture
def half(tmp_path: Path, finished: Path) -> Path:
    """The same run as it would be if it had been killed after half of it."""
    folder = tmp_path / "half"
    shutil.copytree(finished, folder)
    (folder / "ended.json").unlink()
    for name, lines in (("tape.jsonl", ARRIVALS // 2), ("evals.jsonl", 3)):
        (folder / name).write_text("".join((folder / name).read_text().splitlines(keepends=True)[:lines]))
    return folder


def state_of(folder: Path) -> RunState:
    return StateWatch(Run(folder)).look()


# ---- simulations


def test_a_finished_run_says_so_and_one_that_was_killed_was_not_heard_of_since(finished: Path, half: Path) -> None:
    state = state_of(finished)
    assert (state.kind, state.reason, state.goes_on, state.left_s) == ("finished", "all arrivals are in", "", None)
    os.utime(half / "tape.jsonl", (1e9, 1e9))
    os.utime(half / "evals.jsonl", (1e9 + 2, 1e9 + 2))
    state = state_of(half)
    assert (state.kind, state.goes_on, state.news_at) == ("silent", f"heloco resume {half}", 1e9 + 2)
    assert (state.arrivals, state.planned, state.machines) == (4, ARRIVALS, ())


def test_it_goes_on_while_a_process_holds_its_folder_and_is_silent_when_that_dies(half: Path) -> None:
    state_watch, folder = StateWatch(Run(half)), RunFolder.open(half)
    folder.take()
    try:
        assert state_watch.look().kind == "going"
    finally:
        folder.close()
    state = state_watch.look()
    assert (state.kind, state.reason) == ("silent", "the process that carried it on is gone")


def test_looking_keeps_nobody_from_taking_the_folder(half: Path) -> None:
    state_watch, has_ended, looks = StateWatch(Run(half)), threading.Event(), list[str]()

    def look_on() -> None:
        while not has_ended.is_set():
            looks.append(state_watch.look().kind)

    thread = threading.Thread(target=look_on)
    thread.start()
    try:
        while len(looks) < 300:
            folder = RunFolder.open(half)
            folder.take()
            folder.close()
    finally:
        has_ended.set()
        thread.join()


@pytest.mark.parametrize("kind", ["stopped", "failed"])
def test_how_it_ended_is_remembered_until_it_goes_on(half: Path, kind) -> None:
    folder = RunFolder.open(half)
    folder.note_end(kind, "somebody tripped over the cable")
    assert (state_of(half).kind, state_of(half).reason) == (kind, "somebody tripped over the cable")
    folder.start_writing()
    assert state_of(half).kind == "going"
    folder.close()
    assert state_of(half).kind == "silent"


def test_a_run_that_diverges_is_noted_as_failed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    result = heloco("train", *TINY, "--lr", "1e30", "--out", out)
    assert result.code == 2
    state = state_of(out)
    assert state.kind == "failed" and "contributions in a row were refused" in state.reason


def test_a_folder_that_grows_without_a_lock_is_a_copy_of_a_run_that_goes_on(half: Path, finished: Path) -> None:
    run = Run(half)
    state_watch = StateWatch(run)
    assert state_watch.look().kind == "silent"
    shutil.copy(finished / "tape.jsonl", half)
    run.refresh()
    assert state_watch.look().kind == "going"
    shutil.copy(finished / "evals.jsonl", half)
    run.refresh()
    assert state_watch.look().kind == "finished"


def test_the_rate_of_a_simulation_is_seen_by_the_clock(half: Path, finished: Path) -> None:
    """The tape has virtual time alone."""
    folder = RunFolder.open(half)
    folder.take()
    run, lines = Run(half), (finished / "tape.jsonl").read_text().splitlines(keepends=True)
    state_watch = StateWatch(run)
    try:
        for arrivals in (4, 5, 6):
            (half / "tape.jsonl").write_text("".join(lines[:arrivals]))
            os.utime(half / "tape.jsonl", (1e9 + 6 * arrivals,) * 2)
            run.refresh()
            state = state_watch.look()
            if arrivals == 4:
                assert state.per_minute is None and state.left_s is None
        assert (state.per_minute, state.left_s) == (10.0, 12.0)
        assert "6 of 8 arrivals · 10 a minute · about 0:12 left" in state_line(state)
    finally:
        folder.close()


# ---- the commands


def test_status_of_a_run_that_nobody_can_ask(finished: Path, half: Path, tmp_path: Path) -> None:
    assert "finished: all arrivals are in · 8 of 8 arrivals" in heloco("status", finished).out
    out = heloco("status", half).out
    assert "not heard of since" in out and f"`heloco resume {half}` goes on" in out
    folder = RunFolder.open(half)
    folder.take()
    assert "half: going" in heloco("status", half).out
    folder.close()
    assert_refused(tmp_path, "status", half, "--json", says="was never served from this machine")


def test_a_watcher_in_the_terminal_ends_with_the_run(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunFolder.open(half).note_end("stopped", "it was stopped and saved")
    result = heloco("watch", half, "--text")
    assert result.code == 2 and "stopped: it was stopped and saved" in result.out and "Workers" in result.out
    assert result.sentence == f"half is stopped: it was stopped and saved. `heloco resume {half}` goes on with it."
    (half / "ended.json").unlink()
    monkeypatch.setattr(watch, "PATIENCE_S", 0.0)
    result = heloco("watch", half, "--text")
    assert result.code == 2 and "not heard of since" in result.out and "not heard of since" in result.sentence


# ---- real machines


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def service(tmp_path: Path, clock: Clock) -> Iterator[Service]:
    service = opened(tmp_path / "run", clock)
    yield service
    service.close()


def test_machines_and_pauses_by_what_the_run_says(service: Service, clock: Clock) -> None:
    one, other = Hand(service, "one"), Hand(service, "other")
    for i in range(4):
        clock.now += 3.0
        one.work(i)
    clock.now += 3.0
    run, last_status = Run(service.state.folder), LastStatus()
    state_watch = StateWatch(run, last_status)
    last_status.take(service.admin.status())
    state = state_watch.look()
    assert last_status.heard is not None
    assert (state.kind, state.arrivals, state.planned, state.goes_on) == ("going", 4, 20, "")
    assert state.per_minute is not None and state.left_s == pytest.approx(16 / state.per_minute * 60, rel=0.01)
    first, second = state.machines[:2]  # after them comes the one that brought the model and left
    assert (first.name, first.presence, first.worker, first.arrivals) == ("one", "here", "0", 4)
    assert (second.name, second.presence, second.worker, second.arrivals) == ("other", "here", "1", 0)
    assert first.heard_at == pytest.approx(last_status.heard.at - 3, abs=1.5)
    assert second.heard_at == pytest.approx(last_status.heard.at - 15, abs=1.5)

    other.leave("its user went home")
    service.pauses.pause("the room is hot")
    run.refresh()
    last_status.take(service.admin.status())
    state = state_watch.look()
    assert (state.kind, state.reason, state.left_s) == ("paused", "the room is hot", None)
    assert (state.machines[0].name, state.machines[0].presence) == ("one", "here")
    departed = {machine.name: machine for machine in state.machines[1:]}["other"]
    assert (departed.presence, departed.why, departed.heard_at) == ("gone", "left: its user went home", second.heard_at)

    service.admin.stop("enough for today")
    last_status.take(service.admin.status())
    state = state_watch.look()
    assert (state.kind, state.reason, state.goes_on) == ("stopped", "enough for today", f"heloco serve {run.path}")
    assert {machine.presence for machine in state.machines} == {"gone"}


def test_the_machines_of_a_suspended_run_are_awaited(service: Service) -> None:
    Hand(service, "one").work(0)
    service.admin.suspend("the head is updated")
    run, last_status = Run(service.state.folder), LastStatus()
    last_status.take(service.admin.status())
    state = StateWatch(run, last_status).look()
    assert (state.kind, state.label, state.reason) == ("suspended", "suspended", "the head is updated")
    assert state.goes_on == f"heloco serve {run.path}" and state.has_ended
    assert {machine.name: machine.presence for machine in state.machines}["one"] == "away"


def test_without_a_status_the_journal_tells_of_machines_and_pauses(service: Service, clock: Clock) -> None:
    one, other = Hand(service, "one"), Hand(service, "other")
    clock.now += 61.0
    one.work(0)
    other.leave("its user went home")
    run = Run(service.state.folder)
    state_watch = StateWatch(run)
    state = state_watch.look()
    by_name = {machine.name: machine for machine in state.machines}
    assert state.kind == "going" and by_name["one"].presence == "here" and by_name["other"].presence == "gone"
    assert (by_name["one"].heard_at, by_name["one"].heard_run, by_name["one"].arrivals) == (None, "1:01", 1)
    service.pauses.pause("the room is hot")
    run.refresh()
    assert (state_watch.look().kind, state_watch.look().reason) == ("paused", "the room is hot")
    service.close()
    state = state_watch.look()
    assert state.kind == "silent" and {machine.presence for machine in state.machines} == {"unknown", "gone"}


def test_a_copy_of_a_run_that_is_out_of_reach_is_silent_unless_the_run_had_said_that_it_ends(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    Hand(service, "one")
    last_status = LastStatus(is_copy=True)
    state_watch = StateWatch(Run(service.state.folder), last_status)
    assert state_watch.look().kind == "silent", "the lock on a copy says nothing"
    last_status.take(service.admin.status())
    assert state_watch.look().kind == "going"
    monkeypatch.setattr(run_state, "STATUS_LASTS_S", -1.0)
    state = state_watch.look()
    assert (state.kind, state.reason, state.goes_on) == ("silent", "it cannot be reached", "")
    assert state.news_at == pytest.approx(last_status.heard.at if last_status.heard else 0, abs=1)
    service.admin.stop("enough for today")
    last_status.take(service.admin.status())
    assert state_watch.look().kind == "stopped"
