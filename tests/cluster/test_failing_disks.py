"""Nothing that was acknowledged is lost when disks fail: failing fsyncs, power cuts, small and thin disks."""

import contextlib
import errno
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heloco.cluster.protocol.messages import Assignment
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.disk import NotDurable
from heloco.records.journal_reader import FOLDER, contribution_numbers
from support.disks import fill_disk
from support.durability import check_account
from support.small_cluster import NO_DIGEST, Clock, Hand, delta, opened, report

# ---- an fsync that fails


class Disk:
    """Counts fsyncs, lets one of them fail, and knows what is durable of each file. A file is known by its inode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_at: int = 0, error: int = errno.ENOSPC) -> None:
        self.calls, self.fails_at, self.error = 0, fails_at, error
        self.durable: dict[int, bytes] = {}
        self._fsync = os.fsync
        monkeypatch.setattr("heloco.disk.os.fsync", self.fsync)

    def fsync(self, file: int) -> None:
        self.calls += 1
        if self.calls == self.fails_at:
            raise OSError(self.error, os.strerror(self.error))
        about = os.fstat(file)
        path = Path(f"/proc/self/fd/{file}").resolve()
        if path.is_file():
            self.durable[about.st_ino] = path.read_bytes()

    def cut_power(self, folder: Path, draw: random.Random) -> None:
        """Of what is not durable of each file, as much is there as chance will have it: a part, zeros, or nothing."""
        for path in sorted(folder.rglob("*")):
            if not path.is_file():
                continue
            now, durable = path.read_bytes(), self.durable.get(path.stat().st_ino, b"")
            if now == durable:
                continue
            if now.startswith(durable):
                size = draw.randrange(len(durable), len(now) + 1)
                path.write_bytes(now[:size] + bytes(draw.choice([0, len(now) - size])))
            else:
                path.write_bytes(draw.choice([now, durable, now[: len(now) // 2] + bytes(len(now) - len(now) // 2)]))


def work_until_it_stops(folder: Path, arrivals: int = 6, **options) -> tuple[list, bool]:
    """Acknowledgements that a machine got, and whether the service failed on the way."""
    acks = []
    with contextlib.ExitStack() as stack:
        try:
            service = opened(folder, checkpoint_every=2, **options)
        except (NotDurable, Refused):
            return acks, True
        stack.callback(service.close)
        try:
            hand = Hand(service, "m")
            for seed in range(arrivals):
                hand.take()
                acks.append(hand.hand_in(delta(seed)))
                service.housekeeping.save_if_due(wait=True)
                if service.state.has_failed:
                    break
        except Refused as error:
            assert service.state.has_failed, error
        if service.state.has_failed:
            for ask in (hand.take, lambda: hand.hand_in(delta(99)), lambda: commit_again(hand)):
                with pytest.raises(Refused) as refused:
                    ask()
                assert refused.value.code is RefusalCode.AWAY  # nothing more is acknowledged
            return acks, True
    return acks, False


def commit_again(hand):
    return hand.service.contributions.commit(hand.ticket, hand.key, NO_DIGEST, report())


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(errno.ENOSPC, id="ENOSPC"),
        pytest.param(errno.EDQUOT, id="EDQUOT", marks=pytest.mark.long),
        pytest.param(errno.EIO, id="EIO", marks=pytest.mark.long),
    ],
)
def test_an_fsync_that_fails_at_any_call_ends_the_process_and_loses_nothing(tmp_path, monkeypatch, error):
    """The process stops, and what never became durable is gone from the disk; a restart goes on from what is really there."""
    for fails_at in range(1, 200):
        folder = tmp_path / str(fails_at)
        with monkeypatch.context() as patch:
            disk = Disk(patch, fails_at, error)
            acks, failed = work_until_it_stops(folder)
        assert failed == (disk.calls >= fails_at)
        if (folder / "config.toml").exists() and list((folder / "checkpoints").glob("arrival-*")):
            disk.cut_power(folder / "journal", random.Random(fails_at))
            check_account(folder, acks, checkpoint_every=2)
        shutil.rmtree(folder)
        if not failed:
            assert fails_at > 20 and len(acks) == 6
            return
    raise AssertionError("it never went well")


def test_a_power_cut_may_keep_the_line_of_a_contribution_whose_tensors_are_lost(tmp_path, monkeypatch):
    """The system writes files to disk in any order until they are durable. Nobody was told that this one is."""
    folder, acks = tmp_path / "run", []
    service = opened(folder)
    hand = Hand(service, "m")
    acks += [hand.work(seed) for seed in range(3)]
    hand.take()
    with monkeypatch.context() as patch:
        Disk(patch, fails_at=1)
        with pytest.raises(Refused):
            hand.hand_in(delta(3))
    service.close()
    last = max(folder.glob("journal/*.safetensors"))
    last.write_bytes(last.read_bytes()[:100])
    check_account(folder, acks)


def test_a_failed_fsync_is_never_answered_from_memory(tmp_path, monkeypatch):
    service = opened(tmp_path / "run")
    hand = Hand(service, "m")
    hand.work(0)
    hand.take()
    with monkeypatch.context() as patch:
        disk = Disk(patch)
        disk.fails_at = disk.calls + 1
        with pytest.raises(Refused) as refused:
            hand.hand_in(delta(1))
    assert refused.value.code is RefusalCode.AWAY and service.state.ended.kind == "failed"
    assert "could not be made durable (No space left on device)" in service.state.ended.text
    with pytest.raises(Refused) as refused:
        hand.hand_in(delta(1))
    assert refused.value.code is RefusalCode.AWAY
    service.close()
    service = opened(tmp_path / "run")
    hand.service = service
    hand.join()
    assert hand.hand_in(delta(1)).arrival == 2
    service.close()


# ---- power cuts

STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["work", "work", "take", "abandon", "save"])), min_size=3, max_size=15
)


@settings(max_examples=40)
@given(steps=STEPS, seed=st.integers(0, 10**6))
def test_a_power_cut_at_any_moment_loses_nothing_that_was_acknowledged(tmp_path_factory, steps, seed):
    folder, clock, acks = tmp_path_factory.mktemp("runs") / "run", Clock(), []
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(patch)
        service = opened(folder, clock, checkpoint_every=0)
        hands = [Hand(service, f"m{i}") for i in range(3)]
        for who, what in steps:
            clock.now += 100.0
            if what == "save":
                service.admin.stop("saved")
                break
            if not isinstance(hands[who].take(), Assignment):
                continue
            if what == "work":
                acks.append(hands[who].hand_in(delta(len(acks))))
            elif what == "abandon":
                hands[who].abandon()
        service.state.run.close()
        disk.cut_power(folder, random.Random(seed))
    check_account(folder, acks, checkpoint_every=0)


# ---- small and thin disks


def test_a_run_on_a_small_disk_that_fills_again_and_again(small_disk):
    options = {"arrivals": 1000, "checkpoint_every": 5}
    service = opened(small_disk / "run", **options)
    hand, acks, refusals = Hand(service, "m"), [], 0
    draw = random.Random(3)
    for seed in range(60):
        if seed % 3 == 0:
            fill_disk(small_disk / "ballast", room=draw.randrange(0, 20_000))
        try:
            if isinstance(hand.take(), Assignment):
                acks.append(hand.hand_in(delta(1000 * hand.key.worker + hand.key.round)))
        except Refused as refused:
            assert refused.code is RefusalCode.DISK, refused
            refusals += 1
        service.housekeeping.tick()
        (small_disk / "ballast").unlink(missing_ok=True)
    assert refusals and len(acks) > 20 and not service.state.has_failed
    service.close()
    check_account(small_disk / "run", acks, **options)


def test_a_journal_that_fills_the_disk_is_pruned_before_the_run_pauses(small_disk):
    """Contributions that a checkpoint stands for need not be kept: when nobody makes room, they go, and the run goes on."""
    clock = Clock()
    service = opened(small_disk / "run", clock, arrivals=100_000, checkpoint_every=5, journal_gb=1.0)
    hand = Hand(service, "m")
    for seed in range(60):
        hand.work(seed)
        service.housekeeping.tick()
    numbers = contribution_numbers(small_disk / "run" / FOLDER)
    fill_disk(small_disk / "ballast", room=0)
    for second in range(40):
        clock.now += 1.0
        hand.beat()
        service.housekeeping.tick()
        if second < 30:
            assert service.state.paused.kind == "space"
            assert contribution_numbers(small_disk / "run" / FOLDER) == numbers
    for _ in range(100_000):  # files are removed in the background
        clock.now += 1e-6
        service.housekeeping.tick()
        if service.state.paused is None:
            break
    assert service.state.paused is None and len(contribution_numbers(small_disk / "run" / FOLDER)) < len(numbers)
    assert hand.work(99).verdict == "applied"
    (small_disk / "ballast").unlink()
    service.close()


@pytest.fixture
def thin_disk(tmp_path):
    """A file system on a disk that promises more than it has: writes go well, and fsync fails when it is full."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("losetup", "mkfs.ext4", "mount", "umount"))):
        pytest.skip("only root can make a thin disk, with losetup and mkfs.ext4")
    backing, mounted = tmp_path / "backing", tmp_path / "thin"
    backing.mkdir()
    mounted.mkdir()
    undo = []

    def do(*command, undo_with=None):
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True)
        if result.returncode:
            for step in reversed(undo):
                subprocess.run(step, capture_output=True)
            pytest.skip(f"a thin disk cannot be made here: {result.stderr.strip()[:200]}")
        if undo_with:
            undo.append(list(map(str, undo_with)))
        return result.stdout.strip()

    do("mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", backing, undo_with=("umount", backing))
    image = backing / "image"
    with image.open("wb") as file:
        file.truncate(256 << 20)
    device = do("losetup", "--find", "--show", image)
    undo.append(["losetup", "--detach", device])
    do("mkfs.ext4", "-q", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard", device)
    do("mount", device, mounted, undo_with=("umount", mounted))
    yield mounted
    for step in reversed(undo):
        subprocess.run(step, capture_output=True)


def test_on_a_thin_disk_that_runs_out_the_run_stops_and_goes_on_later(thin_disk, tmp_path):
    """The disk takes every write and loses some. What was acknowledged is there when the disk is given more room."""
    run, acks, failed = thin_disk / "run", [], False
    service = opened(run, arrivals=10_000, checkpoint_every=10)
    hand = Hand(service, "m")
    with (thin_disk / "ballast").open("wb") as ballast:
        for seed in range(400):
            with contextlib.suppress(OSError):
                ballast.write(os.urandom(1 << 19))
                ballast.flush()
            try:
                hand.take()
                acks.append(hand.hand_in(delta(seed)))
                service.housekeeping.save_if_due(wait=True)
            except (Refused, NotDurable) as error:
                failed = service.state.has_failed
                assert failed or (isinstance(error, Refused) and error.code is RefusalCode.DISK), error
                if failed:
                    break
    service.close()
    if not failed:
        pytest.skip("this system's thin disk never failed")
    rescued = tmp_path / "rescued"
    shutil.copytree(run, rescued)
    check_account(rescued, acks, arrivals=10_000, checkpoint_every=10)
