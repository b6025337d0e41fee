"""Nothing that was acknowledged is lost: failing fsyncs, power cuts, thin disks, damaged and missing files."""

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
from heloco.cluster.protocol.refusals import Code, Refused
from heloco.cluster.server.replay import replay
from heloco.disk import NotDurable
from heloco.errors import UserError
from heloco.records.journal_reader import FOLDER, contribution_numbers, segments
from heloco.run import RunFolder
from support.disks import fill_disk
from support.runs import lines, tape
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
                assert refused.value.code is Code.AWAY  # nothing more is acknowledged
            return acks, True
    return acks, False


def commit_again(hand):
    return hand.service.contributions.commit(hand.ticket, hand.key, NO_DIGEST, report())


def check_account(folder: Path, acks: list, **options) -> None:
    """Every acknowledged contribution counts, once, and the journal gives the same again."""
    service = opened(folder, **options)
    on_tape = [(line["worker"], line["round"], line["version"], line["arrival"], line["outer_step"]) for line in tape(folder)]
    assert on_tape[: len(acks)] == [(a.worker, a.round, a.version, a.arrival, a.outer_step) for a in acks]
    assert len(on_tape) <= len(acks) + 1  # one more may be durable without an answer
    hand = Hand(service, "another")
    assert hand.work(1000).arrival == len(on_tape) + 1
    digest = service.state.run.digest()
    service.close()
    replayed = replay(RunFolder.open(folder), None)
    assert (replayed.difference, replayed.digest) == ("", digest)
    assert replayed.begun_at + replayed.lines == len(on_tape) + 1


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO], ids=["ENOSPC", "EDQUOT", "EIO"])
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
    assert refused.value.code is Code.AWAY and service.state.ended.kind == "failed"
    assert "could not be made durable (No space left on device)" in service.state.ended.text
    with pytest.raises(Refused) as refused:
        hand.hand_in(delta(1))
    assert refused.value.code is Code.AWAY
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
            assert refused.code is Code.DISK, refused
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
                assert failed or (isinstance(error, Refused) and error.code is Code.DISK), error
                if failed:
                    break
    service.close()
    if not failed:
        pytest.skip("this system's thin disk never failed")
    rescued = tmp_path / "rescued"
    shutil.copytree(run, rescued)
    check_account(rescued, acks, arrivals=10_000, checkpoint_every=10)


# ---- files that are damaged or missing, or not ours


def stopped_run(folder: Path) -> tuple[str, list]:
    """A run with 14 arrivals, checkpoints at 4, 8 and 12 of which two are kept, killed with a round under way."""
    service = opened(folder, checkpoint_every=4, arrivals=100)
    hand, acks = Hand(service, "m"), []
    for seed in range(14):
        hand.take()
        acks.append(hand.hand_in(delta(seed)))
        service.housekeeping.save_if_due(wait=True)
    hand.take()
    digest = service.state.run.digest()
    service.close()
    return digest, acks


def newest(folder):
    return sorted((folder / "checkpoints").glob("arrival-*"))[-1]


def cut(path, share=0.5):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])


def flip(path, share=0.5):
    content = bytearray(path.read_bytes())
    content[int(len(content) * share)] ^= 4
    path.write_bytes(bytes(content))


