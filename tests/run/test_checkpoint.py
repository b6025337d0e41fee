"""Checkpoints: the newest two, each whole; a damaged one is named, and deleting it goes on from the one before."""

import hashlib
import json
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from heloco.errors import UserError
from heloco.run import checkpoint
from heloco.run.checkpoint import CheckpointState
from support.nursery import Fault
from support.runs import TINY, assert_refused, checkpoints, digests, heloco, outcome
from support.states import state_at

OFTEN = ("--checkpoint-every", "2", "--eval-every", "3")


@pytest.fixture
def broken_off(tmp_path, nursery) -> Path:
    """A run that was killed at its seventh arrival: it has checkpoints of the fourth and the sixth."""
    folder = tmp_path / "run"
    fault = Fault("heloco.run.folder:RunFolder.write_arrival", 7, signal=signal.SIGKILL)
    assert nursery.run("train", *TINY, *OFTEN, "--out", folder, fault=fault).code == -signal.SIGKILL
    assert [path.name for path in checkpoints(folder)] == ["arrival-00000004", "arrival-00000006"]
    return folder


def newest(folder: Path) -> Path:
    return checkpoints(folder)[-1]


# ---- damage


def assert_told_and_remedied(folder: Path, says: str, expected: Path) -> None:
    """Every command that needs the checkpoint names it and the remedy, changes nothing, and the remedy works to the bit."""
    damaged = newest(folder)
    for command in ("resume", "eval", "export"):
        assert_refused(folder, command, folder, says=f"The checkpoint {damaged} {says}")
    assert_refused(folder, "resume", folder, says="or delete the folder arrival-00000006 to go on from arrival-00000004.")
    shutil.rmtree(damaged)
    result = heloco("resume", folder)
    assert result.code == 0, result.err
    assert result.out.startswith(f"Resuming {folder} at arrival 4 of 8.")
    assert digests(folder) == digests(expected)


@pytest.mark.parametrize("remainder", ["nothing", "one byte", "half a header", "half", "all but a byte"])
def test_tensors_cut_short(remainder, broken_off, unbroken):
    path = newest(broken_off) / "tensors.safetensors"
    content = path.read_bytes()
    header = int.from_bytes(content[:8], "little")
    length = {"nothing": 0, "one byte": 1, "half a header": header // 2, "half": len(content) // 2}.get(
        remainder, len(content) - 1
    )
    path.write_bytes(content[:length])
    assert_told_and_remedied(broken_off, "is damaged: its tensors are cut short or edited", unbroken(*OFTEN))


@pytest.mark.parametrize("place", [9, 0.5, -1])
def test_one_bit_of_the_tensors_flipped(place, broken_off, unbroken):
    path = newest(broken_off) / "tensors.safetensors"
    content = bytearray(path.read_bytes())
    content[place if isinstance(place, int) else int(place * len(content))] ^= 1
    path.write_bytes(content)
    assert_told_and_remedied(broken_off, "is damaged: its tensors are cut short or edited", unbroken(*OFTEN))


def test_tensors_of_another_checkpoint(broken_off, unbroken):
    before, last = checkpoints(broken_off)
    shutil.copy(before / "tensors.safetensors", last / "tensors.safetensors")
    assert_told_and_remedied(broken_off, "is damaged: its tensors are cut short or edited", unbroken(*OFTEN))


EDITED = "was edited: its state.json is not the one that SHA256SUMS was written for"


@pytest.mark.parametrize("remainder", [0, 1, 0.5, -1])
def test_state_cut_short(remainder, broken_off, unbroken):
    path = newest(broken_off) / "state.json"
    content = path.read_bytes()
    path.write_bytes(content[: remainder if isinstance(remainder, int) else int(remainder * len(content))])
    assert_told_and_remedied(broken_off, EDITED, unbroken(*OFTEN))


@pytest.mark.parametrize("name", ["units", "evaluated_at", "task_digest", "config_digest"])
def test_one_value_of_the_state_edited(name, broken_off, unbroken):
    path = newest(broken_off) / "state.json"
    state = json.loads(path.read_text())
    state[name] = state[name] + 1 if isinstance(state[name], int) else state[name][::-1]
    path.write_text(json.dumps(state))
    assert_told_and_remedied(broken_off, EDITED, unbroken(*OFTEN))


@pytest.mark.parametrize("content", [b"[]", b"3", b"{}", b'{"books": {}}', b"null", b"\xff\xfe"])
def test_a_state_that_is_something_else(content, broken_off, unbroken):
    (newest(broken_off) / "state.json").write_bytes(content)
    assert_told_and_remedied(broken_off, "", unbroken(*OFTEN))


@pytest.mark.parametrize("name", ["state.json", "tensors.safetensors", "SHA256SUMS"])
def test_a_file_missing(name, broken_off, unbroken):
    (newest(broken_off) / name).unlink()
    assert_told_and_remedied(broken_off, "cannot be read (", unbroken(*OFTEN))


def test_a_checkpoint_of_another_format(broken_off):
    path = newest(broken_off) / "state.json"
    content = path.read_bytes()
    other = json.dumps(json.loads(content) | {"format": 1}).encode()
    path.write_bytes(other)
    sums = path.with_name("SHA256SUMS")
    sums.write_text(sums.read_text().replace(hashlib.sha256(content).hexdigest(), hashlib.sha256(other).hexdigest()))
    assert_refused(broken_off, "resume", broken_off, says="has format 1, this version reads 4")


def test_the_only_checkpoint_damaged(broken_off):
    shutil.rmtree(checkpoints(broken_off)[0])
    (newest(broken_off) / "tensors.safetensors").write_bytes(b"")
    assert_refused(broken_off, "resume", broken_off, says="Restore it, or there is no other: start the run again.")


