"""The service around the synchronizer: exactly once, elastic, honest; what is wrong is refused by name and changes nothing."""

import itertools
import math

import pytest
import torch

from conftest import fill_disk, tape
from heloco.engine.cluster.link import LocalLink, digest_of
from heloco.engine.cluster.service import Denied
from heloco.engine.cluster.serving import external_run
from heloco.run.journal import read_events
from heloco.run.tensors import Layout, pieces
from small_cluster import NAMES, Clock, Hand, delta, model, opened


@pytest.fixture
def clock():
    return Clock()


def refuses(name, ask, *arguments, **options):
    """The request is denied by that name."""
    with pytest.raises(Denied) as found:
        ask(*arguments, **options)
    assert found.value.name == name, found.value
    assert str(found.value)
    return found.value


def state(service):
    run = service.recorded
    return run.digest(), run.synchronizer.arrivals, dict(run.synchronizer.held), len(tape(service.folder))


# ---- exactly once


def test_a_contribution_that_is_handed_in_again_gets_the_same_answer_and_counts_once(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    hand = Hand(service, "m")
    hand.take()
    key, first = hand.key, hand.hand_in(delta(1))
    after = state(service)
    assert hand.hand_in(delta(1), key) == first
    assert service.commit(hand.machine, key, {"digest": "another"}) == first
    assert service.received(hand.machine, key) == {"ack": first}
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
    hand = Hand(service, "m")
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
        hand.service = hand.link.service = service
        assert service.join(hand.name, returning=hand.machine)["seat"] == i
        assert hand.hand_in(delta(i))["verdict"] == "applied"
    assert [line["staleness"] for line in tape(tmp_path / "run")] == [0, 1, 2]


def test_a_round_that_is_asked_for_again_is_the_same(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    hand, other = Hand(service, "m"), Hand(service, "other")
    first = hand.take()
    other.work(1)
    assert hand.take() == first
    layout = service.starts.layout
    start = hand.link.fetch(hand.machine, hand.key, layout)
    assert all(torch.equal(start[name], tensor) for name, tensor in model().items())  # of its version, though the run went on


# ---- what is wrong is refused by name


def test_what_is_not_this_machines_round_is_refused(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    hand, other = Hand(service, "m"), Hand(service, "other")
    hand.take()
    other.take()
    before = state(service)
    worker, index, version = hand.key
    refuses("unknown-machine", service.next_round, "nobody")
    refuses("not-held", other.hand_in, delta(1), hand.key)
    refuses("not-held", hand.hand_in, delta(1), (worker, index + 1, version))
    refuses("not-held", hand.hand_in, delta(1), (worker, index, -1))
    refuses("not-held", hand.hand_in, delta(1), (99, 0, 0))
    refuses("future", hand.hand_in, delta(1), (worker, index, version + 1))
    refuses("version", service.join, "m", version="9.9.9")
    refuses("layout", service.join, "m", layout=Layout.of({"parameter.0": torch.zeros(2)}))
    assert state(service) == before


def sent(service, hand, content, **report):
    incoming = service.incoming(hand.machine, hand.key)
    incoming.write(incoming.begin(incoming.size), content)
    return service.commit(hand.machine, hand.key, {"digest": incoming.digest(), **report})


def content_of(service, tensors):
    return b"".join(pieces(service.recorded.layout, tensors))


def test_wrong_bodies_are_refused_and_the_right_one_still_counts(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    hand = Hand(service, "m")
    hand.take()
    before, right = state(service), content_of(service, delta(1))
    other = Layout.of({f"pseudo_gradient.{i}": torch.zeros(3) for i in range(2)})
    refuses("too-long", sent, service, hand, right + b"x")
    refuses("layout", sent, service, hand, b"".join(pieces(other, [torch.zeros(3)] * 2)))
    refuses("layout", sent, service, hand, b"\0" * len(right))
    refuses("incomplete", sent, service, hand, right[:-1])
    refuses("offset", service.incoming(hand.machine, hand.key).begin, 3)
    incoming = service.incoming(hand.machine, hand.key)
    incoming.write(incoming.begin(len(right) - 1), right[-1:])
    for wrong in (
        {"digest": 3},
        {},
        {"digest": "x", "loss": "low"},
        {"digest": "x", "samples": -1},
        {"digest": "x", "units": 1.5},
    ):
        refuses("report", service.commit, hand.machine, hand.key, wrong)
    refuses("corrupted", service.commit, hand.machine, hand.key, {"digest": "0" * 32})
    assert incoming.size == 0  # it is to be sent again
    assert state(service) == before
    assert sent(service, hand, right)["verdict"] == "applied"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_before_it_is_stored_and_its_data_goes_to_another(tmp_path, clock, value):
    service = opened(tmp_path / "run", clock)
    hand = Hand(service, "m")
    first = hand.take()
    bad = delta(1)
    bad["pseudo_gradient.1"][2] = value
    refuses("not-finite", hand.hand_in, bad)
    assert not list(service.recorded.journal.path.glob("*.safetensors"))
    again = hand.take()
    assert (again["round"], again["spans"]) == (first["round"] + 1, first["spans"])
    assert hand.hand_in(delta(1))["verdict"] == "applied"


def test_a_machine_whose_contributions_are_always_refused_is_turned_away(tmp_path, clock):
    service = opened(tmp_path / "run", clock, max_refusals=3)
    hand = Hand(service, "m")
    bad = {name: t * math.nan if t.is_floating_point() else t for name, t in delta(1).items()}
    for _ in range(3):
        hand.take()
        refuses("not-finite", hand.hand_in, bad)
    refuses("turned-away", hand.take)
    refuses("turned-away", service.join, "m", returning=hand.machine)


def test_a_norm_far_outside_the_recent_ones_is_refused_or_clipped(tmp_path, clock):
    for policy, verdict in (("refuse", "refused"), ("clip", "applied")):
        service = opened(tmp_path / policy, clock, norm_limit=5.0, norm_policy=policy)
        hand = Hand(service, "m")
        for seed in range(8):
            hand.work(seed)
        hand.take()
        ack = hand.hand_in(delta(1, size=100.0))
        assert ack["verdict"] == verdict
        line = tape(tmp_path / policy)[-1]
        assert (line["code"], line["reason"]) == ("norm", ack["reason"])
        assert ("clipped" in line) == (policy == "clip") and line.get("clipped", 0.0) < 0.01
        assert hand.work(3)["verdict"] == "applied"
        service.close()


def test_transfers_go_on_where_they_were_cut_and_an_old_connection_may_write_no_more(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    hand = Hand(service, "m")
    hand.take()
    content = content_of(service, delta(1))
    incoming = service.incoming(hand.machine, hand.key)
    old = incoming.begin(0)
    incoming.write(old, content[:50])
    assert service.received(hand.machine, hand.key) == {"size": 50}
    new = incoming.begin(50)
    incoming.write(new, content[50:80])
    refuses("offset", incoming.write, old, content[50:])
    incoming.write(new, content[80:])
    digest = digest_of(service.recorded.layout, delta(1))
    assert service.commit(hand.machine, hand.key, {"digest": digest})["verdict"] == "applied"


# ---- elastic


def beats(service, clock, hand, steps, every):
    for step in range(1, steps + 1):
        clock.now += every
        service.beat(hand.machine, step)
        service.tick()


def test_a_machine_is_lost_by_its_own_measure_of_progress(tmp_path, clock):
    service = opened(tmp_path / "run", clock, beat_s=1.0, patience=10.0)
    quick, slow = Hand(service, "quick"), Hand(service, "slow")
    quick.take()
    slow.take()
    for step in range(1, 4):  # the slow one needs half a minute for a step, and beats in between
        for second in range(30):
            clock.now += 1.0
            service.beat(quick.machine, 30 * step + second)
            service.beat(slow.machine, step - 1)
            service.tick()
        service.beat(slow.machine, step)
    assert {m.name for m in service.machines} == {"quick", "slow"}
    for _ in range(12):  # now neither gets on
        clock.now += 1.0
        service.tick()
    assert {m.name for m in service.machines} == {"slow"}
    for _ in range(330):
        clock.now += 1.0
        service.tick()
    assert not list(service.machines)
    assert not service.recorded.synchronizer.held


def test_the_shard_of_a_lost_machine_goes_to_another_with_an_exact_cursor(tmp_path, clock):
    service = opened(tmp_path / "run", clock, beat_s=1.0)
    lost, other = Hand(service, "lost"), Hand(service, "other")
    for seed in range(3):
        lost.work(seed)
    held = lost.take()
    for step in range(30):
        clock.now += 1.0
        service.beat(other.machine, step)
        service.tick()
    refuses("unknown-machine", lost.hand_in, delta(9))
    lost.machine = service.join("lost", returning=lost.machine)["machine"]
    refuses("not-held", lost.hand_in, delta(9))  # too late: told so, and a fresh round is to be had
    service.leave(lost.machine)
    other.take()  # its own worker's, which is behind
    other.hand_in(delta(1))
    taken = [other.take() for _ in range(1)]
    spans = {worker["worker"]: worker["spans"] for worker in taken}
    while held["worker"] not in spans:
        other.hand_in(delta(2))
        answer = other.take()
        spans[answer["worker"]] = answer["spans"]
    assert spans[held["worker"]] == held["spans"]


def test_nobody_is_blamed_for_the_time_in_which_the_service_stood_still(tmp_path, clock):
    service = opened(tmp_path / "run", clock, beat_s=1.0)
    hand = Hand(service, "m")
    hand.take()
    service.tick()
    clock.now += 10_000.0
    service.tick()
    assert hand.hand_in(delta(1))["verdict"] == "applied"


def test_a_machine_that_waits_for_the_answer_to_its_contribution_is_not_lost(tmp_path, clock):
    service = opened(tmp_path / "run", clock, beat_s=1.0)
    hand = Hand(service, "m")
    hand.take()
    service.machines.present[hand.machine].committing = True
    for _ in range(100):
        clock.now += 1.0
        service.tick()
    assert [m.name for m in service.machines] == ["m"]


def test_one_machine_does_the_rounds_of_all_workers_and_each_gets_its_share(tmp_path, clock):
    service = opened(tmp_path / "run", clock, arrivals=12)
    hand = Hand(service, "m")
    for seed in range(12):
        hand.work(seed)
    assert service.recorded.synchronizer.arrivals_of == [4, 4, 4]
    assert service.ended == "finished"


def test_more_machines_than_workers_wait_for_a_seat(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    hands = [Hand(service, f"m{i}") for i in range(4)]
    assert ["wait" in hand.take() for hand in hands] == [False, False, False, True]
    service.leave(hands[1].machine)
    answer = hands[3].take()
    assert answer["worker"] == 1


def test_behind_a_barrier_one_machine_serves_all_workers(tmp_path, clock):
    service = opened(tmp_path / "run", clock, method="sync-nesterov", arrivals=6)
    hands = [Hand(service, f"m{i}") for i in range(2)]
    workers = []
    for seed in range(6):
        hand = hands[seed % 2]
        workers.append(hand.take()["worker"])
        hand.hand_in(delta(seed))
    assert sorted(workers[:3]) == sorted(workers[3:]) == [0, 1, 2]
    assert service.recorded.synchronizer.outer_step == 2


def test_a_machine_too_far_behind_is_told_so_and_gets_a_fresh_round(tmp_path, clock):
    service = opened(tmp_path / "run", clock, drop="skip", drop_above=2)
    slow, quick = Hand(service, "slow"), Hand(service, "quick")
    first = slow.take()
    for seed in range(2):
        quick.work(seed)
    assert not service.beat(slow.machine, 1)["stale"]
    quick.work(3)
    assert service.beat(slow.machine, 1)["stale"]
    service.abandon(slow.machine, "too stale")
    assert slow.take()["version"] > first["version"]


def test_dylu_gives_slow_machines_fewer_steps(tmp_path, clock):
    service = opened(tmp_path / "run", clock, steps="dylu", inner_steps=20)
    quick, slow = Hand(service, "quick"), Hand(service, "slow")
    service.beat(quick.machine, 0, 1.0)
    service.beat(slow.machine, 0, 4.0)
    assert (quick.take()["inner_steps"], slow.take()["inner_steps"]) == (20, 5)
    quick.hand_in(delta(1))
    slow.hand_in(delta(2))
    assert sorted(line["inner_steps"] for line in tape(tmp_path / "run")) == [5, 20]


# ---- honest


def test_a_run_without_enough_machines_pauses_and_goes_on_when_they_are_there(tmp_path, clock):
    service = opened(tmp_path / "run", clock, min_workers=2)
    one = Hand(service, "one")
    assert one.take() == {"wait": "1 of at least 2 machines are here"}
    two = Hand(service, "two")
    assert "wait" not in one.take()
    assert "wait" not in two.take()
    service.leave(two.machine)
    assert one.hand_in(delta(1))["verdict"] == "applied"  # what is under way still counts
    assert "wait" in one.take()
    assert service.status()["paused"]


def test_a_pause_that_a_kill_fell_into_ends_when_the_run_goes_on(tmp_path, clock):
    """With a checkpoint behind the pause, and without."""
    for arrivals_before, folder in ((1, "journal"), (4, "checkpoint")):
        service = opened(tmp_path / folder, clock, min_workers=2, participation=100)
        one, two = Hand(service, "one"), Hand(service, "two")
        for seed in range(arrivals_before):
            one.work(seed)
        service.leave(two.machine)
        service.tick()
        assert service.paused == "1 of at least 2 machines are here"
        service.close()  # without an end: a kill does no more
        service = opened(tmp_path / folder, clock, min_workers=2, participation=100)
        assert service.paused == "1 of at least 2 machines are here"
        Hand(service, "two"), Hand(service, "one")
        assert not service.paused
        events = (event for event, _, _ in read_events(tmp_path / folder / "journal" / "events.jsonl"))
        noted = [event["reason"] for event in events if event["event"] in ("pause", "go-on")]
        assert noted[-2:] == ["1 of at least 2 machines are here", ""] and all(a != b for a, b in itertools.pairwise(noted))


def test_who_holds_a_round_from_before_a_restart_is_here_when_it_was_heard_of(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    hand = Hand(service, "one")
    hand.take()
    service.close()
    service = opened(tmp_path / "run", clock)
    assert [(machine["name"], machine["away"]) for machine in service.status()["machines"]] == [("one", True)]
    service.beat(hand.machine, 1)
    assert [(machine["name"], machine["away"]) for machine in service.status()["machines"]] == [("one", False)]


def test_contributions_are_counted_over_restarts(tmp_path, clock):
    for started in range(3):
        service = opened(tmp_path / "run", clock, participation=100)
        hand = Hand(service, "one")
        for seed in range(3):
            hand.work(10 * started + seed)
        assert [machine["arrivals"] for machine in service.status()["machines"]] == [3 * (started + 1)]
        service.leave(hand.machine)
        service.close()


def test_one_that_comes_back_under_another_id_counts_once(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    for seed in range(3):
        hand = Hand(service, "one")
        hand.work(seed)
        service.leave(hand.machine)
    assert [line["participants"] for line in tape(tmp_path / "run")] == [1, 1, 1]
    assert len({line["machine"] for line in tape(tmp_path / "run")}) == 3


def test_a_pause_that_lasts_too_long_ends_the_run_and_it_can_be_taken_up(tmp_path, clock):
    service = opened(tmp_path / "run", clock, min_workers=2, give_up_after_s=60.0, beat_s=100.0)
    hand = Hand(service, "m")
    for _ in range(62):
        clock.now += 1.0
        service.tick()
    assert service.failed and "1 of at least 2 machines are here, for more than 60 s" in service.ended
    refuses("ended", hand.take)
    service.close()
    service = opened(tmp_path / "run", clock, min_workers=1)
    assert not service.ended and Hand(service, "m").work(1)["verdict"] == "applied"


def test_machines_that_are_here_but_do_not_contribute_do_not_count(tmp_path, clock):
    service = opened(tmp_path / "run", clock, min_workers=2, participation=4, arrivals=100)
    busy, idle = Hand(service, "busy"), Hand(service, "idle")
    for seed in range(4):
        busy.work(seed)
    service.tick()
    assert service.paused == "only 1 machines contributed to the last 4 arrivals, and at least 2 must"
    assert "wait" in busy.take()
    assert idle.work(5)["verdict"] == "applied"  # the others may
    service.tick()
    assert not service.paused
    assert busy.work(6)["verdict"] == "applied"
    assert [line["participants"] for line in tape(tmp_path / "run")] == [1, 1, 1, 1, 2, 2]


def test_the_status_tells_who_is_here_and_who_contributes(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    hand, _ = Hand(service, "m"), Hand(service, "idle")
    hand.work(1)
    found = service.status()
    assert found["participants"] == ["m"] and {m["name"] for m in found["machines"]} == {"m", "idle"}
    assert (found["arrivals"], found["planned"], found["ended"], found["paused"]) == (1, 20, "", "")


# ---- ends


def test_the_last_arrival_ends_the_run_and_what_comes_later_is_told(tmp_path, clock):
    service = opened(tmp_path / "run", clock, arrivals=2)
    hand, late = Hand(service, "m"), Hand(service, "late")
    late.take()
    hand.work(1)
    key = hand.take() and hand.key
    ack = hand.hand_in(delta(2))
    assert service.ended == "finished"
    refuses("ended", late.hand_in, delta(3))
    assert hand.hand_in(delta(2), key) == ack  # whoever missed the answer still gets it
    service.save_if_due()
    service.close()
    service = opened(tmp_path / "run", clock, arrivals=2)
    assert service.ended == "finished"


def test_a_stopped_run_is_saved_and_goes_on(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    hand = Hand(service, "m")
    hand.work(1)
    hand.take()
    service.stop("stopped")
    digest = service.recorded.digest()
    refuses("ended", hand.hand_in, delta(2))
    service.close()
    service = opened(tmp_path / "run", clock)
    assert service.recorded.digest() == digest and not service.recorded.synchronizer.held


def test_a_full_disk_is_told_and_the_run_goes_on_when_there_is_space(small_disk, clock):
    service = opened(small_disk / "run", clock)
    hand = Hand(service, "m")
    hand.work(1)
    hand.take()
    before = state(service)
    fill_disk(small_disk / "ballast")
    error = refuses("disk", hand.hand_in, delta(2))
    assert "free some space" in str(error)
    assert state(service) == before
    (small_disk / "ballast").unlink()
    assert hand.hand_in(delta(2))["verdict"] == "applied"
    assert not service.failed
    service.close()


# ---- a model from outside


def test_the_first_machine_brings_the_model_and_others_must_have_the_same(tmp_path):
    from small_cluster import config

    service = external_run(config(), tmp_path / "run")
    link, layout = LocalLink(service), Layout.of(model())
    refuses("no-model", link.join, "m", returning=None, pace_s=None, layout=None)
    machine = link.join("m", returning=None, pace_s=None, layout=layout)
    assert machine["needs_model"]
    assert service.next_round(machine["machine"]) == {"wait": "the run has no model yet"}
    bad = {**model(), "parameter.1": torch.full((4,), math.nan)}
    refuses("not-finite", link.send_model, machine["machine"], layout, bad, NAMES)
    service._model.restart()
    link.send_model(machine["machine"], layout, model(), NAMES)
    refuses("has-model", link.send_model, machine["machine"], layout, model(), NAMES)
    other = Layout.of({**model(), "parameter.0": torch.zeros(5, 4)})
    error = refuses("layout", link.join, "m", returning=None, pace_s=None, layout=other)
    assert "parameter.0 is F32 [5, 4] and not F32 [5, 3]" in str(error)
    assert not link.join("n", returning=None, pace_s=None, layout=layout)["needs_model"]
    service.close()
