"""The service around the synchronizer: exactly once, elastic, honest; what is wrong is refused by name and changes nothing."""

import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch

from heloco.cluster.protocol.link import digest_of
from heloco.cluster.protocol.messages import Assignment, Ended, Paused, RoundKey, Ticket, UploadState, Wait
from heloco.cluster.protocol.refusals import Code, Refused
from heloco.cluster.server import contributions as contributions_module
from heloco.cluster.server.administration import STATUS_PATIENCE_S
from heloco.cluster.server.local_link import LocalLink
from heloco.cluster.server.open_run import external_run
from heloco.records.events import Pause, Resume
from heloco.records.journal_reader import FOLDER, contribution_numbers, read_events
from heloco.wire.layout import Layout, pieces
from support.disks import fill_disk
from support.runs import tape
from support.small_cluster import NAMES, NO_DIGEST, Clock, Hand, config, delta, join_request, model, opened, report


@pytest.fixture
def clock():
    return Clock()


def refuses(code, ask, *arguments, **options):
    """The request is refused with that code, and a sentence."""
    with pytest.raises(Refused) as refused:
        ask(*arguments, **options)
    assert refused.value.code == code, refused.value
    assert refused.value.text
    return refused.value


def state(service):
    run = service.state.run
    return run.digest(), run.synchronizer.arrivals, dict(run.synchronizer.held), len(tape(service.state.folder))


# ---- exactly once


