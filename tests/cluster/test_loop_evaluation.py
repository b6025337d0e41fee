"""External runs that are evaluated: by a machine that offers it between its rounds, or by what a loop reports."""

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import nn

import heloco
from heloco.cluster.protocol.messages import Assignment, EvaluationJob, Ticket, decode, encode
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
from support.own_loops import DEADLINE_S, adam, batches, external_runs, in_threads, loss_of, net, quiet, step, tape
from support.runs import evals
from support.scored_runs import served, task
from support.small_cluster import Clock, Hand, delta, opened

HELD_OUT = next(batches(seed=99))


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    with external_runs(tmp_path) as start:
        yield start


def held_out_loss(model: nn.Module) -> float:
    return float(loss_of(model, HELD_OUT))


def digest_of(model: nn.Module) -> str:
    """As on the tape."""
    digest = xxhash.xxh3_64()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Travelling(LocalLink):
    """Its scores are messages, as over a network."""

    def send_scores(self, ticket: Ticket, result: EvaluationResult) -> None:
        super().send_scores(ticket, decode(encode(result), EvaluationResult))


def train(service: Service, model: nn.Module | None = None, tell: Callable[[str], Any] = quiet, **options: Any) -> nn.Module:
    """A loop that takes part until the run has ended. The model is the run's afterwards."""
    model = model or net()
    optimizer = adam(model)
    with heloco.join(Travelling(service), model, optimizer, tell=tell, **options):
        for batch in batches():
            step(model, optimizer, batch)
    service.finish_evaluations()
    return model


# ---- evaluate=


def test_a_machine_scores_the_runs_model_every_few_arrivals(serve):
    scored: list[tuple[str, float]] = []

    def evaluate(model: nn.Module) -> float:
        assert not model.training and not torch.is_grad_enabled()
        scored.append((digest_of(model), held_out_loss(model)))
        return scored[-1][1]

    service = serve(arrivals=8, eval_every=2)
    before = digest_of(net()), held_out_loss(net())
    final = train(service, evaluate=evaluate)
    digests = {line["arrival"]: line["digest"] for line in tape(service)}
    lines = evals(service.state.folder)
    assert [line["arrival"] for line in lines] == [0, 2, 4, 6, 8] and len(scored) == 5
    assert scored[0] == before and scored[-1] == (digest_of(final), held_out_loss(final))
    for line, (digest, loss) in zip(lines[1:], scored[1:], strict=True):
        assert digest == digests[line["arrival"]]
        assert line["scores"] == {"validation": {"loss": loss}} and line["mean"] == {"loss": loss}
        assert line["machine"] == tape(service)[0]["machine"] and "own_steps" not in line
        assert line["time_s"] == tape(service)[line["arrival"] - 1]["time_s"]
        assert (line["inner_steps"], line["outer_step"]) == (3 * line["arrival"], line["arrival"])
    assert not list((service.state.folder / "evaluating").iterdir())


