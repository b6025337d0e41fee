"""Slow work of a served run holds no lock: copies of the outer state, checkpoints on their way to the disk, old files."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from heloco.cluster.protocol.messages import ModelCommit, Ticket, Wait
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.server import checkpoints
from heloco.cluster.server.open_run import external_run
from heloco.cluster.server.service import Service
from heloco.run import RunFolder, checkpoint
from heloco.wire.layout import Layout, pieces, write
from support.service_checks import refuses
from support.small_cluster import NAMES, Clock, Hand, config, delta, join_request, model, opened

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
def slow_fsync(monkeypatch: pytest.MonkeyPatch, name: str = "checkpoints") -> Iterator[threading.Event]:
    """No file with `name` in its path becomes durable inside this context. The event is set when one begins to."""
    began, may_go_on, fsync = threading.Event(), threading.Event(), os.fsync

    def wait_first(file: int) -> None:
        if name in str(Path(f"/proc/self/fd/{file}").readlink()):
            began.set()
            assert may_go_on.wait(LIMIT_S)
        fsync(file)

    monkeypatch.setattr("heloco.disk.os.fsync", wait_first)
    try:
        yield began
    finally:
        may_go_on.set()


@contextmanager
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No file for machines is written inside this context. The event is set when one is begun."""
    began, may_go_on = threading.Event(), threading.Event()

    def wait_first(*arguments: Any, **options: Any) -> None:
        began.set()
        assert may_go_on.wait(LIMIT_S)
        write(*arguments, **options)

    monkeypatch.setattr("heloco.cluster.server.transfers.write", wait_first)
    try:
        yield began
    finally:
        may_go_on.set()


def joined(service: Service, name: str) -> Ticket:
    """The ticket of a machine that could bring the model."""
    return service.members.join(join_request(name, layout=Layout.from_tensors(model()).entries), None).ticket


def without_model(folder: Path, clock: Clock) -> tuple[Service, Ticket, ModelCommit]:
    """A service whose run has no model, and a machine that has sent one and has not committed it."""
    service = external_run(config(), folder, clock=clock)
    ticket, layout = joined(service, "m"), Layout.from_tensors(model())
    upload = service.models.upload(ticket, layout)
    turn = upload.begin(0)
    for piece in pieces(layout, model()):
        upload.write(turn, piece)
    return service, ticket, ModelCommit(names=tuple(NAMES), digest=upload.digest())


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


def test_a_checkpoint_that_is_copied_gives_way_to_a_commit(tmp_path, clock, monkeypatch):
    """1. A checkpoint copies the outer state, and does not come to an end. 2. A contribution is committed. This happens again and
    again. 3. The checkpoint after that is finished."""
    service = opened(tmp_path / "run", clock, checkpoint_every=1)
    hand, write, copies, began = Hand(service, "m"), checkpoint.write, list[None](), threading.Event()

    def copy(*arguments: Any, before_piece: Callable[[], None], **keywords: Any) -> None:
        copies.append(None)
        began.set()
        while len(copies) <= checkpoints.GIVES_WAY:
            before_piece()
        write(*arguments, before_piece=before_piece, **keywords)

    monkeypatch.setattr(checkpoint, "write", copy)
    hand.work(1)
    for step in range(checkpoints.GIVES_WAY):
        began.clear()
        service.housekeeping.save_if_due()
        assert began.wait(LIMIT_S)
        committing, _ = in_thread(lambda step=step: hand.work(2 + step))
        committing.join(LIMIT_S)
        assert not committing.is_alive() and len(copies) == step + 1
        run = service.state.run
        assert run is not None
        checkpoints.wait_for_saving(run)
    folder = RunFolder.open(tmp_path / "run")
    assert [path.name for path in folder.checkpoints()] == ["arrival-00000000"]
    assert not list((tmp_path / "run" / "checkpoints").glob(".*")), "what was copied is removed"
    service.housekeeping.save_if_due()
    checkpoints.wait_for_saving(run)
    assert folder.checkpoints()[-1].name == f"arrival-{1 + checkpoints.GIVES_WAY:08d}"
    service.close()