def test_a_contribution_that_is_handed_in_again_gets_the_same_answer_and_counts_once(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    hand = Hand(service, "m")
    hand.take()
    key, first = hand.key, hand.hand_in(delta(1))
    after = state(service)
    assert hand.hand_in(delta(1), key) == first
    assert service.contributions.commit(hand.ticket, key, "f" * 32, report()) == first
    assert service.contributions.progress(hand.ticket, key) == UploadState(ack=first)
    assert state(service) == after


def test_the_same_answer_also_after_a_restart_from_the_journal_alone(tmp_path, clock):
    service = opened(tmp_path / "run", clock, checkpoint_every=0)
    hand = Hand(service, "m")
    acks = {}
    for seed in range(5):
        hand.take()
        acks[hand.key] = hand.hand_in(delta(seed))
    after = state(service)
    service.close()
    service = opened(tmp_path / "run", clock, checkpoint_every=0)
    hand = Hand(service, "m", hand.ticket)
    assert state(service) == after
    for key, ack in acks.items():
        assert hand.hand_in(delta(99), key) == ack
    assert state(service) == after
    service.close()


def test_a_machine_that_returns_after_a_restart_hands_in_the_round_it_held(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    hands = [Hand(service, f"m{i}") for i in range(3)]
    for hand in hands:
        hand.take()
    service.close()
    service = opened(tmp_path / "run", clock)
    for i, hand in enumerate(hands):
        hand.service = service
        assert hand.join().seat == i
        assert hand.hand_in(delta(i)).verdict == "applied"
    assert [line["staleness"] for line in tape(tmp_path / "run")] == [0, 1, 2]


def test_a_round_that_is_asked_for_again_is_the_same(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    hand, other = Hand(service, "m"), Hand(service, "other")
    first = hand.take()
    other.work(1)
    assert hand.take() == first
    start = hand.link.fetch(hand.ticket, hand.key, service.state.starts.layout, first.start_digest)
    assert all(torch.equal(start[name], tensor) for name, tensor in model().items())  # of its version, though the run went on


# ---- what is wrong is refused by name


def test_what_is_not_this_machines_round_is_refused(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    hand, other = Hand(service, "m"), Hand(service, "other")
    hand.take()
    other.take()
    before = state(service)
    worker, index, version = hand.key
    refuses(Code.UNKNOWN_MACHINE, service.rounds.next, Ticket(machine="nobody", secret="x"))
    refuses(Code.NOT_HELD, other.hand_in, delta(1), hand.key)
    refuses(Code.NOT_HELD, hand.hand_in, delta(1), RoundKey(worker, index + 1, version))
    refuses(Code.NOT_HELD, hand.hand_in, delta(1), RoundKey(worker, index, -1))
    refuses(Code.NOT_HELD, hand.hand_in, delta(1), RoundKey(99, 0, 0))
    refuses(Code.FUTURE, hand.hand_in, delta(1), RoundKey(worker, index, version + 1))
    refuses(Code.VERSION, service.members.join, join_request("m", version="9.9.9"))
    other_model = Layout.from_tensors({"parameter.0": torch.zeros(2)}).entries
    refuses(Code.LAYOUT, service.members.join, join_request("m", layout=other_model))
    assert state(service) == before


def sent(service, hand, content):
    upload = service.contributions.upload(hand.ticket, hand.key)
    upload.write(upload.begin(upload.size), content)
    return service.contributions.commit(hand.ticket, hand.key, upload.digest(), report())


def content_of(service, tensors):
    return b"".join(pieces(service.state.run.contribution_layout, tensors))


def test_wrong_bodies_are_refused_and_the_right_one_still_counts(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    hand = Hand(service, "m")
    hand.take()
    before, right = state(service), content_of(service, delta(1))
    other = Layout.from_tensors({f"pseudo_gradient.{i}": torch.zeros(3) for i in range(2)})
    refuses(Code.TOO_LONG, sent, service, hand, right + b"x")
    refuses(Code.LAYOUT, sent, service, hand, b"".join(pieces(other, [torch.zeros(3)] * 2)))
    refuses(Code.LAYOUT, sent, service, hand, b"\0" * len(right))
    refuses(Code.INCOMPLETE, sent, service, hand, right[:-1])
    upload = service.contributions.upload(hand.ticket, hand.key)
    refuses(Code.OFFSET, upload.begin, 3)
    upload.write(upload.begin(len(right) - 1), right[-1:])
    refuses(Code.CORRUPTED, service.contributions.commit, hand.ticket, hand.key, NO_DIGEST, report())
    assert upload.size == 0  # it is to be sent again
    assert state(service) == before
    assert sent(service, hand, right).verdict == "applied"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_before_it_is_stored_and_its_data_goes_to_another(tmp_path, clock, value):
    service = opened(tmp_path / "run", clock)
    hand = Hand(service, "m")
    first = hand.take()
    bad = delta(1)
    bad["pseudo_gradient.1"][2] = value
    refuses(Code.NOT_FINITE, hand.hand_in, bad)
    assert not contribution_numbers(service.state.run.journal.folder)
    second_round = hand.take()
    assert (second_round.round, second_round.spans) == (first.round + 1, first.spans)
    assert hand.hand_in(delta(1)).verdict == "applied"


def test_a_machine_whose_contributions_are_always_refused_is_turned_away(tmp_path, clock):
    service = opened(tmp_path / "run", clock, max_refusals=3)
    hand = Hand(service, "m")
    bad = {name: t * math.nan if t.is_floating_point() else t for name, t in delta(1).items()}
    for _ in range(3):
        clock.now += 100.0  # after rounds that came to nothing the next one comes later
        assert isinstance(hand.take(), Assignment)
        refuses(Code.NOT_FINITE, hand.hand_in, bad)
    refuses(Code.BARRED, hand.take)
    refuses(Code.BARRED, hand.join)
    service.close()
    service = opened(tmp_path / "run", clock, max_refusals=3)
    hand.service = service
    refuses(Code.BARRED, hand.join)  # for good


def test_a_norm_far_outside_the_recent_ones_is_refused_or_clipped(tmp_path, clock):
    for policy, verdict in (("refuse", "refused"), ("clip", "applied")):
        service = opened(tmp_path / policy, clock, norm_limit=5.0, norm_policy=policy)
        hand = Hand(service, "m")
        for seed in range(8):
            hand.work(seed)
        hand.take()
        ack = hand.hand_in(delta(1, size=100.0))
        assert ack.verdict == verdict
        line = tape(tmp_path / policy)[-1]
        assert (line["code"], line["reason"]) == ("norm", ack.reason)
        assert ("clipped" in line) == (policy == "clip") and line.get("clipped", 0.0) < 0.01
        assert hand.work(3).verdict == "applied"
        service.close()


def test_transfers_go_on_where_they_were_cut_and_an_old_connection_may_write_no_more(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    hand = Hand(service, "m")
    hand.take()
    content = content_of(service, delta(1))
    upload = service.contributions.upload(hand.ticket, hand.key)
    old = upload.begin(0)
    upload.write(old, content[:50])
    assert service.contributions.progress(hand.ticket, hand.key) == UploadState(size=50)
    new = upload.begin(50)
    upload.write(new, content[50:80])
    refuses(Code.OFFSET, upload.write, old, content[50:])
    upload.write(new, content[80:])
    digest = digest_of(service.state.run.contribution_layout, delta(1))
    assert service.contributions.commit(hand.ticket, hand.key, digest, report()).verdict == "applied"


def test_a_contribution_cannot_change_while_it_is_taken_in(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    hand = Hand(service, "m")
    hand.take()
    upload = service.contributions.upload(hand.ticket, hand.key)
    turn = upload.begin(0)
    upload.write(turn, content_of(service, delta(1)))
    digest = digest_of(service.state.run.contribution_layout, delta(1))
    with upload.sealed():  # as in a commit whose answer was lost
        refuses(Code.BUSY, upload.write, turn, b"x")
        refuses(Code.BUSY, upload.restart)
        refuses(Code.BUSY, service.contributions.commit, hand.ticket, hand.key, digest, report())
    assert service.contributions.commit(hand.ticket, hand.key, digest, report()).verdict == "applied"
    assert len(tape(tmp_path / "run")) == 1


# ---- elastic


def beats(service, clock, hand, steps, every):
    for step in range(1, steps + 1):
        clock.now += every
        hand.beat(step)
        service.housekeeping.tick()


def test_a_machine_is_lost_by_its_own_measure_of_progress(tmp_path, clock):
    service = opened(tmp_path / "run", clock, beat_s=1.0, patience=10.0)
    quick, slow = Hand(service, "quick"), Hand(service, "slow")
    quick.take()
    slow.take()
    for step in range(1, 4):  # the slow one needs half a minute for a step, and beats in between
        for second in range(30):
            clock.now += 1.0
            quick.beat(30 * step + second)
            slow.beat(step - 1)
            service.housekeeping.tick()
        slow.beat(step)
    assert {m.name for m in service.state.roster} == {"quick", "slow"}
    for _ in range(12):  # now neither gets on
        clock.now += 1.0
        service.housekeeping.tick()
    assert {m.name for m in service.state.roster} == {"slow"}
    for _ in range(330):
        clock.now += 1.0
        service.housekeeping.tick()
    assert not list(service.state.roster)
    assert not service.state.run.synchronizer.held


def test_the_shard_of_a_lost_machine_goes_to_another_with_an_exact_cursor(tmp_path, clock):
    service = opened(tmp_path / "run", clock, beat_s=1.0)
    lost, other = Hand(service, "lost"), Hand(service, "other")
    for seed in range(3):
        lost.work(seed)
    lost_round = lost.take()
    for step in range(30):
        clock.now += 1.0
        other.beat(step)
        service.housekeeping.tick()
    refuses(Code.UNKNOWN_MACHINE, lost.hand_in, delta(9))
    assert lost.join().ticket.machine == lost.id
    refuses(Code.NOT_HELD, lost.hand_in, delta(9))  # too late: told so, and a fresh round is to be had
    lost.leave()
    other.take()  # its own worker's, which is behind
    other.hand_in(delta(1))
    rounds = [other.take() for _ in range(1)]
    spans = {answer.worker: answer.spans for answer in rounds}
    while lost_round.worker not in spans:
        other.hand_in(delta(2))
        answer = other.take()
        spans[answer.worker] = answer.spans
    assert spans[lost_round.worker] == lost_round.spans


def test_nobody_is_blamed_for_the_time_in_which_the_service_stood_still(tmp_path, clock):
    service = opened(tmp_path / "run", clock, beat_s=1.0)
    hand = Hand(service, "m")
    hand.take()
    service.housekeeping.tick()
    clock.now += 10_000.0
    service.housekeeping.tick()
    assert hand.hand_in(delta(1)).verdict == "applied"


def test_a_machine_that_waits_for_the_answer_to_its_contribution_is_not_lost(tmp_path, clock, monkeypatch):
    service = opened(tmp_path / "run", clock, beat_s=1.0)
    hand = Hand(service, "m")
    hand.take()
    is_reading, may_go_on, read = threading.Event(), threading.Event(), contributions_module.map_tensors

    def slow_read(*arguments):
        is_reading.set()
        assert may_go_on.wait(60)
        return read(*arguments)

    monkeypatch.setattr(contributions_module, "map_tensors", slow_read)
    with ThreadPoolExecutor(1) as threads:
        handing_in = threads.submit(hand.hand_in, delta(1))
        assert is_reading.wait(60)
        for _ in range(100):
            clock.now += 1.0
            service.housekeeping.tick()
        may_go_on.set()
        assert handing_in.result().verdict == "applied"
    for _ in range(100):  # and afterwards it may be lost like any other
        clock.now += 1.0
        service.housekeeping.tick()
    assert not list(service.state.roster)


def test_one_machine_does_the_rounds_of_all_workers_and_each_gets_its_share(tmp_path, clock):
    service = opened(tmp_path / "run", clock, arrivals=12)
    hand = Hand(service, "m")
    for seed in range(12):
        hand.work(seed)
    assert service.state.run.synchronizer.arrivals_of == [4, 4, 4]
    assert service.state.ended.kind == "finished"


def test_more_machines_than_workers_wait_for_a_seat(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    hands = [Hand(service, f"m{i}") for i in range(4)]
    assert [isinstance(hand.take(), Wait) for hand in hands] == [False, False, False, True]
    hands[1].leave()
    assert hands[3].take().worker == 1


def test_behind_a_barrier_one_machine_serves_all_workers(tmp_path, clock):
    service = opened(tmp_path / "run", clock, method="sync-nesterov", arrivals=6)
    hands = [Hand(service, f"m{i}") for i in range(2)]
    workers = []
    for seed in range(6):
        hand = hands[seed % 2]
        workers.append(hand.take().worker)
        hand.hand_in(delta(seed))
    assert sorted(workers[:3]) == sorted(workers[3:]) == [0, 1, 2]
    assert service.state.run.synchronizer.outer_step == 2


def test_a_machine_too_far_behind_is_told_so_and_gets_a_fresh_round(tmp_path, clock):
    service = opened(tmp_path / "run", clock, drop="skip", drop_above=2)
    slow, quick = Hand(service, "slow"), Hand(service, "quick")
    first = slow.take()
    for seed in range(2):
        quick.work(seed)
    assert not slow.beat(1).too_stale
    quick.work(3)
    assert slow.beat(1).too_stale
    slow.abandon("too stale")
    assert slow.take().version > first.version
    assert service.state.book.get(slow.id).wasted == 0  # it was not its fault


def test_dylu_gives_slow_machines_fewer_steps(tmp_path, clock):
    service = opened(tmp_path / "run", clock, steps="dylu", inner_steps=20)
    quick, slow = Hand(service, "quick"), Hand(service, "slow")
    assert (quick.take().inner_steps, slow.take().inner_steps) == (20, 20)  # nothing was measured yet
    clock.now += 20.0
    quick.hand_in(delta(1))
    clock.now += 60.0
    slow.hand_in(delta(2))
    assert (quick.take().inner_steps, slow.take().inner_steps) == (20, 5)
    assert [round(m.pace_s, 9) for m in service.admin.status().machines] == [1.0, 4.0]


# ---- honest


def test_a_run_without_enough_machines_pauses_and_goes_on_when_they_are_there(tmp_path, clock):
    service = opened(tmp_path / "run", clock, min_workers=2)
    one = Hand(service, "one")
    assert one.take() == Wait(kind="paused", text="1 of at least 2 machines are here")
    two = Hand(service, "two")
    assert isinstance(one.take(), Assignment)
    assert isinstance(two.take(), Assignment)
    two.leave()
    assert one.hand_in(delta(1)).verdict == "applied"  # what is under way still counts
    assert isinstance(one.take(), Wait)
    assert service.admin.status().paused.kind == "machines"


def test_a_pause_that_a_kill_fell_into_ends_when_the_run_goes_on(tmp_path, clock):
    """With a checkpoint behind the pause, and without."""
    for arrivals_before, folder in ((1, "journal"), (4, "checkpoint")):
        service = opened(tmp_path / folder, clock, min_workers=2, participation=100)
        one, two = Hand(service, "one"), Hand(service, "two")
        for seed in range(arrivals_before):
            one.work(seed)
        two.leave()
        service.housekeeping.tick()
        assert service.state.paused == Paused(kind="machines", text="1 of at least 2 machines are here")
        service.close()  # without an end: a kill does no more
        service = opened(tmp_path / folder, clock, min_workers=2, participation=100)
        assert service.state.paused == Paused(kind="machines", text="1 of at least 2 machines are here")
        Hand(service, "two"), Hand(service, "one")
        assert not service.state.paused
        events = (event for event, _ in read_events(tmp_path / folder / FOLDER))
        noted = [type(event) for event in events if isinstance(event, Pause | Resume)]
        assert noted[-2:] == [Pause, Resume] and all(a != b for a, b in itertools.pairwise(noted))


def test_who_holds_a_round_from_before_a_restart_is_here_when_it_was_heard_of(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    hand = Hand(service, "one")
    hand.take()
    service.close()
    service = opened(tmp_path / "run", clock)
    hand.service = service
    assert [(machine.name, machine.is_away) for machine in service.admin.status().machines] == [("one", True)]
    hand.beat(1)
    assert [(machine.name, machine.is_away) for machine in service.admin.status().machines] == [("one", False)]


def test_contributions_are_counted_over_restarts(tmp_path, clock):
    ticket = None
    for restart in range(3):
        service = opened(tmp_path / "run", clock, participation=100)
        hand = Hand(service, "one", ticket)
        ticket = hand.ticket
        for seed in range(3):
            hand.work(10 * restart + seed)
        assert [machine.arrivals for machine in service.admin.status().machines] == [3 * (restart + 1)]
        hand.leave()
        service.close()


def test_participation_counts_machines_by_what_they_prove_not_by_their_names(tmp_path, clock):
    """One machine that leaves and comes back three times is one; two of the same name are two."""
    service = opened(tmp_path / "run", clock)
    ticket = None
    for seed in range(3):
        hand = Hand(service, "one", ticket)
        ticket = hand.ticket
        hand.work(seed)
        hand.leave()
    twin = Hand(service, "one")
    twin.work(3)
    assert [line["participants"] for line in tape(tmp_path / "run")] == [1, 1, 1, 2]
    assert [line["machine"] for line in tape(tmp_path / "run")] == [ticket.machine] * 3 + [twin.id]


def test_two_machines_of_one_name_satisfy_min_workers(tmp_path, clock):
    service = opened(tmp_path / "run", clock, min_workers=2, participation=4, arrivals=30)
    one, two = Hand(service, "host"), Hand(service, "host")
    for seed in range(20):
        (one if seed % 2 else two).work(seed)
        service.housekeeping.tick()
        assert service.state.paused is None


def test_a_pause_that_lasts_too_long_ends_the_run_and_it_can_be_taken_up(tmp_path, clock):
    service = opened(tmp_path / "run", clock, min_workers=2, give_up_after_s=60.0, beat_s=100.0)
    hand = Hand(service, "m")
    for _ in range(62):
        clock.now += 1.0
        service.housekeeping.tick()
    assert service.state.ended.kind == "gave-up"
    assert "1 of at least 2 machines are here, for more than 60 s" in service.state.ended.text
    refuses(Code.ENDED, hand.take)
    service.close()
    service = opened(tmp_path / "run", clock, min_workers=1)
    assert not service.state.ended and Hand(service, "m").work(1).verdict == "applied"


def test_machines_that_are_here_but_do_not_contribute_do_not_count(tmp_path, clock):
    service = opened(tmp_path / "run", clock, min_workers=2, participation=4, arrivals=100)
    busy, idle = Hand(service, "busy"), Hand(service, "idle")
    for seed in range(4):
        busy.work(seed)
    service.housekeeping.tick()
    assert service.state.paused.kind == "participation"
    assert busy.take().kind == "paused"
    assert idle.work(5).verdict == "applied"  # the others may
    service.housekeeping.tick()
    assert not service.state.paused
    assert busy.work(6).verdict == "applied"
    assert [line["participants"] for line in tape(tmp_path / "run")] == [1, 1, 1, 1, 2, 2]


def test_a_contribution_that_waits_until_the_state_is_copied_holds_up_nobody_else(tmp_path, clock, monkeypatch):
    service = opened(tmp_path, clock)
    first, other = Hand(service, "first"), Hand(service, "other")
    first.take()
    readers, waits = service.state.run.readers, threading.Event()
    wait_for_readers, leave = readers.wait, readers.enter()
    monkeypatch.setattr(readers, "wait", lambda: (waits.set(), wait_for_readers()))
    with ThreadPoolExecutor(2) as threads:
        try:
            ack = threads.submit(first.hand_in, delta(0))
            assert waits.wait(60)
            assert isinstance(threads.submit(other.take).result(timeout=5), Assignment)
            assert not ack.done()
        finally:
            leave()
        assert ack.result().verdict == "applied"


def test_a_status_that_cannot_be_had_at_once_is_of_a_moment_ago_and_never_of_yesterday(tmp_path, clock):
    service = opened(tmp_path, clock)
    hand = Hand(service, "m")
    before = service.admin.status()
    with ThreadPoolExecutor(1) as threads:
        with service.state.lock:
            assert threads.submit(service.admin.status).result() == before
            clock.now += 24 * 3600
            later = threads.submit(service.admin.status)
            wait([later], timeout=4 * STATUS_PATIENCE_S)
            hand.join()
            hand.work(0)
        assert later.result().arrivals == 1


def test_the_status_tells_who_is_here_and_who_contributes(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    hand, _ = Hand(service, "m"), Hand(service, "idle")
    hand.work(1)
    status = service.admin.status()
    assert status.participants == (hand.id,) and {m.name for m in status.machines} == {"m", "idle"}
    assert (status.arrivals, status.planned, status.ended, status.paused) == (1, 20, None, None)


# ---- ends


def test_the_last_arrival_ends_the_run_and_what_comes_later_is_told(tmp_path, clock):
    service = opened(tmp_path / "run", clock, arrivals=2)
    hand, late = Hand(service, "m"), Hand(service, "late")
    late.take()
    hand.work(1)
    key = hand.take() and hand.key
    ack = hand.hand_in(delta(2))
    assert service.state.ended.kind == "finished"
    refuses(Code.ENDED, late.hand_in, delta(3))
    assert hand.hand_in(delta(2), key) == ack  # whoever missed the answer still gets it
    service.housekeeping.save_if_due(wait=True)
    service.close()
    service = opened(tmp_path / "run", clock, arrivals=2)
    assert service.state.ended.kind == "finished"


def test_a_stopped_run_is_saved_and_goes_on(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    hand = Hand(service, "m")
    hand.work(1)
    hand.take()
    service.admin.stop("somebody stopped it")
    assert service.state.ended == Ended(kind="stopped", text="somebody stopped it")
    digest = service.state.run.digest()
    refuses(Code.ENDED, hand.hand_in, delta(2))
    service.close()
    service = opened(tmp_path / "run", clock)
    assert service.state.run.digest() == digest and not service.state.run.synchronizer.held


def test_a_full_disk_is_told_and_the_run_goes_on_when_there_is_space(small_disk, clock):
    service = opened(small_disk / "run", clock)
    hand = Hand(service, "m")
    hand.work(1)
    hand.take()
    before = state(service)
    fill_disk(small_disk / "ballast")
    assert "free some space" in refuses(Code.DISK, hand.hand_in, delta(2)).text
    assert state(service) == before
    (small_disk / "ballast").unlink()
    assert hand.hand_in(delta(2)).verdict == "applied"
    assert not service.state.has_failed
    service.close()


# ---- a model from outside


def test_the_first_machine_brings_the_model_and_others_must_have_the_same(tmp_path):
    service = external_run(config(), tmp_path / "run")
    link, layout = LocalLink(service), Layout.from_tensors(model())
    refuses(Code.NO_MODEL, link.join, "m", returning=None, layout=None)
    join_answer = link.join("m", returning=None, layout=layout)
    assert join_answer.needs_model
    assert service.rounds.next(join_answer.ticket).kind == "no-model"
    bad = {**model(), "parameter.1": torch.full((4,), math.nan)}
    refuses(Code.NOT_FINITE, link.send_model, join_answer.ticket, layout, bad, NAMES)
    link.send_model(join_answer.ticket, layout, model(), NAMES)
    refuses(Code.HAS_MODEL, link.send_model, join_answer.ticket, layout, model(), NAMES)
    other = Layout.from_tensors({**model(), "parameter.0": torch.zeros(5, 4)})
    assert (
        "parameter.0 is F32 [5, 4] and not F32 [5, 3]" in refuses(Code.LAYOUT, link.join, "m", returning=None, layout=other).text
    )
    assert not link.join("n", returning=None, layout=layout).needs_model
    service.close()


def test_a_run_whose_model_has_an_empty_block_goes_on_after_a_restart(tmp_path):
    folder, tensors = tmp_path / "run", {**model(), "parameter.1": torch.zeros(0)}
    service = external_run(config(), folder)
    link, layout = LocalLink(service), Layout.from_tensors(tensors)
    join_answer = link.join("m", returning=None, layout=layout)
    link.send_model(join_answer.ticket, layout, tensors, NAMES)
    service.close()
    second_service = external_run(config(), folder)
    assert (
        second_service.state.run is not None
        and not LocalLink(second_service).join("n", returning=None, layout=layout).needs_model
    )
    second_service.close()


@pytest.mark.parametrize("offset", [1 << 20, 1 << 44, (1 << 62) - 1])
@pytest.mark.parametrize("name", ["tape.jsonl", "evals.jsonl", "journal", "config.toml", "run.json"])
def test_beyond_the_end_of_a_file_there_is_nothing_to_read(tmp_path, name, offset):
    """No file system has files of 2⁶² bytes, and some refuse to look there."""
    service = opened(tmp_path / "run")
    assert service.admin.read(name, offset) == b""
    service.close()
