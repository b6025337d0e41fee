"""Files of a run that are damaged or missing, or not ours: made again where that is possible, else reported with the remedy."""

import os
import shutil
from pathlib import Path

import pytest

from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.server.replay import replay
from heloco.errors import UserError
from heloco.records.journal_reader import FOLDER, segments
from heloco.run import RunFolder
from support.durability import check_account
from support.runs import lines
from support.small_cluster import Hand, delta, opened


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
    [(_, round_under_way)] = service.state.run.synchronizer.rounds_under_way.items()
    assert service.state.starts.path(round_under_way.version).read_bytes() == start_file(original).read_bytes()
    assert Hand(service, "another").work(99).arrival == len(acks) + 1
    service.close()
    assert replay(RunFolder.open(folder), None).difference is None


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
    assert refused.value.code is RefusalCode.AWAY and "was changed by another process" in service.state.ended.text
    service.close()
    service = opened(tmp_path / "run", arrivals=100, checkpoint_every=0)
    assert service.state.run.synchronizer.arrivals == len(acks)
    assert Hand(service, "another").work(7).arrival == 6
    service.close()
