"""One bad machine cannot starve the others: progress is work, not words."""

import contextlib
import math

import pytest
import torch

from heloco.cluster.protocol.messages import Assignment, Paused, Wait
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.server.open_run import external_run
from heloco.policy.deadlines import RoundDeadline, reference_pace
from heloco.records.events import Abandon
from heloco.records.journal_reader import FOLDER, read_events
from heloco.wire.layout import Layout
from support.local_link import LocalLink
from support.runs import tape
from support.small_cluster import NAMES, Clock, Hand, config, delta, model, opened

BEAT = {"beat_s": 1.0, "patience": 10.0}


@pytest.fixture
def clock():
    return Clock()


def nothing(_):
    return 0


def pass_time(service, clock, seconds, *beating, steps=nothing):
    """Second by second, with these machines beating."""
    for second in range(round(seconds)):
        clock.now += 1.0
        for hand in beating:
            hand.beat(steps(second))
        service.housekeeping.tick()


def works(hand, clock, seconds=4.0):
    """Takes a round and hands it in after this long; whether there was one."""
    if not isinstance(hand.take(), Assignment):
        return False
    clock.now += seconds
    hand.hand_in(delta(hand.key.round))
    return True


def abandoned(service):
    return [event.kind for event, _ in read_events(service.state.folder / FOLDER) if isinstance(event, Abandon)]


# ---- seats


def test_machines_that_only_beat_hold_no_seat_for_ever(tmp_path, clock):
    service = opened(tmp_path / "run", clock, paces=[1.0, 1.0], arrivals=1000, **BEAT)
    idle = [Hand(service, "idle0"), Hand(service, "idle1")]
    honest = Hand(service, "honest")
    assert honest.take().kind == "no-seat"
    pass_time(service, clock, 10, *idle, honest)
    for _ in range(20):
        assert works(honest, clock)
        pass_time(service, clock, 1, *idle, honest)
    assert {line["shard"] for line in tape(tmp_path / "run")} == {0, 1}  # both shards are trained


def test_an_idle_machine_stops_no_barrier(tmp_path, clock):
    service = opened(tmp_path / "run", clock, paces=[1.0, 1.0], arrivals=100, method="sync-nesterov", **BEAT)
    idle, honest = Hand(service, "idle"), Hand(service, "honest")
    pass_time(service, clock, 10, idle, honest)
    for _ in range(6):
        assert works(honest, clock)
        idle.beat()
    assert service.state.run.synchronizer.outer_step == 3


def test_a_machine_that_comes_back_from_idling_gets_rounds_again(tmp_path, clock):
    service = opened(tmp_path / "run", clock, paces=[1.0, 1.0], arrivals=100, **BEAT)
    idle, honest = Hand(service, "idle"), Hand(service, "honest")
    pass_time(service, clock, 10, idle, honest)
    works(honest, clock)
    assert works(idle, clock)


# ---- deadlines


def test_a_round_has_a_deadline_from_what_was_measured():
    deadline = RoundDeadline(patience=10.0, floor_s=20.0, cap_s=3600.0)
    assert deadline(80, [], []) == 3600.0  # nothing is known
    assert deadline(80, [1.0, 2.0], []) == 1600.0  # ten times its own slowest
    assert deadline(80, [], [0.5]) == 400.0  # ten times the slowest other
    assert deadline(80, [1.0], [100.0]) == 800.0  # its own history comes first
    assert deadline(2, [0.01], []) == 20.0
    assert deadline(80, [100.0], []) == 3600.0


@pytest.mark.parametrize("steps", [lambda s: s, lambda s: s % 2, nothing], ids=["more and more", "0, 1, 0, 1", "none"])
def test_a_round_that_is_never_handed_in_expires_whatever_its_machine_says(tmp_path, clock, steps):
    service = opened(tmp_path / "run", clock, paces=[1.0, 1.0], arrivals=1000, **BEAT)
    honest, talker = Hand(service, "honest"), Hand(service, "talker")
    for _ in range(3):
        works(honest, clock)  # two steps a second each: 2 s per step
    talker.take()
    for _ in range(15):
        pass_time(service, clock, 4, talker, honest, steps=steps)
        works(honest, clock, 0.0)
    machine = service.state.roster.present.get(talker.id)
    assert machine is None or machine.round is None
    assert abandoned(service)[0] in ("expired", "lost")


def test_the_first_round_of_all_has_a_cap(tmp_path, clock):
    service = opened(tmp_path / "run", clock, paces=[1.0], round_limit_s=100.0, **BEAT)
    talker = Hand(service, "talker")
    talker.take()
    pass_time(service, clock, 99, talker, steps=lambda s: s)
    assert service.state.roster.present[talker.id].round is not None
    pass_time(service, clock, 3, talker, steps=lambda s: s)
    assert service.state.roster.present[talker.id].round is None and abandoned(service) == ["expired"]
    with pytest.raises(Refused) as refused:
        talker.hand_in(delta(1))
    assert refused.value.code is RefusalCode.NOT_HELD


def test_a_machine_that_wasted_its_seat_twice_goes_to_the_end_of_the_queue(tmp_path, clock):
    service = opened(tmp_path / "run", clock, paces=[1.0], arrivals=100, round_limit_s=50.0, **BEAT)
    bad, good = Hand(service, "bad"), Hand(service, "good")
    assert (bad.take().worker, good.take().kind) == (0, "no-seat")
    for waste in range(2):
        for _ in range(60):
            pass_time(service, clock, 1, bad, good)
            if len(abandoned(service)) > waste:
                break
            assert good.take().kind == "no-seat"
        if not waste:
            assert isinstance(bad.take(), Assignment)  # once may happen to anybody
    assert abandoned(service) == ["expired", "expired"]
    assert bad.take().kind == "rest"
    for _ in range(10):
        assert works(good, clock, 1.0)
        pass_time(service, clock, 1, bad, good)
    roster = service.state.roster.present
    assert (roster[good.id].seat, roster[bad.id].seat) == (0, None)