class Uneasy(nn.Module):
    """Depends on its mode, on random numbers and on buffers, one of which never leaves this machine and one is replaced."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.3), nn.Linear(5, 1))
        self.frozen_part = nn.BatchNorm1d(1).eval()
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.frozen_part(self.layers(x)) + 1e-3 * self.calls


def test_an_evaluation_leaves_the_loop_as_it_was(serve):
    """Parameters, optimizer, buffers, modes and random numbers: the training is the same to the bit."""

    def evaluate(model: nn.Module) -> float:
        assert not any(module.training for module in model.modules())
        model.layers[1].running_mean.add_(7)
        model.calls = model.calls + 100
        with torch.no_grad():
            model.layers[0].weight.mul_(torch.rand(()))  # what it is worth: nothing of it stays
        model.train()
        return held_out_loss(model) + float(torch.rand(()))

    digests, finals = [], []
    for name, options in (("plain", {}), ("evaluated", {"evaluate": evaluate})):
        model = Uneasy()
        modes = [module.training for module in model.modules()]
        service = serve(name, arrivals=6, eval_every=1)
        torch.manual_seed(1)
        finals.append(train(service, model, **options))
        assert [module.training for module in model.modules()] == modes
        digests.append([line["digest"] for line in tape(service)])
    assert digests[0] == digests[1]
    for before, after in zip(finals[0].state_dict().values(), finals[1].state_dict().values(), strict=True):
        assert torch.equal(before, after)
    assert torch.equal(finals[0].calls, finals[1].calls)
    assert len(evals(service.state.folder)) == 7


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (1.5, {"validation": {"loss": 1.5}}),
        (torch.tensor(1.5), {"validation": {"loss": 1.5}}),
        ({"de": 1.0, "en": 2.0}, {"de": {"loss": 1.0}, "en": {"loss": 2.0}}),
        ({"loss": 1.0, "accuracy": 0.5}, {"validation": {"loss": 1.0, "accuracy": 0.5}}),
        (
            {"de": {"loss": 1.0, "bleu": 3}, "en": {"loss": 2.0, "bleu": 4}},
            {"de": {"loss": 1, "bleu": 3}, "en": {"loss": 2, "bleu": 4}},
        ),
    ],
)
def test_scores_are_a_loss_or_have_names(serve, scores, expected):
    service = serve(arrivals=1)
    train(service, evaluate=lambda _: scores)
    lines = evals(service.state.folder)
    assert [line["arrival"] for line in lines] == [0, 1] and all(line["scores"] == expected for line in lines)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (math.nan, "The score 'loss' of 'validation' is not finite, so it is not recorded."),
        ({"loss": -math.inf}, "The score 'loss' of 'validation' is not finite, so it is not recorded."),
        ("low", "The score 'loss' is 'low', which is no number."),
        (True, "The score 'loss' is True, which is no number."),
        (None, "The score 'loss' is None, which is no number."),
        ({1: 2.0}, "The name of a score is 1: give names as texts."),
        ({}, "An evaluation has 1 to 100 scores, and this one has 0."),
        ({f"n{i}": 1.0 for i in range(101)}, "An evaluation has 1 to 100 scores, and this one has 101."),
        ({"other": 1.0}, "The run's evaluations have the scores loss of validation, and these are loss of other: give"),
        ({"loss": 1.0, "more": 1.0}, "The run's evaluations have the scores loss of validation, and these are loss, more of"),
        ({"a": {"loss": 1.0}, "b": {"x": 1.0}}, "The task's evaluation gave"),
        ({"\x1b[2J": 1.0}, "The name of a score has characters that cannot be shown: give it another name."),
        ({"x" * 101: 1.0}, "The message is malformed"),
        (RuntimeError("no more memory"), "evaluate failed (RuntimeError: no more memory)."),
    ],
)
def test_scores_that_cannot_be_taken_are_refused_and_end_nothing(tmp_path, bad, reason):
    """The first and the last evaluation are good, those between are not."""
    told: list[str] = []
    calls = 0

    def evaluate(_: nn.Module) -> Any:
        nonlocal calls
        calls += 1
        if calls in (1, 5):
            return 1.0
        if isinstance(bad, Exception):
            raise bad
        return bad

    with external_runs(tmp_path) as serve:
        service = serve(arrivals=8, eval_every=2)
        train(service, tell=told.append, evaluate=evaluate)
        assert [line["arrival"] for line in evals(service.state.folder)] == [0, 8] and calls == 5
        assert service.state.ended is not None and service.state.ended.kind == "finished"
    lines = [line for line in told if "is left out" in line]
    assert len(lines) == 3 and lines[0].startswith(f"The evaluation at arrival 2 is left out. {reason}"), told


def test_without_a_machine_that_evaluates_the_run_goes_on_without(serve):
    service = serve(arrivals=6, eval_every=1)
    train(service)
    assert evals(service.state.folder) == [] and not list((service.state.folder / "evaluating").iterdir())
    assert service.admin.status().evaluations_due == 0


def test_of_two_machines_one_evaluates(serve):
    service, evaluated = serve(arrivals=12, paces=[1.0, 1.0], eval_every=3), []
    both_are_there = threading.Barrier(2)

    def loop(name: str, **options: Any) -> None:
        model = net()
        optimizer = adam(model)
        with heloco.join(LocalLink(service), model, optimizer, name=name, tell=quiet, **options):
            both_are_there.wait(DEADLINE_S)
            for batch in batches():
                step(model, optimizer, batch)

    in_threads(lambda: loop("scores", evaluate=lambda model: evaluated.append(digest_of(model)) or 1.0), lambda: loop("trains"))
    service.finish_evaluations()
    lines, digests = evals(service.state.folder), {line["arrival"]: line["digest"] for line in tape(service)}
    assert {line["machine"].partition("#")[0] for line in lines} == {"scores"}
    assert [line["arrival"] for line in lines] == [0, 3, 6, 9, 12]
    assert evaluated[1:] == [digests[line["arrival"]] for line in lines[1:]]


def test_a_run_with_a_task_of_its_own_is_not_evaluated_by_a_loop(tmp_path):
    service = served(tmp_path / "own", task())
    model = task().build_model()
    with pytest.raises(heloco.UserError, match=r"^This run evaluates its model by its own task: leave evaluate out"):
        heloco.join(LocalLink(service), model, adam(model), evaluate=lambda _: 1.0, tell=quiet).__enter__()
    hand = Hand(service, "m")
    hand.take()
    with pytest.raises(Refused) as refused:
        hand.link.report_scores(hand.ticket, ScoreReport(**hand.key._asdict(), own_steps=0, scores={"a": {"loss": 1.0}}))
    assert refused.value.code is RefusalCode.SCORES
    service.close()


# ---- report_eval


def test_a_report_says_whose_parameters_it_is_of(serve):
    """Before a round's first step the model is the run's; then it is this machine's."""
    service, losses = serve(arrivals=4, inner_steps=3), {}
    model = net()
    optimizer = adam(model)
    with heloco.join(LocalLink(service), model, optimizer, tell=quiet) as run:
        for i, batch in enumerate(batches()):
            if i in (3, 4, 8):  # the second round before its first and its second step, and the third round before its last
                losses[i] = held_out_loss(model)
                run.report_eval(losses[i])
            step(model, optimizer, batch)
    lines = evals(service.state.folder)
    assert [(line["arrival"], line.get("own_steps", 0)) for line in lines] == [(1, 0), (1, 1), (2, 2)]
    assert [line["mean"]["loss"] for line in lines] == list(losses.values())
    assert {line["machine"] for line in lines} == {tape(service)[0]["machine"]}


