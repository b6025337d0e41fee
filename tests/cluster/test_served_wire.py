"""Contributions to a served run travel and are kept in a format of few bits, and what the codes leave out is counted once."""

import math

import pytest
import torch
from msgspec.structs import replace

from heloco.cluster.client.run_client import NotHeld
from heloco.cluster.protocol.link import LinkDown, digest_of
from heloco.cluster.protocol.refusals import RefusalCode
from heloco.cluster.server.open_run import rebuild
from heloco.cluster.server.replay import replay
from heloco.cluster.server.rollback import Rollback
from heloco.disk import file_digest
from heloco.engine.local import LocalRun
from heloco.errors import UserError
from heloco.records.journal_reader import FOLDER, contribution_numbers, contribution_path
from heloco.run import RunFolder, with_fields
from heloco.wire import blocks
from heloco.wire.encoder import NO_ROUND
from heloco.wire.formats import FORMATS, FULL, layout_of
from heloco.wire.layout import Layout, pieces
from support.coded_runs import ByHand, delta, joined, model, opened
from support.gateways import train
from support.local_link import LocalLink
from support.runs import tape
from support.service_checks import refuses, state
from support.small_cluster import NO_DIGEST, Hand, report

ONE_SEAT = {"paces": [1.0]}
pytestmark = pytest.mark.usefixtures("one_thread")