def test_time_in_which_the_service_stood_still_or_had_no_room_does_not_count(tmp_path, clock, monkeypatch):
    service = opened(tmp_path / "run", clock, paces=[1.0], round_limit_s=50.0, **BEAT)
    hand = Hand(service, "m")
    hand.take()
    service.housekeeping.tick()
    clock.now += 10_000.0
    pass_time(service, clock, 2, hand)
    monkeypatch.setattr("heloco.cluster.server.pauses.Pauses.space_problem", lambda _: Paused(kind="space", text=""))
    pass_time(service, clock, 200, hand)
    monkeypatch.undo()
    assert hand.hand_in(delta(1)).verdict == "applied"


# ---- paces


def test_the_reference_pace_is_the_fastest_within_reason():
    assert reference_pace([]) is None
    assert reference_pace([2.0, 4.0]) == 2.0
    assert reference_pace([1.0, 1.0, 1e-9]) == 1 / 8


def test_a_machine_that_hands_in_at_once_does_not_set_the_steps_of_others(tmp_path, clock):
    service = opened(tmp_path / "run", clock, steps="dylu", inner_steps=40, arrivals=1000, **BEAT)
    honest, other, liar = Hand(service, "honest"), Hand(service, "other"), Hand(service, "liar")
    for _ in range(4):
        works(honest, clock, 40.0)
        works(other, clock, 40.0)
        works(liar, clock, 0.0)
    assert honest.take().inner_steps >= 5  # not 1


# ---- taking and giving back


def test_taking_and_giving_back_gets_slower_and_slower(tmp_path, clock):
    service = opened(tmp_path / "run", clock, paces=[1.0], arrivals=100, **BEAT)
    yoyo = Hand(service, "yoyo")
    before = service.state.run.journal.end.position
    for _ in range(6000):  # a minute, a hundred times a second
        clock.now += 0.01
        if isinstance(yoyo.take(), Assignment):
            yoyo.abandon()
    assert len(abandoned(service)) <= 9
    assert service.state.run.journal.end.position - before < 6000


def test_a_machine_whose_contribution_counts_is_trusted_again(tmp_path, clock):
    service = opened(tmp_path / "run", clock, paces=[1.0], arrivals=100, **BEAT)
    hand = Hand(service, "m")
    for _ in range(4):
        clock.now += 100.0
        hand.take()
        hand.abandon()
    assert service.state.book.get(hand.id).wasted_rounds == 4 and isinstance(hand.take(), Wait)
    clock.now += 100.0
    assert works(hand, clock)
    assert service.state.book.get(hand.id).wasted_rounds == 0 and isinstance(hand.take(), Assignment)


# ---- a model from outside


def bring(service, name, layout):
    link = LocalLink(service)
    return link, link.join(name, returning=None, layout=layout).ticket


def test_a_model_that_is_too_large_is_refused_before_a_byte_of_it_is_taken(tmp_path, clock):
    service = external_run(config(), tmp_path / "run", clock=clock)
    huge = Layout((("parameter.0", "F32", (1 << 39, 16)),))
    link, ticket = bring(service, "m", huge)
    with pytest.raises(Refused) as refused:
        service.models.upload(ticket, huge)
    assert refused.value.code is RefusalCode.TOO_LARGE and "3.52e+04 GB" in refused.value.text
    assert not (tmp_path / "run" / "model.partial").exists()
    small = external_run(config(model_limit_gb=1e-7), tmp_path / "small", clock=clock)
    link, ticket = bring(small, "m", Layout.from_tensors(model()))
    with pytest.raises(Refused) as refused:
        link.send_model(ticket, Layout.from_tensors(model()), model(), NAMES)
    assert refused.value.code is RefusalCode.TOO_LARGE


def test_who_begins_to_send_a_model_and_stops_gives_up_the_place(tmp_path, clock):
    service = external_run(config(**BEAT), tmp_path / "run", clock=clock)
    layout = Layout.from_tensors(model())
    (_, slow), (link, quick) = bring(service, "slow", layout), bring(service, "quick", layout)
    upload = service.models.upload(slow, layout)
    upload.write(upload.begin(0), layout.header[:20])
    with pytest.raises(Refused) as refused:
        service.models.upload(quick, layout)
    assert refused.value.code is RefusalCode.BUSY
    for _ in range(12):
        clock.now += 1.0
        service.members.beat(slow, 0)
        with pytest.raises(Refused) if clock.now < 10 else contextlib.suppress(Refused):
            service.models.upload(quick, layout)
    link.send_model(quick, layout, model(), NAMES)
    assert service.state.run is not None
    service.close()


def test_not_a_number_of_a_liar_is_refused_and_others_are_not_hurt(tmp_path, clock):
    service = opened(tmp_path / "run", clock, arrivals=100, max_refusals=3, **BEAT)
    liar, honest = Hand(service, "liar"), Hand(service, "honest")
    bad = {name: t * math.nan if t.is_floating_point() else t for name, t in delta(1).items()}
    for _ in range(6):
        clock.now += 200.0
        try:
            if isinstance(liar.take(), Assignment):
                liar.hand_in(bad)
        except Refused as refused:
            assert refused.code in (RefusalCode.NOT_FINITE, RefusalCode.BARRED)
        assert works(honest, clock, 0.0)
    assert all(torch.isfinite(p).all() for p in service.state.run.synchronizer.parameters)
    assert {m.name for m in service.state.roster} == {"honest"}