def test_of_several_scores_of_one_arrival_the_first_stand(serve):
    service = serve(arrivals=3)
    model = net()
    optimizer = adam(model)
    with heloco.join(LocalLink(service), model, optimizer, tell=quiet, evaluate=held_out_loss) as run:
        for i, batch in enumerate(batches()):
            if i % 3 == 0:
                run.report_eval(100.0 + i)
                run.report_eval(200.0 + i)
            step(model, optimizer, batch)
    service.finish_evaluations()
    lines = evals(service.state.folder)
    arrivals = [line["arrival"] for line in lines]
    assert arrivals == sorted(set(arrivals)) == [0, 1, 2, 3]
    assert [line["mean"]["loss"] for line in lines[1:3]] == [103.0, 106.0]
    assert lines[3]["mean"]["loss"] == held_out_loss(model)


def test_reports_that_are_refused_are_told_and_the_loop_goes_on(serve):
    service, told = serve(arrivals=3), []
    model = net()
    optimizer = adam(model)
    with heloco.join(LocalLink(service), model, optimizer, tell=told.append, stop_at_end=False) as run:
        for i, batch in enumerate(batches()):
            for scores in ([1.0], [math.nan], [{"b": 1.0}], ["x"])[i] if i < 4 else []:
                run.report_eval(scores)
            step(model, optimizer, batch)
            if run.ended:
                run.report_eval(1.0)  # there is no round any more: nothing happens
                break
    assert len(evals(service.state.folder)) == 1
    refused = [line for line in told if line.startswith("The scores were not recorded. ")]
    assert [line.split(". ", 1)[1].split(" ")[:3] for line in refused] == [
        ["The", "score", "'loss'"], ["The", "run's", "evaluations"], ["The", "score", "'loss'"],
    ]  # fmt: skip


def test_without_an_address_a_report_does_nothing():
    model = net()
    with heloco.join(None, model, adam(model), evaluate=lambda _: 1.0) as run:
        run.report_eval(1.0)


# ---- restarts, the journal


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
    service = start(folder)
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
    start(folder).close()
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
    start(folder).close()
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


def test_a_loop_whose_round_was_lost_reports_nothing_and_goes_on(serve):
    service, told = serve(arrivals=3), []
    model = net()
    optimizer = adam(model)
    with heloco.join(LocalLink(service), model, optimizer, tell=told.append) as run:
        for i, batch in enumerate(batches()):
            if i == 1:
                [machine] = service.state.roster
                with service.state.changed:
                    service.rounds.give_up(machine, "expired", "it took too long")
                run.report_eval(1.0)
            step(model, optimizer, batch)
    assert evals(service.state.folder) == [] and len(tape(service)) == 3
    assert any(line.startswith("The scores were not recorded.") for line in told)
