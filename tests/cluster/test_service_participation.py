"""The service is honest about who is here and who contributes: pauses, participation, and the status."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor, wait

from heloco.cluster.protocol.messages import Assignment, Paused, Wait
from heloco.cluster.protocol.refusals import RefusalCode
from heloco.cluster.server.administration import STATUS_PATIENCE_S
from heloco.records.events import Pause, Resume
from heloco.records.journal_reader import FOLDER, read_events
from support.runs import tape
from support.service_checks import refuses
from support.small_cluster import Hand, delta, opened


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
    refuses(RefusalCode.ENDED, hand.take)
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
    assert (status.arrivals, status.arrival_goal, status.ended, status.paused) == (1, 20, None, None)