# ---- what arrives is what was encoded


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_three_machines_give_what_the_outer_rule_gives_by_hand_to_the_bit(tmp_path, clock, name, rounding):
    service = opened(tmp_path / "run", clock, wire=name, rounding=rounding)
    hand = ByHand(wire=name, rounding=rounding)
    encoders = [hand.encoder(worker) for worker in range(3)]
    with joined(service, "a") as a, joined(service, "b") as b, joined(service, "c") as c:
        for number in range(9):
            machine, worker = (a, b, c)[number % 3], number % 3
            ack = machine.work(number)
            assert (ack.verdict, ack.worker, ack.round) == ("applied", worker, number // 3)
            weight = tape(tmp_path / "run")[-1]["weight"]
            hand.apply(encoders[worker], ack.round, number, last_accepted=ack.round - 1, weight=weight)
    assert hand.equals(service)
    digest = service.state.run.digest()
    service.close()
    replayed = replay(RunFolder.open(tmp_path / "run"), None)
    assert (replayed.lines, replayed.difference, replayed.digest) == (9, None, digest)


def test_the_journal_keeps_the_codes_as_they_came_and_the_tape_counts_their_bytes(tmp_path, clock):
    service = opened(tmp_path / "run", clock, **ONE_SEAT)
    sent = []

    class Recording(LocalLink):
        def hand_in(self, ticket, key, layout, tensors, report):
            sent.append(digest_of(layout, tensors))
            return super().hand_in(ticket, key, layout, tensors, report)

    with joined(service, link=Recording(service)) as machine:
        for seed in range(3):
            machine.work(seed)
    run = service.state.run
    folder = run.journal.folder
    kept = [contribution_path(folder, number) for number in sorted(contribution_numbers(folder))]
    assert [file_digest(path) for path in kept] == sent
    whole = layout_of(FULL, blocks.PSEUDO_GRADIENT, run.synchronizer.parameters, run.synchronizer.buffers)
    assert {line["bytes_up"] for line in tape(tmp_path / "run")} == {run.contribution_layout.size}
    assert {path.stat().st_size for path in kept} == {run.contribution_layout.size}
    numbers = 20 * 300
    assert whole.size - run.contribution_layout.size == pytest.approx(numbers * (4 - 4.25 / 8), rel=0.02)
    service.close()


@pytest.mark.parametrize(
    "options", [{"wire": "int4"}, {"wire": "e3m0", "rounding": "stochastic", "feedback_decay": 0.9}], ids=str
)
def test_a_served_run_of_one_machine_is_the_simulation_of_the_same_rounds_to_the_bit(serve, tiny, options):
    served = serve(arrivals=6, eval_every=0, **ONE_SEAT, **options)
    assert train((tiny[0], served.service.state.config), served.link(), "m") == "The run has ended: all arrivals are in"
    config = with_fields(tiny[1], {"arrivals": 6, "eval_every": 0, "wire_down": "fp32", **ONE_SEAT, **options})
    simulated = LocalRun(tiny[0], config)
    simulated.run()
    ours, theirs = served.service.state.run.synchronizer.thetas, simulated.synchronizer.thetas
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_rollback_and_a_restart_read_the_codes_again(tmp_path, clock):
    folder = tmp_path / "run"
    service = opened(folder, clock, **ONE_SEAT, checkpoint_every=0)
    with joined(service) as machine:
        digests = [machine.work(seed) and service.state.run.digest() for seed in range(6)]
    service.close()
    service = opened(folder, clock, **ONE_SEAT, checkpoint_every=0)
    assert service.state.run.digest() == digests[-1]
    service.close()
    opened_folder = RunFolder.open(folder)
    Rollback(opened_folder, to=4).run(lambda new: rebuild(new, opened_folder, None))
    service = opened(folder, clock, **ONE_SEAT, checkpoint_every=0)
    assert service.state.run.digest() == digests[3]
    service.close()


# ---- what the codes leave out


@pytest.fixture
def one_seat(tmp_path, clock):
    service = opened(tmp_path / "run", clock, **ONE_SEAT)
    yield service
    service.close()


def weights(service):
    return [line["weight"] for line in tape(service.state.folder) if line["verdict"] != "refused"]


def test_a_contribution_that_is_sent_again_is_encoded_once(one_seat):
    class Cut(LocalLink):
        """Each contribution arrives, is cut before that, or loses its answer, in turn."""

        tries = 0

        def hand_in(self, *arguments):
            Cut.tries += 1
            if Cut.tries % 3 == 1:
                raise LinkDown("cut before it arrived.")
            ack = super().hand_in(*arguments)
            if Cut.tries % 3 == 2:
                raise LinkDown("cut after it arrived.")
            return ack

    hand, encoder = ByHand(workers=1), ByHand().encoder(0)
    with joined(one_seat, link=Cut(one_seat)) as machine:
        for seed in range(3):
            assert machine.work(seed).round == seed
            hand.apply(encoder, seed, seed, last_accepted=seed - 1, weight=weights(one_seat)[-1])
    assert Cut.tries == 9 and len(tape(one_seat.state.folder)) == 3
    assert hand.equals(one_seat)


def test_after_a_refused_or_abandoned_round_the_next_is_encoded_without_what_was_left_out(one_seat, clock):
    hand, encoder = ByHand(workers=1), ByHand().encoder(0)
    with joined(one_seat) as machine:
        machine.work(0)
        hand.apply(encoder, 0, 0, last_accepted=NO_ROUND, weight=weights(one_seat)[-1])
        machine.take()
        broken = delta(1)
        broken[0][3, 5] = math.nan
        with pytest.raises(NotHeld, match="a scale is not a number above 0"):
            machine.hand_in(broken)
        clock.now += 100.0  # after a round that was not accepted the next one comes later
        assert machine.work(2).round == 2
        fresh = hand.encoder(0)
        hand.apply(fresh, 2, 2, last_accepted=NO_ROUND, weight=weights(one_seat)[-1])
        assert hand.equals(one_seat)

        machine.take()
        machine.client.abandon("it was asked to")
        clock.now += 100.0
        assert machine.work(3).round == 4  # nothing was encoded in the round between, and round 2 is still the last accepted one
        hand.apply(fresh, 4, 3, last_accepted=2, weight=weights(one_seat)[-1])
    assert hand.equals(one_seat)


def test_a_contribution_that_the_norm_guard_refuses_takes_what_it_left_out_with_it(tmp_path, clock):
    service = opened(tmp_path / "run", clock, norm_limit=5.0, norm_policy="refuse", **ONE_SEAT)
    hand, encoder = ByHand(workers=1), ByHand().encoder(0)
    with joined(service) as machine:
        for seed in range(8):
            machine.work(seed)
            hand.apply(encoder, seed, seed, last_accepted=seed - 1, weight=weights(service)[-1])
        assert hand.equals(service)
        assert machine.work(8, size=100.0).verdict == "refused"
        clock.now += 100.0
        assert machine.work(9).verdict == "applied"
        hand.apply(hand.encoder(0), 9, 9, last_accepted=NO_ROUND, weight=weights(service)[-1])
    assert hand.equals(service)
    service.close()


def test_when_a_seat_changes_hands_nobody_adds_what_an_older_round_left_out(one_seat):
    hand = ByHand(workers=1)
    first, second = hand.encoder(0), hand.encoder(0)
    with joined(one_seat, "first") as a:
        a.work(0)
        hand.apply(first, 0, 0, last_accepted=NO_ROUND, weight=weights(one_seat)[-1])
        one_seat.members.leave(a.ticket, "its network was cut")
        with joined(one_seat, "second") as b:
            for index in (1, 2):
                assert b.work(index).round == index
                hand.apply(second, index, index, last_accepted=index - 1, weight=weights(one_seat)[-1])
        assert a.work(3).round == 3  # it comes back by itself, with what its codes left out of round 0
        hand.apply(hand.encoder(0), 3, 3, last_accepted=NO_ROUND, weight=weights(one_seat)[-1])
    assert hand.equals(one_seat)


@pytest.mark.parametrize("arrivals", [4, 6])
def test_a_restart_of_the_synchronizer_loses_nothing_of_what_a_machine_left_out(tmp_path, clock, arrivals):
    """From its checkpoint (at 4) and from the journal after it."""
    service = opened(tmp_path / "run", clock, **ONE_SEAT)
    hand, encoder = ByHand(workers=1), ByHand().encoder(0)
    link = LocalLink(service)
    with joined(service, link=link) as machine:
        for seed in range(arrivals + 2):
            if seed == arrivals:
                service.housekeeping.save_if_due(wait=True)
                service.close()
                link.service = service = opened(tmp_path / "run", clock, **ONE_SEAT)
            assert machine.work(seed).round == seed
            service.housekeeping.save_if_due(wait=True)
            hand.apply(encoder, seed, seed, last_accepted=seed - 1, weight=weights(service)[-1])
    assert hand.equals(service)
    service.close()


def test_a_machine_whose_process_is_started_again_begins_without_what_was_left_out(one_seat):
    hand = ByHand(workers=1)
    with joined(one_seat) as machine:
        machine.work(0)
        hand.apply(hand.encoder(0), 0, 0, last_accepted=NO_ROUND, weight=weights(one_seat)[-1])
        with joined(one_seat, returning=machine.ticket) as again:
            assert again.ticket == machine.ticket
            assert again.take()[:2] == (0, 1)
            again.hand_in(delta(1))
            hand.apply(hand.encoder(0), 1, 1, last_accepted=NO_ROUND, weight=weights(one_seat)[-1])
    assert hand.equals(one_seat)


@pytest.mark.parametrize("seats", [4, 5])
def test_a_machine_keeps_what_its_codes_left_out_for_four_workers(tmp_path, clock, seats):
    """With five it comes to each again only after it was dropped."""
    service = opened(tmp_path / "run", clock, paces=[1.0] * seats)
    hand = ByHand(workers=seats)
    encoders = [hand.encoder(worker) for worker in range(seats)]
    with joined(service) as machine:
        for seed in range(3 * seats):
            ack = machine.work(seed)
            assert (ack.worker, ack.round) == (seed % seats, seed // seats)
            encoder, last = (encoders[ack.worker], ack.round - 1) if seats == 4 else (hand.encoder(ack.worker), NO_ROUND)
            hand.apply(encoder, ack.round, seed, last_accepted=last, weight=weights(service)[-1])
    assert hand.equals(service)
    service.close()


# ---- what is wrong is refused by name


def encoded(service, seed=1):
    """The tensors of a right contribution."""
    codes = ByHand(wire=service.state.config.links.wire).encoder(0).encode(0, delta(seed), last_accepted=NO_ROUND)
    return codes | {"buffer.0": torch.ones(3)}


@pytest.mark.parametrize("name", ["int8", "int4", "e3m0", "topk"])
@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, 3e38])
def test_a_scale_that_makes_no_sense_is_refused_before_anything_is_stored(tmp_path, clock, name, scale):
    service = opened(tmp_path / "run", clock, wire=name)
    hand = Hand(service, "m")
    first = hand.take()
    wrong = encoded(service)
    wrong["scale.0"][-1, -1] = scale
    before = service.state.run.digest()
    refuses(RefusalCode.NOT_FINITE, hand.hand_in, wrong)
    assert service.state.run.digest() == before and not contribution_numbers(service.state.run.journal.folder)
    second_round = hand.take()
    assert (second_round.round, second_round.spans) == (first.round + 1, first.spans)
    assert hand.hand_in(encoded(service)).verdict == "applied"
    service.close()


