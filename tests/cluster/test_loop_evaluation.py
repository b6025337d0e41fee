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
from heloco.cluster.protocol.link import LinkDown
from heloco.cluster.protocol.messages import EvaluationJob, Ticket, decode, encode
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.protocol.score_messages import EvaluationResult, ScoreReport
from heloco.cluster.server.service import Service
from support.local_link import LocalLink
from support.own_loops import DEADLINE_S, adam, batches, external_runs, in_threads, loss_of, net, quiet, step, tape
from support.runs import evals
from support.scored_runs import served, task
from support.small_cluster import Hand

HELD_OUT = next(batches(seed=99))


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    with external_runs(tmp_path) as start:
        yield start


def held_out_loss(model: nn.Module) -> float:
    with torch.no_grad():
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
        ({1: 2.0}, "The name of a score is 1: give it a text of 1 to 100 characters."),
        ({}, "An evaluation has 1 to 100 scores, and this one has 0."),
        ({f"n{i}": 1.0 for i in range(101)}, "An evaluation has at most 100 scores, and this one has 101."),
        ({"other": 1.0}, "The run's evaluations have the scores loss of validation, and these are loss of other: give"),
        ({"loss": 1.0, "more": 1.0}, "The run's evaluations have the scores loss of validation, and these are loss, more of"),
        ({"a": {"loss": 1.0}, "b": {"x": 1.0}}, "The task's evaluation gave"),
        ({"\x1b[2J": 1.0}, "The name of a score has characters that cannot be shown: give it another name."),
        ({"x" * 101: 1.0}, "The name of a score is 'xxx"),
        (RuntimeError("no more memory"), "evaluate failed (RuntimeError: no more memory)."),
    ],
)
def test_scores_that_cannot_be_taken_are_refused_and_end_nothing(tmp_path, bad, reason):
    """The first and the last evaluation are good, those between are not."""
    messages: list[str] = []
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
        train(service, tell=messages.append, evaluate=evaluate)
        assert [line["arrival"] for line in evals(service.state.folder)] == [0, 8] and calls == 5
        assert service.state.ended is not None and service.state.ended.kind == "finished"
    lines = [line for line in messages if "is left out" in line]
    assert len(lines) == 3 and lines[0].startswith(f"The evaluation at arrival 2 is left out. {reason}"), messages


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
    service, messages = serve(arrivals=3), []
    model = net()
    optimizer = adam(model)
    with heloco.join(LocalLink(service), model, optimizer, tell=messages.append, stop_at_end=False) as run:
        for i, batch in enumerate(batches()):
            for scores in ([1.0], [math.nan], [{"b": 1.0}], ["x"])[i] if i < 4 else []:
                run.report_eval(scores)
            step(model, optimizer, batch)
            if run.ended:
                run.report_eval(1.0)  # there is no round any more: nothing happens
                break
    assert len(evals(service.state.folder)) == 1
    refused = [line for line in messages if line.startswith("The scores were not recorded. ")]
    assert [line.split(". ", 1)[1].split(" ")[:3] for line in refused] == [
        ["The", "score", "'loss'"], ["The", "run's", "evaluations"], ["The", "score", "'loss'"],
    ]  # fmt: skip


def test_without_an_address_a_report_does_nothing():
    model = net()
    with heloco.join(None, model, adam(model), evaluate=lambda _: 1.0) as run:
        run.report_eval(1.0)


def test_a_loop_whose_round_was_lost_reports_nothing_and_goes_on(serve):
    service, messages = serve(arrivals=3), []
    model = net()
    optimizer = adam(model)
    with heloco.join(LocalLink(service), model, optimizer, tell=messages.append) as run:
        for i, batch in enumerate(batches()):
            if i == 1:
                [machine] = service.state.roster
                with service.state.changed:
                    service.rounds.give_up(machine, "expired", "it took too long")
                run.report_eval(1.0)
            step(model, optimizer, batch)
    assert evals(service.state.folder) == [] and len(tape(service)) == 3
    assert any(line.startswith("The scores were not recorded.") for line in messages)


# ---- a restart in the middle


class Restarting(LocalLink):
    """The synchronizer goes down while the machine fetches the first model that it is to evaluate."""

    def __init__(self, service: Service, begin_again: Callable[[], Service]) -> None:
        super().__init__(service)
        self._begin_again: Callable[[], Service] | None = begin_again

    def fetch_evaluated(self, ticket: Ticket, job: EvaluationJob, layout: Any) -> dict[str, torch.Tensor]:
        if self._begin_again is not None:
            self.service.close()
            self.service, self._begin_again = self._begin_again(), None
            raise LinkDown("The gateway does not answer.")
        return super().fetch_evaluated(ticket, job, layout)


def test_a_loop_evaluates_what_was_due_when_the_synchronizer_went_down(serve):
    link = Restarting(serve(arrivals=6, eval_every=2), lambda: serve(arrivals=6, eval_every=2))
    model, scored = net(), []
    optimizer = adam(model)

    def evaluate(model: nn.Module) -> float:
        scored.append(digest_of(model))
        return 1.0

    with heloco.join(link, model, optimizer, tell=quiet, evaluate=evaluate):
        for batch in batches():
            step(model, optimizer, batch)
    link.service.finish_evaluations()
    digests = {line["arrival"]: line["digest"] for line in tape(link.service)}
    arrivals = [line["arrival"] for line in evals(link.service.state.folder)]
    assert arrivals == [0, 2, 4, 6] and scored[1:] == [digests[arrival] for arrival in arrivals[1:]]