def test_with_no_checkpoint_left_the_run_begins_again(broken_off, unbroken):
    shutil.rmtree(broken_off / "checkpoints")
    for command in ("eval", "export"):
        says = f"{broken_off} has no checkpoint yet: `heloco resume {broken_off}` starts it."
        assert_refused(broken_off, command, broken_off, says=says)
    assert heloco("resume", broken_off).code == 0
    assert digests(broken_off) == digests(unbroken(*OFTEN))


def test_what_lies_beside_the_checkpoints_is_not_taken_for_one(broken_off, unbroken):
    """A copy that somebody made for safety is neither resumed from nor thrown away."""
    copy = shutil.copytree(newest(broken_off), broken_off / "checkpoints" / "arrival-00000006.bak")
    (broken_off / "checkpoints" / "notes.txt").write_text("mine")
    assert heloco("resume", broken_off).code == 0
    shutil.rmtree(copy)
    (broken_off / "checkpoints" / "notes.txt").unlink()
    assert digests(broken_off) == digests(unbroken(*OFTEN))


# ---- writing


@pytest.mark.parametrize(("every", "arrivals"), [("1", [7, 8]), ("2", [6, 8]), ("3", [6, 8]), ("20", [0, 8]), ("0", [0, 8])])
def test_the_newest_two_are_kept(every, arrivals, unbroken):
    folder = unbroken("--checkpoint-every", every)
    assert [path.name for path in checkpoints(folder)] == [f"arrival-{arrival:08d}" for arrival in arrivals]
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {path.name for path in checkpoints(folder)}


def test_how_often_checkpoints_are_made_changes_nothing_else(unbroken):
    seldom, often = (outcome(unbroken("--checkpoint-every", every)) for every in ("0", "1"))
    for name in ("tape.jsonl", "evals.jsonl", "checkpoints/arrival-00000008/tensors.safetensors"):
        assert seldom[name] == often[name]


def test_a_checkpoint_gives_back_what_was_saved(tmp_path):
    tensors = {
        "a": torch.randn(3, 5), "b": torch.tensor(7), "c": torch.randn(4, 6).T[1:3], "d": torch.zeros(0, 2),
        "e": torch.randn(3, dtype=torch.float64), "f": torch.randn(3).bfloat16(), "g": torch.tensor([True, False]),
        "nan": torch.tensor([float("nan"), float("inf")]),
    }  # fmt: skip
    tensors["shared"] = tensors["a"][1]
    state = state_at(12, outer=[{"number": 1, "factor": 0.1}, {"factor": 1e300}])
    path = checkpoint.save(tmp_path / "checkpoints", state, tensors)
    assert path == tmp_path / "checkpoints" / "arrival-00000012"
    loaded_state, loaded = checkpoint.load(path, CheckpointState)
    assert loaded_state == state
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name].nan_to_num(5), tensor.nan_to_num(5)), name


def test_a_checkpoint_that_cannot_be_finished_leaves_the_ones_before(tmp_path):
    folder = tmp_path / "checkpoints"
    for arrival in (1, 2):
        checkpoint.save(folder, state_at(arrival), {"x": torch.ones(2)})
    before = digests(folder)
    with pytest.raises(TypeError):
        checkpoint.save(folder, state_at(3, outer=[{"not JSON": object()}]), {"x": torch.ones(2)})
    assert digests(folder) == before


def test_what_a_killed_writer_left_is_cleared_away(tmp_path):
    folder = tmp_path / "checkpoints"
    for left_over in (".arrival-00000003", ".arrival-00000001.old"):
        (folder / left_over).mkdir(parents=True)
        (folder / left_over / "tensors.safetensors").write_bytes(b"half")
    checkpoint.save(folder, state_at(3), {"x": torch.ones(2)})
    assert [path.name for path in folder.iterdir()] == ["arrival-00000003"]


def test_the_same_arrival_can_be_saved_again(tmp_path):
    """As a run does that stops after refusals: no arrival has come since the last checkpoint, but the books have changed."""
    folder = tmp_path / "checkpoints"
    for refused in (0, 5):
        checkpoint.save(folder, state_at(8, refused_in_a_row=refused), {"x": torch.full((2,), float(refused))})
    state, tensors = checkpoint.load(folder / "arrival-00000008", CheckpointState)
    assert state.books.refused_in_a_row == 5 and torch.equal(tensors["x"], torch.full((2,), 5.0))
    assert [path.name for path in folder.iterdir()] == ["arrival-00000008"]


def test_a_checkpoint_is_plain_safetensors_and_json(unbroken):
    """Nothing of it is ever unpickled."""
    for path in checkpoints(unbroken(*OFTEN)):
        assert {file.name for file in path.iterdir()} == {"state.json", "tensors.safetensors", "SHA256SUMS"}
        assert json.loads((path / "state.json").read_text())["books"]["arrivals"] == int(path.name.partition("-")[2])
        tensors = load_file(path / "tensors.safetensors")
        sums = dict(line.split("  ")[::-1] for line in (path / "SHA256SUMS").read_text().splitlines())
        assert sums == {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in sums} and len(sums) == 2
        assert {"parameter.0", "outer.0.momentum_buffer"} <= tensors.keys()


def test_a_path_that_is_no_checkpoint_is_named(tmp_path):
    (tmp_path / "arrival-00000001").write_text("a file, not a folder")
    for name in ("arrival-00000001", "arrival-00000002"):
        with pytest.raises(UserError, match=f"The checkpoint .*{name} cannot be read"):
            checkpoint.load(tmp_path / name, CheckpointState)
