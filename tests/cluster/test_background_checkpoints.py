"""Checkpoints of a served run: they hold up nobody, are of their own arrival, and can be made later."""

import errno
import json
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.server.replay import replay
from heloco.run import RunFolder, checkpoint
from heloco.run.checkpoint import CheckpointState
from support.scored_runs import contribute, served, task


def test_a_checkpoint_holds_up_nobody_and_is_of_its_own_arrival(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    service = served(folder, task(), eval_every=0, checkpoint_every=4)
    contribute(service, 4)
    may_go_on, began, fsync = threading.Event(), threading.Event(), os.fsync

    def slow_fsync(file: int) -> None:
        if "checkpoints" in str(Path(f"/proc/self/fd/{file}").readlink()):
            began.set()
            assert may_go_on.wait(60)
        fsync(file)

    monkeypatch.setattr("heloco.disk.os.fsync", slow_fsync)
    service.housekeeping.tick()
    assert began.wait(60)
    contribute(service, 3, 4)
    service.housekeeping.tick()
    assert service.admin.status().arrivals == 7
    assert [path.name for path in RunFolder.open(folder).checkpoints()] == ["arrival-00000000"]
    may_go_on.set()
    service.housekeeping.save_if_due(wait=True)
    path = RunFolder.open(folder).checkpoints()[-1]
    assert path.name == "arrival-00000004"
    tape = [json.loads(line) for line in (folder / "tape.jsonl").read_text().splitlines()]
    state, tensors = checkpoint.load(path, CheckpointState)
    run = service.state.run
    run.readers.wait()
    run.synchronizer.load(state.books, tensors)
    assert run.digest() == tape[3]["digest"] and state.lines.tape_bytes == sum(
        len(line) for line in (folder / "tape.jsonl").read_bytes().splitlines(keepends=True)[:4]
    )
    service.close()
    assert replay(RunFolder.open(folder), task()).difference is None


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Nothing can be opened in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_checkpoint_for_which_there_is_no_descriptor_is_made_later(tmp_path, caplog):
    folder = tmp_path / "run"
    service = served(folder, task(), eval_every=0, checkpoint_every=4)
    contribute(service, 4)
    with no_descriptors():
        service.housekeeping.save_if_due(wait=True)
    assert "No checkpoint could be made" in caplog.text and service.state.ended is None
    contribute(service, 1, 4)
    service.housekeeping.save_if_due(wait=True)
    assert RunFolder.open(folder).checkpoints()[-1].name == "arrival-00000005"
    service.close()


def test_a_checkpoint_that_is_written_when_there_is_no_descriptor_left_counts(tmp_path):
    """Then old ones are looked for, and the journal may be pruned: that can be done later, too."""
    folder = tmp_path / "run"
    service = served(folder, task(), eval_every=0, checkpoint_every=4)
    contribute(service, 4)
    service.housekeeping.save_if_due()
    run = service.state.run
    assert run is not None and run.checkpoint_under_way is not None
    run.checkpoint_under_way.result(60)
    with no_descriptors():
        service.housekeeping.save_if_due()
    assert service.state.ended is None and run.saved_at == 4
    contribute(service, 4, 4)
    service.housekeeping.save_if_due(wait=True)
    assert run.saved_at == 8
    service.close()


def test_after_an_fsync_that_failed_no_checkpoint_is_begun(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    service = served(folder, task(), eval_every=0, checkpoint_every=4)
    contribute(service, 4)
    before = RunFolder.open(folder).checkpoints()

    def fail(_: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("heloco.disk.os.fsync", fail)
        service.housekeeping.save_if_due()
        assert service.state.run.checkpoint_under_way.exception(60)
    service.housekeeping.save_if_due(wait=True)
    assert service.state.ended.kind == "failed" and RunFolder.open(folder).checkpoints() == before
    service.close()


def test_a_run_that_cannot_be_stopped_for_lack_of_descriptors_can_be_stopped_later(tmp_path):
    folder = tmp_path / "run"
    service = served(folder, task(), eval_every=0)
    contribute(service, 3)
    with no_descriptors(), pytest.raises(Refused) as refused:
        service.admin.stop("enough")
    assert refused.value.code is RefusalCode.BUSY and service.state.ended is None
    service.admin.stop("enough")
    assert service.state.ended.kind == "stopped" and RunFolder.open(folder).checkpoints()[-1].name == "arrival-00000003"
    service.close()