def test_nan_in_a_block_that_travels_as_it_is_is_refused_too(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    hand = Hand(service, "m")
    hand.take()
    wrong = encoded(service)
    wrong["pseudo_gradient.1"][7] = math.nan
    refuses(RefusalCode.NOT_FINITE, hand.hand_in, wrong)
    assert not contribution_numbers(service.state.run.journal.folder)
    service.close()


def test_another_format_and_a_file_of_another_length_are_refused_and_change_nothing(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    hand = Hand(service, "m")
    hand.take()
    synchronizer = service.state.run.synchronizer
    before, right = state(service), b"".join(pieces(service.state.run.contribution_layout, encoded(service)))

    def sent(content):
        upload = service.contributions.upload(hand.ticket, hand.key)
        upload.write(upload.begin(upload.size), content)
        return service.contributions.commit(hand.ticket, hand.key, upload.digest(), report())

    for name in FORMATS.keys() - {"int4"}:
        layout = layout_of(FORMATS[name], blocks.PSEUDO_GRADIENT, synchronizer.parameters, synchronizer.buffers)
        refuses(RefusalCode.LAYOUT, sent, layout.header)
    refuses(RefusalCode.TOO_LONG, sent, right + b"x")
    refuses(RefusalCode.INCOMPLETE, sent, right[:-1])
    upload = service.contributions.upload(hand.ticket, hand.key)
    upload.write(upload.begin(len(right) - 1), right[-1:])
    refuses(RefusalCode.CORRUPTED, service.contributions.commit, hand.ticket, hand.key, NO_DIGEST, report())
    assert state(service) == before
    assert sent(right).verdict == "applied"
    service.close()


def test_a_machine_that_does_not_know_the_format_says_so(tmp_path, clock):
    service = opened(tmp_path / "run", clock)

    class Newer(LocalLink):
        def join(self, *arguments, **options):
            answer = super().join(*arguments, **options)
            return replace(answer, terms=replace(answer.terms, wire="int3"))

    with pytest.raises(UserError, match="travel in the format 'int3', which this version of heloco does not have"):
        joined(service, link=Newer(service)).__enter__()
    assert not contribution_numbers(tmp_path / "run" / FOLDER)
    service.close()


def test_the_model_of_the_tests_is_what_the_run_holds(tmp_path, clock):
    service = opened(tmp_path / "run", clock)
    assert service.state.starts.layout == Layout.from_tensors(model())
    service.close()
