"""The service is elastic: machines are lost, wait for a seat, take over the rounds of others, fall behind or are slow."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from heloco.cluster.protocol.messages import Wait
from heloco.cluster.protocol.refusals import RefusalCode
from heloco.cluster.server import contributions as contributions_module
from support.service_checks import refuses
from support.small_cluster import Hand, delta, opened


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
    assert not service.state.run.synchronizer.rounds_under_way


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
    refuses(RefusalCode.UNKNOWN_MACHINE, lost.hand_in, delta(9))
    assert lost.join().ticket.machine == lost.id
    refuses(RefusalCode.NOT_HELD, lost.hand_in, delta(9))  # too late: told so, and a fresh round is to be had
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


@pytest.mark.parametrize(("beat_s", "round_limit_s"), [(1.0, 3600.0), (1e6, 10.0)], ids=["silent", "past its deadline"])
def test_a_machine_that_waits_for_the_answer_to_its_contribution_keeps_its_round(
    tmp_path, clock, monkeypatch, beat_s, round_limit_s
):
    """Whether it would be lost by then, because it is silent, or only its round, because of the deadline."""
    service = opened(tmp_path / "run", clock, beat_s=beat_s, round_limit_s=round_limit_s)
    hand = Hand(service, "m")
    hand.take()
    is_reading, may_go_on, read = threading.Event(), threading.Event(), contributions_module.all_finite

    def slow_read(*arguments):
        is_reading.set()
        assert may_go_on.wait(60)
        return read(*arguments)

    monkeypatch.setattr(contributions_module, "all_finite", slow_read)
    with ThreadPoolExecutor(1) as threads:
        handing_in = threads.submit(hand.hand_in, delta(1))
        assert is_reading.wait(60)
        for _ in range(100):
            clock.now += 1.0
            service.housekeeping.tick()
        may_go_on.set()
        assert handing_in.result().verdict == "applied"


def test_after_the_answer_a_machine_may_be_lost_like_any_other(tmp_path, clock):
    service = opened(tmp_path / "run", clock, beat_s=1.0)
    hand = Hand(service, "m")
    hand.work(1)
    for _ in range(100):
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
    assert service.state.book.get(slow.id).wasted_rounds == 0  # it was not its fault


def test_a_grace_period_lets_machines_that_arrive_soon_after_each_other_start_together(tmp_path, clock):
    service = opened(tmp_path / "run", clock, inner_steps=20, grace=0.1)
    hands = [Hand(service, name) for name in ("one", "two", "three")]
    assert {hand.take().version for hand in hands} == {0}
    one, two, three = hands
    clock.now += 20.0
    one.hand_in(delta(1))  # 1 s a step, so the others have 2 s
    assert one.take() == Wait(kind="grace", text="others that arrive in a moment start together with it", ask_again_s=2.0)
    clock.now += 1.5
    two.hand_in(delta(2))  # within the period, which it does not prolong
    assert [hand.take().ask_again_s for hand in (one, two)] == [0.5, 0.5]
    clock.now += 0.5
    assert [hand.take().version for hand in (one, two)] == [2, 2]  # three is late
    clock.now += 1.0
    three.hand_in(delta(3))
    assert isinstance(three.take(), Wait)
    for hand in (one, two):
        hand.hand_in(delta(4))
    assert {hand.take().version for hand in hands} == {5}  # everybody is in, so nobody waits any longer


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
