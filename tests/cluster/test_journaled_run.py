"""A real run as events: broken off anywhere and taken up again, it is the same to the bit; replayed, it is the same again."""

import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from heloco.books import RoundUnderWay
from heloco.cluster.protocol.messages import Acknowledgement, Assignment
from heloco.cluster.server.checkpoints import ServedState
from heloco.cluster.server.evaluation_queue import EvaluationDue
from heloco.cluster.server.machine_scores import MachineScores
from heloco.cluster.server.replay import replay
from heloco.errors import UserError
from heloco.ledger import ShardPage
from heloco.records.events import Abandon, Dispatch, Receive
from heloco.records.journal_reader import FOLDER, Mark, contribution_numbers, contribution_path, read_events, segments
from heloco.run import RunFolder, checkpoint
from heloco.run.checkpoint import LineSizes
from support.runs import checkpoints, lines, tape
from support.small_cluster import Clock, Hand, delta, opened
from support.states import books_at

METHODS = ("heloco-ramp", "mla", "delayed-nesterov", "sync-nesterov")


def story(folder, steps, *, breaks=(), **options):
    """Three machines do what the steps say; at the numbers in `breaks` the service is opened again from its folder."""
    clock = Clock()
    service = opened(folder, clock, **options)
    hands = [Hand(service, f"m{i}") for i in range(3)]
    for number, (who, what) in enumerate(steps):
        if service.state.ended:
            break
        if number in breaks:
            service = again(service, hands, folder, clock, options)
        clock.now += 1.0
        hand = hands[who]
        if not isinstance(hand.take(), Assignment):
            continue
        if what == "work":
            hand.hand_in(delta(1000 * hand.key.worker + hand.key.round))
        elif what == "abandon":
            hand.abandon()
        if number % 3 == 0:
            service.housekeeping.save_if_due(wait=True)
    service.housekeeping.save_if_due(wait=True)
    digest = service.state.run.digest()
    service.close()
    return digest


def again(service, hands, folder, clock, options):
    """A kill: what was in memory is gone, and the files' locks with it. Machines come back as what they were."""
    before = [service.state.roster.present[hand.id] for hand in hands]
    now_s = service.state.now_s
    service.state.run.close()
    service = opened(folder, clock, **options)
    service.state.set_time(now_s)  # as if no time had passed in between: otherwise idle time before the kill would be missing
    for hand, was in zip(hands, before, strict=True):
        hand.service = service
        hand.join()
        now = service.state.roster.present[hand.id]  # a restart forgives what is not in the journal
        now.rests_until_s, now.asked_s = was.rests_until_s, was.asked_s
    return service


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["work", "work", "work", "take", "abandon"])), min_size=5, max_size=25
)


