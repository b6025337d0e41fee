"""The scores of an external run as events of its journal: after restarts, rollbacks, and machines that come and go."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import heloco
from heloco.cluster.protocol.messages import Assignment, EvaluationJob, Ticket
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.protocol.score_messages import EvaluationResult, ScoreReport
from heloco.cluster.server.open_run import rebuild
from heloco.cluster.server.replay import replay
from heloco.cluster.server.rollback import Rollback
from heloco.cluster.server.service import Service
from heloco.records.events import Evaluate
from heloco.records.journal_reader import FOLDER, read_events
from heloco.run import RunFolder
from support.local_link import LocalLink
from support.own_loops import adam, batches, external_runs, net, quiet, step, tape
from support.runs import evals
from support.sentences import reword_all
from support.small_cluster import Clock, Hand, delta, opened


def report(hand: Hand, own_steps: int, loss: float) -> None:
    assert hand.key is not None
    hand.link.report_scores(
        hand.ticket, ScoreReport(**hand.key._asdict(), own_steps=own_steps, scores={"validation": {"loss": loss}})
    )


def start(folder: Path, **settings: Any) -> Service:
    return opened(folder, Clock(), **{"paces": [1.0], "eval_every": 2, "min_workers": 1, **settings})


def next_job(service: Service, hand: Hand) -> EvaluationJob:
    """The model that the machine is to evaluate. Its copy is written by then."""
    assert service.state.run is not None
    service.state.run.readers.wait()
    answer = service.evaluation.next(hand.ticket, True)
    assert isinstance(answer, EvaluationJob)
    return answer


def send(service: Service, ticket: Ticket, arrival: int, loss: float) -> None:
    service.evaluation.take_in(ticket, EvaluationResult(arrival=arrival, scores={"validation": {"loss": loss}}))


@pytest.mark.parametrize("checkpoint_every", [0, 2])
def test_an_evaluation_that_is_due_is_handed_out_again_after_a_restart(tmp_path, checkpoint_every):
    folder = tmp_path / "run"
    service = start(folder, checkpoint_every=checkpoint_every)
    hand = Hand(service, "gpu")
    service.evaluation.next(hand.ticket, True)  # what the run begins with is due
    for seed in range(3):
        assert isinstance(hand.take(), Assignment)
        if seed == 1:
            report(hand, 0, 7.0)  # at arrival 1: what was due at arrival 0 is not any more
            report(hand, 1, 8.0)
        hand.hand_in(delta(seed))
        service.housekeeping.save_if_due(wait=True)
    assert next_job(service, hand).arrival == 2
    service.close()
    before = evals(folder)
    assert [(line["arrival"], line.get("own_steps", 0)) for line in before] == [(1, 0), (1, 1)]
    service = start(folder, checkpoint_every=checkpoint_every)
    assert evals(folder) == before
    hand.service = service
    hand.join()
    job = next_job(service, hand)
    assert job.arrival == 2
    model = hand.link.fetch_evaluated(hand.ticket, job, service.state.run.start_layout)
    digest = xxhash.xxh3_64()
    for i in range(2):
        digest.update(model[f"parameter.{i}"].contiguous().view(-1).view(torch.uint8).numpy().data)
    assert digest.hexdigest() == tape(service)[1]["digest"]
    with pytest.raises(Refused) as refused:  # the names of scores are known after a restart, too
        service.evaluation.take_in(hand.ticket, EvaluationResult(arrival=2, scores={"test": {"loss": 1.0}}))
    assert refused.value.code is RefusalCode.SCORES
    for _ in range(2):  # an answer may be lost, and the request repeated
        send(service, hand.ticket, 2, 9.0)
    assert isinstance(service.next(hand.ticket, evaluates=True), Assignment)
    service.close()
    lines = evals(folder)
    assert lines[:2] == before and [(line["arrival"], line["mean"]["loss"]) for line in lines[2:]] == [(2, 9.0)]
    start(folder, checkpoint_every=checkpoint_every).close()
    assert evals(folder) == lines


def test_lines_that_are_lost_are_made_again_from_the_journal(tmp_path):
    folder = tmp_path / "run"
    service = start(folder, checkpoint_every=0)
    hand = Hand(service, "m")
    for seed in range(3):
        hand.take()
        report(hand, 0, float(seed))
        report(hand, 2, seed + 0.5)
        hand.hand_in(delta(seed))
    service.close()
    lines = evals(folder)
    assert [line["mean"]["loss"] for line in lines] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
    (folder / "evals.jsonl").write_text("")
    start(folder, checkpoint_every=0).close()
    assert evals(folder) == lines
    result = replay(RunFolder.open(folder), None)
    assert result.difference is None


def test_a_rollback_keeps_the_scores_that_are_still_true(tmp_path):
    folder = tmp_path / "run"
    service = start(folder, checkpoint_every=2, paces=[1.0, 1.0])
    good, bad = Hand(service, "good"), Hand(service, "bad")
    for seed in range(6):
        hand = (good, bad)[seed % 2]
        hand.take()
        report(hand, 0, float(seed))
        hand.hand_in(delta(seed))
        service.housekeeping.save_if_due(wait=True)
    service.close()
    run = RunFolder.open(folder)
    result = Rollback(run, to=3, without=frozenset({"bad"})).run(lambda target: rebuild(target, run, None))
    assert (result.arrivals, result.left_out) == (4, 2)
    assert [line["arrival"] for line in evals(folder)] == [0, 1, 2, 3]
    assert sum(isinstance(event, Evaluate) for event, _ in read_events(folder / FOLDER)) == 4


def test_a_machine_that_is_gone_holds_up_neither_others_nor_the_end(tmp_path):
    folder = tmp_path / "run"
    service = start(folder, arrivals=3, paces=[1.0, 1.0])
    one, two = Hand(service, "one"), Hand(service, "two")
    service.evaluation.next(one.ticket, True)
    job = next_job(service, one)
    assert job.arrival == 0 and service.evaluation.next(two.ticket, True) is None  # one machine at a time
    one.leave()
    assert next_job(service, two) == job
    with pytest.raises(Refused) as refused:
        one.link.fetch_evaluated(one.ticket, job, service.state.run.start_layout)
    assert refused.value.code is RefusalCode.UNKNOWN_MACHINE
    for seed in range(3):
        two.work(seed)
    two.leave()
    service.finish_evaluations()  # nobody is here who could make them
    assert service.admin.status().evaluations_due == 0 and evals(folder) == []
    service.close()


def test_a_spare_without_a_round_evaluates_one_model_after_the_other(tmp_path):
    service = start(tmp_path / "run", eval_every=1)
    trainer, spare = Hand(service, "trainer"), Hand(service, "spare")
    service.evaluation.next(spare.ticket, True)
    losses = []
    for arrival in range(3):
        service.state.run.readers.wait()
        job = service.next(spare.ticket, evaluates=True)
        assert isinstance(job, EvaluationJob) and job.arrival == arrival
        send(service, spare.ticket, arrival, float(arrival))
        losses.append(float(arrival))
        if arrival < 2:
            trainer.work(arrival)
    assert [line["mean"]["loss"] for line in evals(tmp_path / "run")] == losses
    service.close()


def test_scores_for_a_round_that_the_machine_does_not_hold_are_refused(tmp_path):
    service = start(tmp_path / "run")
    hand = Hand(service, "m")
    hand.take()
    key = hand.key
    hand.abandon()
    with pytest.raises(Refused) as refused:
        hand.link.report_scores(hand.ticket, ScoreReport(**key._asdict(), own_steps=0, scores={"v": {"loss": 1.0}}))
    assert refused.value.code is RefusalCode.NOT_HELD and evals(tmp_path / "run") == []
    service.close()


# ---- codes decide


def take_part(service: Service) -> tuple[Any, ...]:
    """A loop of one's own, until its run has ended. Two of its evaluations give no score, and no report is taken."""
    model, scores = net(), iter([1.0, math.nan, None, 4.0, 5.0])
    optimizer = adam(model)
    with heloco.join(LocalLink(service), model, optimizer, tell=quiet, evaluate=lambda _: next(scores)) as run:
        for batch in batches():
            run.report_eval(math.nan)
            step(model, optimizer, batch)
    service.finish_evaluations()
    lines = evals(service.state.folder)
    return run.ended, [line["digest"] for line in tape(service)], [(line["arrival"], line["mean"]["loss"]) for line in lines]


@pytest.mark.parametrize("reword", [lambda _: "", lambda _: "all is well", lambda text: f"the run has ended: {text}"])
def test_refused_scores_take_the_same_course_whatever_the_sentences_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reword: Callable[[str], str]
) -> None:
    with external_runs(tmp_path) as serve:
        expected = take_part(serve("as-it-is", eval_every=1))
        assert expected[0] and len(expected[1]) == 4 and expected[2] == [(0, 1.0), (3, 4.0), (4, 5.0)]
        assert "EvaluationResult" in reword_all(monkeypatch, reword)
        assert take_part(serve("reworded", eval_every=1)) == expected
