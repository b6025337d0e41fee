"""The service counts each contribution exactly once; what is wrong is refused by name and changes nothing."""

import math

import pytest
import torch

from heloco.cluster.protocol.link import digest_of
from heloco.cluster.protocol.messages import Assignment, RoundKey, Ticket, UploadState
from heloco.cluster.protocol.refusals import RefusalCode
from heloco.records.journal_reader import contribution_numbers
from heloco.wire.layout import Layout, pieces
from support.runs import tape
from support.service_checks import refuses, state
from support.small_cluster import NO_DIGEST, Hand, delta, join_request, model, opened, report

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
    refuses(RefusalCode.UNKNOWN_MACHINE, service.rounds.next, Ticket(machine="nobody", secret="x"))
    refuses(RefusalCode.NOT_HELD, other.hand_in, delta(1), hand.key)
    refuses(RefusalCode.NOT_HELD, hand.hand_in, delta(1), RoundKey(worker, index + 1, version))
    refuses(RefusalCode.NOT_HELD, hand.hand_in, delta(1), RoundKey(worker, index, -1))
    refuses(RefusalCode.NOT_HELD, hand.hand_in, delta(1), RoundKey(99, 0, 0))
    refuses(RefusalCode.FUTURE, hand.hand_in, delta(1), RoundKey(worker, index, version + 1))
    refuses(RefusalCode.VERSION, service.members.join, join_request("m", version="9.9.9"))
    other_model = Layout.from_tensors({"parameter.0": torch.zeros(2)}).entries
    refuses(RefusalCode.LAYOUT, service.members.join, join_request("m", layout=other_model))
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
    refuses(RefusalCode.TOO_LONG, sent, service, hand, right + b"x")
    refuses(RefusalCode.LAYOUT, sent, service, hand, b"".join(pieces(other, [torch.zeros(3)] * 2)))
    refuses(RefusalCode.LAYOUT, sent, service, hand, b"\0" * len(right))
    refuses(RefusalCode.INCOMPLETE, sent, service, hand, right[:-1])
    upload = service.contributions.upload(hand.ticket, hand.key)
    refuses(RefusalCode.OFFSET, upload.begin, 3)
    upload.write(upload.begin(len(right) - 1), right[-1:])
    refuses(RefusalCode.CORRUPTED, service.contributions.commit, hand.ticket, hand.key, NO_DIGEST, report())
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
    refuses(RefusalCode.NOT_FINITE, hand.hand_in, bad)
    assert not contribution_numbers(service.state.run.journal.folder)
    second_round = hand.take()
    assert (second_round.round, second_round.spans) == (first.round + 1, first.spans)
    assert hand.hand_in(delta(1)).verdict == "applied"


def test_a_machine_whose_contributions_are_always_refused_is_turned_away(tmp_path, clock):
    service = opened(tmp_path / "run", clock, max_refusals=3)
    hand = Hand(service, "m")
    bad = {name: t * math.nan if t.is_floating_point() else t for name, t in delta(1).items()}
    for _ in range(3):
        clock.now += 100.0  # after rounds that were not accepted the next one comes later
        assert isinstance(hand.take(), Assignment)
        refuses(RefusalCode.NOT_FINITE, hand.hand_in, bad)
    refuses(RefusalCode.BARRED, hand.take)
    refuses(RefusalCode.BARRED, hand.join)
    service.close()
    service = opened(tmp_path / "run", clock, max_refusals=3)
    hand.service = service
    refuses(RefusalCode.BARRED, hand.join)  # for good


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
    refuses(RefusalCode.OFFSET, upload.write, old, content[50:])
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
        refuses(RefusalCode.BUSY, upload.write, turn, b"x")
        refuses(RefusalCode.BUSY, upload.restart)
        refuses(RefusalCode.BUSY, service.contributions.commit, hand.ticket, hand.key, digest, report())
    assert service.contributions.commit(hand.ticket, hand.key, digest, report()).verdict == "applied"
    assert len(tape(tmp_path / "run")) == 1