@pytest.mark.parametrize("file", ["tape.jsonl", "evals.jsonl", "checkpoints"])
def test_a_commit_does_not_wait_until_a_checkpoint_is_durable(tmp_path, clock, monkeypatch, file):
    """1. A checkpoint copies the outer state. 2. It waits for the disk. 3. A contribution is committed."""
    service = opened(tmp_path / "run", clock, checkpoint_every=1)
    hand = Hand(service, "m")
    hand.work(1)
    with slow_fsync(monkeypatch, file) as began:
        service.housekeeping.save_if_due()
        assert began.wait(LIMIT_S)
        committing, _ = in_thread(lambda: hand.work(2))
        committing.join(LIMIT_S)
        assert not committing.is_alive(), f"the commit waits until {file} is durable"
    service.close()


def test_a_commit_does_not_wait_until_the_journal_is_pruned(tmp_path, clock, monkeypatch):
    """1. A checkpoint is written, and the journal is pruned. 2. Another checkpoint is due. 3. A contribution is committed."""
    service = opened(tmp_path / "run", clock, checkpoint_every=1)
    hand, began, may_go_on, load_state = Hand(service, "m"), threading.Event(), threading.Event(), checkpoint.load_state

    def wait_first(*arguments: Any) -> Any:
        began.set()
        assert may_go_on.wait(LIMIT_S)
        return load_state(*arguments)

    monkeypatch.setattr(checkpoint, "load_state", wait_first)
    hand.work(1)
    service.housekeeping.save_if_due()
    assert began.wait(LIMIT_S)
    hand.work(2)
    service.housekeeping.save_if_due()
    committing, _ = in_thread(lambda: hand.work(3))
    committing.join(LIMIT_S)
    assert not committing.is_alive()
    may_go_on.set()
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
        assert isinstance(answer, Wait) and answer.kind == "stopping"
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


def test_the_final_model_is_written_without_the_lock(tmp_path, clock, monkeypatch):
    service = opened(tmp_path / "run", clock, arrivals=1)
    hand, other = Hand(service, "m"), Hand(service, "other")
    hand.work(1)
    with slow_writes(monkeypatch) as began:
        asking, paths = in_thread(lambda: service.rounds.final(hand.ticket))
        assert began.wait(LIMIT_S)
        assert_free(service)
        asking_too, more_paths = in_thread(lambda: service.rounds.final(other.ticket))
    asking.join(LIMIT_S)
    asking_too.join(LIMIT_S)
    assert paths == more_paths and paths[0].is_file()
    service.close()


def test_a_model_that_a_machine_brings_is_written_without_the_lock(tmp_path, clock, monkeypatch):
    """1. A machine commits its model. 2. While the run is made from it, others join, and a repeated commit and another model are
    told to ask again. 3. The run begins."""
    service, first, commit = without_model(tmp_path / "run", clock)
    second = joined(service, "other")
    with slow_fsync(monkeypatch) as began:
        committing, _ = in_thread(lambda: service.models.commit(first, commit))
        assert began.wait(LIMIT_S)
        assert_free(service)
        refuses(RefusalCode.BUSY, service.models.commit, first, commit)
        refuses(RefusalCode.BUSY, service.models.upload, second, Layout.from_tensors(model()))
        assert isinstance(service.next(second), Wait)
    committing.join(LIMIT_S)
    service.models.commit(first, commit)  # the run has its model: nothing happens
    assert not isinstance(service.next(second), Wait)
    service.close()


def test_a_run_that_is_stopped_while_it_gets_its_model_begins_with_it_later(tmp_path, clock, monkeypatch):
    service, first, commit = without_model(tmp_path / "run", clock)
    with slow_fsync(monkeypatch) as began:
        committing, answers = in_thread(lambda: refuses(RefusalCode.ENDED, service.models.commit, first, commit))
        assert began.wait(LIMIT_S)
        service.admin.stop("enough")
    committing.join(LIMIT_S)
    assert len(answers) == 1
    service.close()
    again = external_run(config(), tmp_path / "run", clock=clock)
    assert again.state.run is not None
    again.close()


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
