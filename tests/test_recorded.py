"""A real run as events: broken off anywhere and taken up again, it is the same to the bit; replayed, it is the same again."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import checkpoints, lines, tape
from heloco.engine.cluster.replay import replay
from heloco.errors import UserError
from heloco.run import RunFolder
from heloco.run.journal import EVENTS, FOLDER, read_events
from small_cluster import Clock, Hand, delta, opened

METHODS = ("heloco-ramp", "mla", "delayed-nesterov", "sync-nesterov")


def story(folder, steps, *, breaks=(), **options):
    """Three machines do what the steps say; at the numbers in `breaks` the service is dropped and opened anew from its folder."""
    clock = Clock()
    service = opened(folder, clock, **options)
    hands = [Hand(service, f"m{i}") for i in range(3)]
    for number, (who, what) in enumerate(steps):
        if service.ended:
            break
        if number in breaks:
            service, hands = again(service, hands, folder, clock, options)
        clock.now += 1.0
        hand = hands[who]
        hand.take()
        if hand.key is None:
            continue
        if what == "work":
            hand.hand_in(delta(1000 * hand.key[0] + hand.key[1]))
        elif what == "abandon":
            service.abandon(hand.machine, "it gave up")
        if number % 3 == 0:
            service.save_if_due()
    service.save_if_due()
    digest = service.recorded.digest()
    service.close()
    return digest


def again(service, hands, folder, clock, options):
    """A kill: what was in memory is gone, and the files' locks with it. Machines come back under the names they had."""
    service.recorded.folder.close()
    service.recorded.journal.close()
    zero_s, service = service._zero_s, opened(folder, clock, **options)
    service._zero_s = zero_s  # as if no time had passed in between: otherwise idle time before the kill would be missing
    for hand in hands:
        hand.service, hand.link.service = service, service
        service.join(hand.name, returning=hand.machine)
    return service, hands


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["work", "work", "work", "take", "abandon"])), min_size=5, max_size=25
)


@settings(max_examples=25, deadline=None)
@given(steps=STEPS, breaks=st.sets(st.integers(1, 24), max_size=4), method=st.sampled_from(METHODS))
def test_broken_off_anywhere_it_is_the_same_run_to_the_bit(steps, breaks, method, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    unbroken = story(folder / "unbroken", steps, method=method)
    broken = story(folder / "broken", steps, breaks=breaks, method=method)
    assert broken == unbroken
    assert without_names(tape(folder / "broken")) == without_names(tape(folder / "unbroken"))


def without_names(told):
    """Machines' ids end in something random."""
    return [{**line, "machine": line["machine"].partition("#")[0]} for line in told]


@settings(max_examples=15, deadline=None)
@given(steps=STEPS, breaks=st.sets(st.integers(1, 24), max_size=3), method=st.sampled_from(METHODS))
def test_a_replay_makes_the_tape_again(steps, breaks, method, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    digest = story(folder, steps, breaks=breaks, method=method)
    found = replay(RunFolder.open(folder), None)
    assert (found.begun_at, found.difference, found.digest) == (0, "", digest)
    assert found.lines == len(tape(folder))


WORK = [(i % 3, "work") for i in range(20)]


def test_what_was_applied_is_what_the_outer_rule_says(tmp_path):
    """The whole run by hand: the rule alone, fed with the contributions in the order of the tape."""
    import heloco
    from small_cluster import model

    story(tmp_path / "run", WORK, method="heloco-ramp")
    parameters = [torch.nn.Parameter(model()[f"parameter.{i}"].clone()) for i in range(2)]
    outer = heloco.METHODS["heloco-ramp"].build(parameters, workers=3)
    for line in tape(tmp_path / "run"):
        tensors = delta(1000 * line["worker"] + line["round"])
        outer.step(weight=line["weight"], pseudo_gradients=[tensors["pseudo_gradient.0"], tensors["pseudo_gradient.1"]])
    service = opened(tmp_path / "run", method="heloco-ramp")
    assert all(torch.equal(a, b) for a, b in zip(service.recorded.synchronizer.parameters, parameters, strict=True))
    service.close()


def test_every_window_is_used_once(tmp_path):
    steps = [(i % 3, "abandon" if i % 4 == 1 else "work") for i in range(40)]
    story(tmp_path / "run", steps, breaks={7, 20}, arrivals=25)
    spans = {}
    for line in tape(tmp_path / "run"):
        spans.setdefault(line["shard"], []).extend(line["spans"])
    for found in spans.values():
        used = [p for first, count in found for p in range(first, first + count)]
        assert len(used) == len(set(used))
        assert sorted(used) == list(range(len(used))) or len(used) >= max(used) + 1 - 4  # one round of 4 may be under way


def test_a_contribution_that_was_acknowledged_and_is_gone_is_told(tmp_path):
    run = tmp_path / "run"
    story(run, WORK[:6], checkpoint_every=0)
    for path in (run / FOLDER).glob("*.safetensors"):
        damaged = tmp_path / "damaged"
        shutil.copytree(run, damaged)
        (damaged / FOLDER / path.name).write_bytes(path.read_bytes()[:-1])
        with pytest.raises(UserError, match=r"a contribution that was acknowledged, is missing or cut\."):
            opened(damaged, checkpoint_every=0)
        flipped = bytearray(path.read_bytes())
        flipped[-1] ^= 1
        (damaged / FOLDER / path.name).write_bytes(bytes(flipped))
        with pytest.raises(UserError, match="a contribution that was acknowledged, was changed"):
            opened(damaged, checkpoint_every=0)
        shutil.rmtree(damaged)


def test_a_journal_that_ends_before_the_tape_is_told(tmp_path):
    run = tmp_path / "run"
    story(run, WORK[:6], checkpoint_every=0)
    events = run / FOLDER / EVENTS
    events.write_bytes(b"".join(events.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(UserError, match=r"journal is cut short: the tape has 6 lines and the journal reaches to 5"):
        opened(run, checkpoint_every=0)


def test_tensors_over_the_budget_go_and_a_replay_begins_at_the_oldest_checkpoint(tmp_path):
    run = tmp_path / "run"
    digest = story(run, WORK, journal_gb=1e-6, arrivals=20)
    assert [path.name for path in checkpoints(run)] == ["arrival-00000016", "arrival-00000020"]
    found = replay(RunFolder.open(run), None)
    assert (found.begun_at, found.lines, found.difference, found.digest) == (16, 4, "", digest)


def test_without_a_budget_the_first_checkpoint_stays(tmp_path):
    story(tmp_path / "run", WORK, arrivals=20)
    assert [path.name[-2:] for path in checkpoints(tmp_path / "run")] == ["00", "16", "20"]


def test_a_replay_of_an_edited_tape_says_where(tmp_path):
    run = tmp_path / "run"
    story(run, WORK[:8])
    path = run / "tape.jsonl"
    told = lines(path)
    path.write_text(path.read_text().replace(told[3]["digest"], "0" * 16))
    assert replay(RunFolder.open(run), None).difference.startswith("arrival 4: digest was '0000000000000000' and is")


def test_the_journal_has_the_whole_story(tmp_path):
    story(tmp_path / "run", [(0, "work"), (1, "abandon"), (1, "work")])
    kinds = [event["event"] for event, _, _ in read_events(tmp_path / "run" / FOLDER / EVENTS)]
    counting = [kind for kind in kinds if kind in ("dispatch", "receive", "abandon")]
    assert counting == ["dispatch", "receive", "dispatch", "abandon", "dispatch", "receive"]
