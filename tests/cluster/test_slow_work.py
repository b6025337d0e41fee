"""Slow work of a served run holds no lock: copies of the outer state, checkpoints on their way to the disk, old files."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from heloco.cluster.protocol.messages import Wait
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.server import checkpoints
from heloco.cluster.server.service import Service
from heloco.run import RunFolder, checkpoint
from support.service_checks import refuses
from support.small_cluster import Hand, delta, opened

LIMIT_S = 30.0
"""For what must happen in any case. No test waits for it unless it fails."""


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    return thread, results


def assert_free(service: Service) -> None:
    """Another thread gets the lock: this one, which holds it nowhere."""
    assert service.state.lock.acquire(timeout=LIMIT_S / 6), "the lock is held during slow work"
    service.state.lock.release()


@contextmanager
def slow_thread_held(service: Service) -> Iterator[None]:
    """The thread for slow work does nothing until the end of this context."""
    may_go_on, run = threading.Event(), service.state.run
    assert run is not None
    run.slow_work.submit(may_go_on.wait, LIMIT_S)
    try:
        yield
    finally:
        may_go_on.set()


@contextmanager
def slow_fsync(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No checkpoint becomes durable inside this context. The event is set when one begins to."""
    began, may_go_on, fsync = threading.Event(), threading.Event(), os.fsync

    def wait_first(file: int) -> None:
        if "checkpoints" in str(Path(f"/proc/self/fd/{file}").readlink()):
            began.set()
            assert may_go_on.wait(LIMIT_S)
        fsync(file)

    monkeypatch.setattr("heloco.disk.os.fsync", wait_first)
    try:
        yield began
    finally:
        may_go_on.set()


def test_a_checkpoint_that_begins_just_before_a_commit_holds_up_nobody(tmp_path, clock, monkeypatch):
    """1. A commit finds that nobody reads the outer state. 2. A checkpoint begins to read it. 3. The commit takes the lock."""
    service = opened(tmp_path / "run", clock)
    hand, other = Hand(service, "m"), Hand(service, "other")
    hand.take()
    run = service.state.run
    assert run is not None
    wait, waits, waits_again = run.readers.wait, list[None](), threading.Event()

    def wait_and_let_a_checkpoint_begin() -> None:
        waits.append(None)
        if len(waits) > 1:
            waits_again.set()
        wait()
        if len(waits) == 1:
            with service.state.lock:
                checkpoints.begin_saving(run)

    monkeypatch.setattr(run.readers, "wait", wait_and_let_a_checkpoint_begin)
    with slow_thread_held(service):
        committing, acks = in_thread(lambda: hand.hand_in(delta(1)))
        assert waits_again.wait(LIMIT_S)
        assert_free(service)
        other.take()
        assert other.key is not None and not acks
    committing.join(LIMIT_S)
    assert [ack.verdict for ack in acks] == ["applied"]
    service.housekeeping.save_if_due(wait=True)
    assert RunFolder.open(tmp_path / "run").checkpoints()[-1].name == "arrival-00000000", "it is of the state before the commit"
    service.close()


def test_a_stop_waits_for_its_checkpoint_without_the_lock_and_meanwhile_no_round_begins(tmp_path, clock, monkeypatch):
    service = opened(tmp_path / "run", clock, checkpoint_every=0)
    hand = Hand(service, "m")
    hand.work(1)
    hand.take()
    with slow_fsync(monkeypatch) as began:
        stopping, _ = in_thread(lambda: service.admin.stop("enough"))
        assert began.wait(LIMIT_S)
        assert_free(service)
        assert service.state.ended is None, "it is not saved yet"
        answer = hand.take()
        assert isinstance(answer, Wait) and "stopped" in answer.text
    stopping.join(LIMIT_S)
    assert service.state.ended is not None and service.state.ended.kind == "stopped"
    assert RunFolder.open(tmp_path / "run").checkpoints()[-1].name == "arrival-00000001"
    service.close()


def test_a_stop_that_failed_leaves_the_run_going(tmp_path, clock, monkeypatch):
    service = opened(tmp_path / "run", clock)
    hand = Hand(service, "m")

    def fail(*_: Any) -> None:
        raise Refused(RefusalCode.DISK, "The disk is full.")

    hand.take()
    with monkeypatch.context() as patch:
        patch.setattr(service.rounds, "give_up", fail)
        refuses(RefusalCode.DISK, service.admin.stop, "enough")
    hand.hand_in(delta(1))
    hand.take()
    assert hand.key is not None
    service.close()


def test_the_last_checkpoint_is_waited_for_without_the_lock(tmp_path, clock, monkeypatch):
    service = opened(tmp_path / "run", clock, checkpoint_every=1)
    Hand(service, "m").work(1)
    with slow_fsync(monkeypatch) as began:
        saving, _ = in_thread(lambda: service.housekeeping.save_if_due(wait=True))
        assert began.wait(LIMIT_S)
        assert_free(service)
        assert saving.is_alive()
    saving.join(LIMIT_S)
    assert RunFolder.open(tmp_path / "run").checkpoints()[-1].name == "arrival-00000001"
    service.close()


def test_the_final_model_is_written_once_for_all_machines(tmp_path, clock):
    service = opened(tmp_path / "run", clock, arrivals=1)
    hand, other = Hand(service, "m"), Hand(service, "other")
    hand.work(1)
    path = service.rounds.final(hand.ticket)
    inode, content = path.stat().st_ino, path.read_bytes()
    assert service.rounds.final(other.ticket) == path and path.stat().st_ino == inode
    path.unlink()
    assert service.rounds.final(other.ticket).read_bytes() == content, "somebody removed it"
    service.close()


def test_old_checkpoints_are_read_and_removed_in_the_thread_for_slow_work(tmp_path, clock, monkeypatch):
    service = opened(tmp_path / "run", clock, checkpoint_every=1, journal_gb=1e-9)
    hand, folder = Hand(service, "m"), RunFolder.open(tmp_path / "run")
    for seed in range(4):
        hand.work(seed)
        service.housekeeping.save_if_due(wait=True)
    threads, load_state = set[str](), checkpoint.load_state

    def load(*arguments: Any) -> Any:
        threads.add(threading.current_thread().name)
        return load_state(*arguments)

    monkeypatch.setattr(checkpoint, "load_state", load)
    hand.work(9)
    service.housekeeping.save_if_due(wait=True)
    service.close()
    assert threads and all(name.startswith("slow-work") for name in threads)
    assert [path.name for path in folder.checkpoints()] == ["arrival-00000004", "arrival-00000005"]