def zero(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] + bytes(path.stat().st_size // 2))


def start_file(folder):
    [path] = (folder / "rounds").glob("*.safetensors")
    return path


MADE_AGAIN = {
    "newest checkpoint: tensors flipped": lambda r: flip(newest(r) / "tensors.safetensors"),
    "newest checkpoint: state flipped": lambda r: flip(newest(r) / "state.json"),
    "newest checkpoint: state cut": lambda r: cut(newest(r) / "state.json"),
    "newest checkpoint: sums gone": lambda r: (newest(r) / "SHA256SUMS").unlink(),
    "newest checkpoint: sums rubbish": lambda r: (newest(r) / "SHA256SUMS").write_bytes(b"\xff\x00"),
    "newest checkpoint: tensors gone": lambda r: (newest(r) / "tensors.safetensors").unlink(),
    "newest checkpoint gone": lambda r: shutil.rmtree(newest(r)),
    "an empty newer checkpoint": lambda r: (r / "checkpoints" / "arrival-00009999").mkdir(),
    "tape gone": lambda r: (r / "tape.jsonl").unlink(),
    "tape cut": lambda r: cut(r / "tape.jsonl"),
    "tape: zeros at the end": lambda r: (r / "tape.jsonl").write_bytes((r / "tape.jsonl").read_bytes() + bytes(300)),
    "tape: rubbish lines at the end": lambda r: (r / "tape.jsonl").write_bytes((r / "tape.jsonl").read_bytes() + b"x\ny\n"),
    "starts gone": lambda r: shutil.rmtree(r / "rounds"),
    "start cut to nothing": lambda r: start_file(r).write_bytes(b""),
    "half of the start zeroed": lambda r: zero(start_file(r)),
    "start flipped": lambda r: flip(start_file(r), 0.9),
    "a folder among the starts": lambda r: (r / "rounds" / "x.safetensors").mkdir(),
    "a folder in the journal": lambda r: (r / "journal" / "x.safetensors").mkdir(),
    "uploads gone": lambda r: shutil.rmtree(r / "incoming"),
    "run-id empty": lambda r: (r / "run-id").write_text(""),
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped") / "run"
    digest, acks = stopped_run(folder)
    return folder, digest, acks


@pytest.mark.parametrize("damage", MADE_AGAIN.values(), ids=MADE_AGAIN)
def test_what_can_be_made_again_is_made_again(stopped, tmp_path, damage):
    """Parameters, tape and the start of the round under way are the same as before, to the bit."""
    original, digest, acks = stopped
    folder = tmp_path / "run"
    shutil.copytree(original, folder)
    damage(folder)
    service = opened(folder, checkpoint_every=4, arrivals=100)
    assert service.state.run.digest() == digest
    assert lines(folder / "tape.jsonl") == lines(original / "tape.jsonl")
    [(_, round_under_way)] = service.state.run.synchronizer.held.items()
    assert service.state.starts.path(round_under_way.version).read_bytes() == start_file(original).read_bytes()
    assert Hand(service, "another").work(99).arrival == len(acks) + 1
    service.close()
    assert replay(RunFolder.open(folder), None).difference == ""


REPORTED = {
    "journal gone": (lambda r: shutil.rmtree(r / "journal"), "has lost its events"),
    "events gone": (lambda r: [path.unlink() for _, path in segments(r / FOLDER)], "has lost its events"),
    "events cut": (lambda r: cut(segments(r / FOLDER)[0][1], 0.9), "journal"),
    "an event after the checkpoint flipped": (lambda r: flip(segments(r / FOLDER)[0][1], 0.95), "was edited, or lines before it"),
    "a contribution after the checkpoint flipped": (
        lambda r: flip(sorted((r / FOLDER).glob("*.safetensors"))[-1], 0.9),
        "an acknowledged contribution, was changed",
    ),
    "a contribution after the checkpoint gone": (
        lambda r: sorted((r / FOLDER).glob("*.safetensors"))[-1].unlink(),
        "an acknowledged contribution, is missing or cut",
    ),
    "checkpoints gone": (lambda r: shutil.rmtree(r / "checkpoints"), "has no checkpoint"),
    "rounds is a file": (
        lambda r: (shutil.rmtree(r / "rounds"), (r / "rounds").write_text("x")),
        "is a file, and the run needs a folder there",
    ),
    "run.json gone": (lambda r: (r / "run.json").unlink(), "run.json cannot be read"),
    "run.json cut": (lambda r: cut(r / "run.json"), "run.json cannot be read"),
    "run.json is a list": (lambda r: (r / "run.json").write_text("[]"), "run.json"),
    "run.json: threads is text": (
        lambda r: (r / "run.json").write_text((r / "run.json").read_text().replace('"threads": ', '"threads": "x", "t": ')),
        "run.json was edited at threads (Expected `int`, got `str`",
    ),
    "config.toml cut": (lambda r: cut(r / "config.toml"), "config"),
    "config.toml is zeros": (lambda r: (r / "config.toml").write_bytes(bytes(500)), "config.toml"),
}


@pytest.mark.parametrize(("damage", "sentence"), REPORTED.values(), ids=REPORTED)
def test_what_cannot_be_made_again_is_reported_by_name_with_a_remedy(stopped, tmp_path, damage, sentence):
    from heloco.cluster.server.process import ServeSpec, open_service

    folder = tmp_path / "run"
    shutil.copytree(stopped[0], folder)
    damage(folder)
    with pytest.raises(UserError) as refused:
        open_service(ServeSpec(str(folder)))
    text = str(refused.value)
    assert sentence in text and "\n" not in text
    assert any(word in text.lower() for word in ("restore", "rollback", "move it away", "fix", "check"))


def test_what_happens_before_a_checkpoint_needs_nothing_of_the_journal(stopped, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(stopped[0], folder)
    flip(segments(folder / FOLDER)[0][1], 0.2)
    for path in sorted((folder / FOLDER).glob("*.safetensors"))[:3]:
        path.unlink()
    service = opened(folder, checkpoint_every=4, arrivals=100)
    assert service.state.run.digest() == stopped[1]
    service.close()


def test_a_journal_that_is_removed_while_the_run_goes_on_is_put_back(tmp_path):
    service = opened(tmp_path / "run", arrivals=100)
    hand = Hand(service, "m")
    acks = []
    for seed in range(9):
        hand.take()
        if seed == 5:
            segments(tmp_path / "run" / FOLDER)[0][1].unlink()
        acks.append(hand.hand_in(delta(seed)))
    service.close()
    check_account(tmp_path / "run", acks, arrivals=100)


def test_a_journal_that_is_cut_while_the_run_goes_on_stops_it_and_nothing_is_lost(tmp_path):
    """What was acknowledged is in memory: it is saved in a checkpoint before the process stops."""
    service = opened(tmp_path / "run", arrivals=100, checkpoint_every=0)
    hand = Hand(service, "m")
    acks = [hand.work(seed) for seed in range(5)]
    hand.take()
    os.truncate(segments(tmp_path / "run" / FOLDER)[0][1], 300)
    with pytest.raises(Refused) as refused:
        hand.hand_in(delta(5))
    assert refused.value.code is Code.AWAY and "was changed by another process" in service.state.ended.text
    service.close()
    service = opened(tmp_path / "run", arrivals=100, checkpoint_every=0)
    assert service.state.run.synchronizer.arrivals == len(acks)
    assert Hand(service, "another").work(7).arrival == 6
    service.close()
