"""Returning a run to an earlier point of its journal, with and without what came after it."""

import shutil

import pytest
import torch

import heloco
from heloco.cluster.server.open_run import rebuild
from heloco.cluster.server.replay import replay
from heloco.cluster.server.rollback import Rollback
from heloco.errors import UserError
from heloco.records.journal_reader import FOLDER, segments
from heloco.run import RunFolder
from support.runs import digests, tape
from support.small_cluster import Clock, Hand, delta, model, opened

OPTIONS = {"arrivals": 100, "checkpoint_every": 4}


@pytest.fixture
def run(tmp_path):
    """18 arrivals of three machines in turn; the folder, the machines, and the digest after each arrival."""
    clock = Clock()
    service = opened(tmp_path / "run", clock, **OPTIONS)
    hands = [Hand(service, f"m{i}") for i in range(3)]
    after = [service.state.run.digest()]
    for seed in range(18):
        clock.now += 1.0
        hands[seed % 3].work(seed)
        after.append(service.state.run.digest())
        service.housekeeping.save_if_due(wait=True)
    hands[0].take()
    service.close()
    return tmp_path / "run", hands, after


def roll_back(folder, **options):
    opened_folder = RunFolder.open(folder)
    return Rollback(opened_folder, **options).run(lambda new: rebuild(new, opened_folder, None))


def test_a_machine_is_left_out_by_its_name_and_a_wrong_name_is_refused(run):
    folder, hands, _ = run
    before = digests(folder)
    with pytest.raises(UserError, match=f"'m7' never joined this run: give one of .*{hands[1].id}"):
        roll_back(folder, to=15, without=frozenset({"m7"}))
    assert digests(folder) == before
    rollback = roll_back(folder, to=15, without=frozenset({"m1"}))
    assert (rollback.machines, rollback.left_out, rollback.arrivals) == ((hands[1].id,), 1, 17)


def check_goes_on(folder, arrivals):
    service = opened(folder, **OPTIONS)
    assert service.state.run.synchronizer.arrivals == arrivals and not service.state.run.synchronizer.rounds_under_way
    assert Hand(service, "new").work(1000).arrival == arrivals + 1
    digest = service.state.run.digest()
    service.close()
    replayed = replay(RunFolder.open(folder), None)
    assert (replayed.difference, replayed.digest) == (None, digest)
    return replayed


@pytest.mark.parametrize("to", [0, 1, 4, 7, 15, 16, 17, 18])
def test_returning_to_an_arrival_gives_the_run_as_it_was_then(run, to):
    folder, _, after = run
    before, whole_tape = digests(folder), tape(folder)
    rollback = roll_back(folder, to=to)
    assert rollback.arrivals == to
    assert tape(folder) == whole_tape[:to]
    assert digests(rollback.old_folder) == before  # the old one is kept as it was
    service = opened(folder, **OPTIONS)
    assert service.state.run.digest() == after[to]
    service.close()
    assert check_goes_on(folder, to).begun_at == 0


def test_without_a_machine_the_others_contributions_stay(run):
    """The rule by hand: everything up to the arrival, then all but those of the machine."""
    folder, hands, _ = run
    lines = tape(folder)
    rollback = roll_back(folder, to=5, without=frozenset({hands[1].id}))
    expected_lines = [line for i, line in enumerate(lines) if i < 5 or line["machine"] != hands[1].id]
    assert (rollback.arrivals, rollback.left_out) == (len(expected_lines), 18 - len(expected_lines))
    new_lines = tape(folder)
    assert [(line["worker"], line["round"], line["machine"]) for line in new_lines] == [
        (line["worker"], line["round"], line["machine"]) for line in expected_lines
    ]
    parameters = [torch.nn.Parameter(model()[f"parameter.{i}"].clone()) for i in range(2)]
    outer = heloco.METHODS["heloco-ramp"].build(parameters, workers=3)
    for line, old_line in zip(new_lines, expected_lines, strict=True):
        seed = lines.index(old_line)
        tensors = delta(seed)
        outer.step(weight=line["weight"], pseudo_gradients=[tensors["pseudo_gradient.0"], tensors["pseudo_gradient.1"]])
    service = opened(folder, **OPTIONS)
    served = service.state.run.synchronizer.parameters
    assert all(torch.equal(a, b) for a, b in zip(served, parameters, strict=True))
    assert service.state.book.get(hands[1].id).barred_because == "its contributions were left out"
    service.close()
    check_goes_on(folder, rollback.arrivals)


def test_what_is_left_of_a_damaged_journal_can_be_returned_to(run):
    folder, _, after = run
    [(_, path)] = segments(folder / FOLDER)
    content = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(content[:-6]))
    with pytest.raises(UserError, match=f"heloco rollback {folder}"):
        opened(folder, **OPTIONS)
    rollback = roll_back(folder)
    assert 16 <= rollback.arrivals < 18
    service = opened(folder, **OPTIONS)
    assert service.state.run.digest() == after[rollback.arrivals]
    service.close()
    check_goes_on(folder, rollback.arrivals)


def test_a_run_whose_journal_is_gone_returns_to_its_last_checkpoint(run):
    folder, _, after = run
    shutil.rmtree(folder / FOLDER)
    with pytest.raises(UserError, match=f"heloco rollback {folder}"):
        opened(folder, **OPTIONS)
    assert roll_back(folder).arrivals == 16
    service = opened(folder, **OPTIONS)
    assert service.state.run.digest() == after[16]
    service.close()


def test_what_cannot_be_returned_to_is_said_and_changes_nothing(run):
    folder, _, _ = run
    before = digests(folder)
    with pytest.raises(UserError, match="stands at arrival 18 only"):
        roll_back(folder, to=19)
    assert digests(folder) == before
    service = opened(folder, **OPTIONS)
    with pytest.raises(UserError, match="Another process is writing"):
        roll_back(folder, to=3)
    service.close()


def test_twice_in_a_row_both_old_ones_are_kept(run):
    folder, _, after = run
    first, second = roll_back(folder, to=12), roll_back(folder, to=3)
    assert first.old_folder != second.old_folder and first.old_folder.exists() and second.old_folder.exists()
    service = opened(folder, **OPTIONS)
    assert service.state.run.digest() == after[3]
    service.close()