@settings(max_examples=25)
@given(steps=STEPS, breaks=st.sets(st.integers(1, 24), max_size=4), method=st.sampled_from(METHODS))
def test_broken_off_anywhere_it_is_the_same_run_to_the_bit(steps, breaks, method, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    unbroken = story(folder / "unbroken", steps, method=method)
    broken = story(folder / "broken", steps, breaks=breaks, method=method)
    assert broken == unbroken
    assert without_ids(tape(folder / "broken")) == without_ids(tape(folder / "unbroken"))


def without_ids(tape):
    """Machines' ids end in something random."""
    return [{**line, "machine": line["machine"].partition("#")[0]} for line in tape]


@settings(max_examples=15)
@given(steps=STEPS, breaks=st.sets(st.integers(1, 24), max_size=3), method=st.sampled_from(METHODS))
def test_a_replay_makes_the_tape_again(steps, breaks, method, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    digest = story(folder, steps, breaks=breaks, method=method)
    replayed = replay(RunFolder.open(folder), None)
    assert (replayed.begun_at, replayed.difference, replayed.digest) == (0, None, digest)
    assert replayed.lines == len(tape(folder))


WORK = [(i % 3, "work") for i in range(20)]


def test_what_was_applied_is_what_the_outer_rule_says(tmp_path):
    """The whole run by hand: the rule alone, fed with the contributions in the order of the tape."""
    import heloco
    from support.small_cluster import model

    story(tmp_path / "run", WORK, method="heloco-ramp")
    parameters = [torch.nn.Parameter(model()[f"parameter.{i}"].clone()) for i in range(2)]
    outer = heloco.METHODS["heloco-ramp"].build(parameters, workers=3)
    for line in tape(tmp_path / "run"):
        tensors = delta(1000 * line["worker"] + line["round"])
        outer.step(weight=line["weight"], pseudo_gradients=[tensors["pseudo_gradient.0"], tensors["pseudo_gradient.1"]])
    service = opened(tmp_path / "run", method="heloco-ramp")
    served = service.state.run.synchronizer.parameters
    assert all(torch.equal(a, b) for a, b in zip(served, parameters, strict=True))
    service.close()


def test_every_window_is_used_once(tmp_path):
    """What was used, is under way, or waits to be handed out again is all that was handed out, each window once."""
    steps = [(i % 3, "abandon" if i % 7 == 1 else "work") for i in range(40)]
    story(tmp_path / "run", steps, breaks={7, 20}, arrivals=25)
    service = opened(tmp_path / "run", arrivals=25)
    synchronizer = service.state.run.synchronizer
    for shard, page in enumerate(synchronizer.ledger.pages):
        spans = [span for line in tape(tmp_path / "run") if line["shard"] == shard for span in line["spans"]]
        spans += [
            span
            for round_under_way in synchronizer.rounds_under_way.values()
            if round_under_way.shard == shard
            for span in round_under_way.spans
        ]
        spans += page.returned_spans
        windows = sorted(p for first, count in spans for p in range(first, first + count))
        assert windows == list(range(page.cursor))
    service.close()


def test_tensors_over_the_budget_go_and_a_replay_begins_at_the_oldest_checkpoint(tmp_path):
    run = tmp_path / "run"
    digest = story(run, WORK, journal_gb=1e-6, arrivals=20)
    assert [path.name for path in checkpoints(run)] == ["arrival-00000016", "arrival-00000020"]
    replayed = replay(RunFolder.open(run), None)
    assert (replayed.begun_at, replayed.lines, replayed.difference, replayed.digest) == (16, 4, None, digest)


def test_without_a_budget_the_first_checkpoint_stays(tmp_path):
    story(tmp_path / "run", WORK, arrivals=20)
    assert [path.name[-2:] for path in checkpoints(tmp_path / "run")] == ["00", "16", "20"]


def test_a_replay_of_an_edited_tape_says_where(tmp_path):
    run = tmp_path / "run"
    story(run, WORK[:8])
    path = run / "tape.jsonl"
    path.write_text(path.read_text().replace(lines(path)[3]["digest"], "0" * 16))
    assert replay(RunFolder.open(run), None).difference.startswith("arrival 4: digest was '0000000000000000' and is")


def test_the_journal_has_the_whole_story(tmp_path):
    story(tmp_path / "run", [(0, "work"), (1, "abandon"), (1, "work")])
    events = [event for event, _ in read_events(tmp_path / "run" / FOLDER)]
    kinds = [type(event) for event in events if isinstance(event, Dispatch | Receive | Abandon)]
    assert kinds == [Dispatch, Receive, Dispatch, Abandon, Dispatch, Receive]


# ---- a seal over what is written


@pytest.mark.parametrize("workers", range(1, 131))
def test_states_of_1_to_130_workers_come_back_from_a_checkpoint(tmp_path, workers):
    """Numbers as names are sorted otherwise when they are text: 10 comes before 2."""
    numbers = range(workers)
    rounds = [
        RoundUnderWay(
            worker=n,
            index=n + 1,
            version=n + 2,
            shard=n,
            spans=((n, 2), (n + 5, 1)),
            inner_steps=3,
            shard_steps=n,
            progress=n / 7,
        )
        for n in numbers
    ]
    acks = {
        n: [
            Acknowledgement(
                worker=n, round=n, version=n, verdict="applied", code="", reason="", arrival=n, outer_step=n, staleness=0
            )
        ]
        for n in numbers
    }
    state = ServedState(
        config_digest="c", task_digest="t", lines=LineSizes(tape_bytes=5, evals_bytes=6), units=4,
        books=books_at(
            3, rounds_under_way=rounds, rounds_of=list(numbers), ledger=[ShardPage(n + 1, n, n, n, [(n, 2)]) for n in numbers]
        ),
        journal=Mark(), time_s=1.5, paused=None, evaluations_due=(), started_s={n: n / 7 for n in numbers},
        holders={n: f"m{n}" for n in numbers}, last_machines={}, start_digests=dict.fromkeys(numbers, "d"),
        start_places={n: EvaluationDue(arrival=n, outer_step=n, time_s=n / 7, inner_steps=n, units=n) for n in numbers},
        machine_scores=MachineScores(arrival=3, sources=("a", "b"), measures=("loss",)),
        contributors=[f"m{n}" for n in numbers], machines={}, acks=acks,
    )  # fmt: skip
    path = checkpoint.save(tmp_path / "checkpoints", state, {"parameter.0": torch.arange(workers)})
    loaded, tensors = checkpoint.load(path, ServedState)
    assert loaded == state and list(loaded.started_s) == list(numbers)
    assert torch.equal(tensors["parameter.0"], torch.arange(workers))


def test_runs_of_many_workers_are_taken_up_replayed_and_go_on(tmp_path):
    for workers in (1, 2, 9, 10, 11, 12, 64, 99, 100, 101, 130):
        folder = tmp_path / str(workers)
        service = opened(folder, paces=[1.0] * workers, checkpoint_every=2, arrivals=100)
        hands = [Hand(service, f"m{i}") for i in range(min(workers, 12))]
        for hand in hands:
            hand.take()
        for seed, hand in enumerate(hands[:3]):
            hand.hand_in(delta(seed))
            service.housekeeping.save_if_due(wait=True)
        digest, rounds = service.state.run.digest(), dict(service.state.run.synchronizer.rounds_under_way)
        acks = {worker: list(acks) for worker, acks in service.state.run.acks.items()}
        service.close()
        service = opened(folder, paces=[1.0] * workers, checkpoint_every=2, arrivals=100)
        run = service.state.run
        assert (run.digest(), run.synchronizer.rounds_under_way) == (digest, rounds)
        assert {worker: list(worker_acks) for worker, worker_acks in run.acks.items()} == acks
        assert service.notices == []
        service.close()
        assert replay(RunFolder.open(folder), None).difference is None
        shutil.rmtree(folder)


# ---- damage: what is acknowledged is never lost without a word


def test_an_acknowledged_contribution_that_is_gone_is_reported(tmp_path):
    run = tmp_path / "run"
    story(run, WORK[:6], checkpoint_every=0)
    for number in contribution_numbers(run / FOLDER):
        damaged = tmp_path / "damaged"
        shutil.copytree(run, damaged)
        path = contribution_path(damaged / FOLDER, number)
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        with pytest.raises(UserError, match="an acknowledged contribution, is missing or cut"):
            opened(damaged, checkpoint_every=0)
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(UserError, match="an acknowledged contribution, was changed"):
            opened(damaged, checkpoint_every=0)
        path.unlink()
        with pytest.raises(UserError, match="an acknowledged contribution, is missing or cut"):
            opened(damaged, checkpoint_every=0)
        shutil.rmtree(damaged)


def test_a_journal_that_lost_an_acknowledged_event_is_reported(tmp_path):
    run = tmp_path / "run"
    story(run, WORK[:6], checkpoint_every=0)
    [(_, path)] = segments(run / FOLDER)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(UserError, match="is cut short: it reaches to event"):
        opened(run, checkpoint_every=0)


def test_a_tape_ahead_of_the_journal_is_cut_back(tmp_path):
    """A power cut: the last contribution's line reached the tape, and its event did not reach the journal. Nobody was told that
    it counts, so it does not; its machine hands it in again."""
    service = opened(tmp_path / "run", checkpoint_every=0)
    hand = Hand(service, "m")
    for seed in range(3):
        hand.work(seed)
    hand.take()
    before, digest = (tmp_path / "run" / "tape.jsonl").read_bytes(), service.state.run.digest()
    acknowledged, end = service.state.run.journal.acknowledged, service.state.run.journal.end
    hand.hand_in(delta(3))
    service.close()
    [(base, path)] = segments(tmp_path / "run" / FOLDER)
    path.write_bytes(path.read_bytes()[: end.position - base])
    (tmp_path / "run" / FOLDER / "acknowledged").write_text(f"{acknowledged:020d}\n")
    service = opened(tmp_path / "run", checkpoint_every=0)
    assert (service.state.run.digest(), (tmp_path / "run" / "tape.jsonl").read_bytes()) == (digest, before)
    hand.service = service
    hand.join()
    assert hand.hand_in(delta(3)).arrival == 4
    service.close()
