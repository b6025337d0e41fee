"""How a run starts and ends in the service: a model from outside, the last arrival, a stop, a full disk."""

import math
from functools import partial

import pytest
import torch

from heloco.cluster.protocol.link import digest_of
from heloco.cluster.protocol.messages import Ended, ModelCommit
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.server.open_run import external_run
from heloco.run import RunFolder
from heloco.wire.layout import Layout, pieces_after
from support.disks import fill_disk
from support.local_link import LocalLink
from support.service_checks import refuses, state
from support.small_cluster import NAMES, Hand, config, delta, model, opened

# ---- ends


def test_the_last_arrival_ends_the_run_and_what_comes_later_is_told(tmp_path, clock):
    service = opened(tmp_path / "run", clock, arrivals=2)
    hand, late = Hand(service, "m"), Hand(service, "late")
    late.take()
    hand.work(1)
    key = hand.take() and hand.key
    ack = hand.hand_in(delta(2))
    assert service.state.ended.kind == "finished"
    refuses(RefusalCode.ENDED, late.hand_in, delta(3))
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
    refuses(RefusalCode.ENDED, hand.hand_in, delta(2))
    service.close()
    service = opened(tmp_path / "run", clock)
    assert service.state.run.digest() == digest and not service.state.run.synchronizer.rounds_under_way


def test_a_full_disk_is_told_and_the_run_goes_on_when_there_is_space(small_disk, clock):
    service = opened(small_disk / "run", clock)
    hand = Hand(service, "m")
    hand.work(1)
    hand.take()
    before = state(service)
    fill_disk(small_disk / "ballast")
    assert "free some space" in refuses(RefusalCode.DISK, hand.hand_in, delta(2)).text
    assert state(service) == before
    (small_disk / "ballast").unlink()
    assert hand.hand_in(delta(2)).verdict == "applied"
    assert not service.state.has_failed
    service.close()


def test_a_run_on_a_full_disk_is_stopped_without_a_checkpoint_and_goes_on_from_its_journal(small_disk, clock):
    service = opened(small_disk / "run", clock, checkpoint_every=0)
    Hand(service, "m").work(1)
    digest = service.state.run.digest()
    fill_disk(small_disk / "ballast", 4096)
    service.admin.stop("enough")
    assert service.state.ended == Ended(kind="stopped", text="enough")
    assert RunFolder.open(small_disk / "run").checkpoints()[-1].name == "arrival-00000000"
    service.close()
    (small_disk / "ballast").unlink()
    service = opened(small_disk / "run", clock, checkpoint_every=0)
    assert service.state.run.digest() == digest
    Hand(service, "n").work(2)
    service.close()


def test_a_checkpoint_that_finds_no_room_is_tried_again_after_a_while(small_disk, clock):
    service, run = opened(small_disk / "run", clock, checkpoint_every=1), RunFolder.open(small_disk / "run")
    Hand(service, "m").work(1)
    fill_disk(small_disk / "ballast", 4096)
    service.housekeeping.save_if_due(wait=True)
    (small_disk / "ballast").unlink()
    for passed_s in (0.0, 1.0, 5.0):
        clock.now += passed_s
        service.housekeeping.save_if_due()
        assert service.state.run.checkpoint_under_way is None
    clock.now += 5.0
    service.housekeeping.save_if_due()
    service.housekeeping.save_if_due(wait=True)
    assert run.checkpoints()[-1].name == "arrival-00000001"
    service.close()


# ---- a model from outside


def test_the_first_machine_brings_the_model_and_others_must_have_the_same(tmp_path):
    service = external_run(config(), tmp_path / "run")
    link, layout = LocalLink(service), Layout.from_tensors(model())
    refuses(RefusalCode.NO_MODEL, link.join, "m", returning=None, layout=None)
    join_answer = link.join("m", returning=None, layout=layout)
    assert join_answer.needs_model
    assert service.rounds.next(join_answer.ticket).kind == "no-model"
    bad = {**model(), "parameter.1": torch.full((4,), math.nan)}
    refuses(RefusalCode.NOT_FINITE, link.send_model, join_answer.ticket, layout, bad, NAMES)
    link.send_model(join_answer.ticket, layout, model(), NAMES)
    refuses(RefusalCode.HAS_MODEL, link.send_model, join_answer.ticket, layout, model(), NAMES)
    other = Layout.from_tensors({**model(), "parameter.0": torch.zeros(5, 4)})
    assert (
        "parameter.0 is F32 [5, 4] and not F32 [5, 3]"
        in refuses(RefusalCode.LAYOUT, link.join, "m", returning=None, layout=other).text
    )
    assert not link.join("n", returning=None, layout=layout).needs_model
    service.close()


def test_a_disk_that_is_full_when_the_model_has_arrived_is_told_and_the_same_model_begins_the_run_later(small_disk, clock):
    """Whatever is the first thing that finds no room."""
    layout, refusals, room = Layout.from_tensors(model()), 0, 0
    while True:
        service = external_run(config(), small_disk / f"run{room}", clock=clock)
        link = LocalLink(service)
        ticket = link.join("m", returning=None, layout=layout).ticket
        upload = service.models.upload(ticket, layout)
        for piece in pieces_after(0, layout, model()):
            upload.write(upload.begin(upload.size), piece)
        fill_disk(small_disk / "ballast", room)
        begin = partial(service.models.commit, ticket, ModelCommit(names=tuple(NAMES), digest=digest_of(layout, model())))
        try:
            begin()
        except Refused as refusal:
            assert refusal.code is RefusalCode.DISK and "free some space" in refusal.text
            refusals += 1
            (small_disk / "ballast").unlink()
            begin()
        (small_disk / "ballast").unlink(missing_ok=True)
        assert service.state.run is not None and not service.state.has_failed
        Hand(service, "n").work(1)
        service.close()
        if refusals <= room // 4096:  # this time there was room enough
            break
        room += 4096
    assert refusals > 1


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
