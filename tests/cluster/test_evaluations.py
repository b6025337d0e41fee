"""Evaluations of a served run: they hold up nobody, and what they say is of the arrival they are of."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from heloco.cluster.client.run_client import RunClient
from heloco.cluster.protocol.messages import Assignment, ContributionReport, EvaluationJob, Wait
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.protocol.score_messages import EvaluationResult
from heloco.cluster.server.evaluation_queue import FOLDER, WAITING_LIMIT
from heloco.cluster.server.scorers import ScorerHere, ScorerProcess
from heloco.cluster.server.service import Service
from heloco.engine.build import build_task
from heloco.run import RunConfig, resolve, with_fields
from heloco.wire import blocks
from heloco.wire.layout import Layout, write
from support.local_link import LocalLink
from support.scored_runs import TwoBlocks, contribute, delta, scores_of, served, task
from support.small_cluster import Hand


def contribute_with_checkpoints(service: Service, count: int) -> None:
    for seed in range(count):
        contribute(service, 1, seed)
        service.housekeeping.save_if_due(wait=True)


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "evals.jsonl").read_text().splitlines()]


@pytest.fixture
def undisturbed(tmp_path: Path) -> list[dict[str, Any]]:
    """The evaluations of a run of 12 arrivals in which each is made before the next arrival."""
    service = served(tmp_path / "undisturbed", task())
    assert service.state.run is not None
    for seed in range(12):
        service.state.run.finish_evaluations()
        contribute(service, 1, seed)
    service.state.run.finish_evaluations()
    service.close()
    lines = evaluations(tmp_path / "undisturbed")
    assert [line["arrival"] for line in lines] == [0, 2, 4, 6, 8, 10, 12]
    assert len({line["mean"]["loss"] for line in lines}) == 7
    return lines


class Gate:
    """An evaluation that lasts until it may end."""

    def __init__(self, after: int = 0) -> None:
        self.may_end, self.has_begun, self.calls, self._after = threading.Event(), threading.Event(), 0, after

    def __call__(self, model: nn.Module) -> Any:
        self.calls += 1
        if self.calls > self._after:
            self.has_begun.set()
            assert self.may_end.wait(60)
        return scores_of(model)


def test_an_evaluation_holds_up_nobody_and_is_of_its_own_arrival(tmp_path, undisturbed):
    gate = Gate()
    service = served(tmp_path / "run", task(gate))
    assert gate.has_begun.wait(60)
    contribute(service, 12)
    status = service.admin.status()
    assert (status.arrivals, status.evaluations_due) == (12, 7) and evaluations(tmp_path / "run") == []
    gate.may_end.set()
    service.state.run.finish_evaluations()
    assert service.admin.status().evaluations_due == 0
    service.close()
    assert evaluations(tmp_path / "run") == undisturbed
    assert list((tmp_path / "run" / "evaluating").iterdir()) == []


@pytest.mark.parametrize("checkpoint_every", [0, 3])
@pytest.mark.parametrize("evaluation_count", [0, 1, 3])
def test_a_restart_goes_on_with_the_evaluations_that_are_due(tmp_path, undisturbed, checkpoint_every, evaluation_count):
    gate, folder = Gate(after=evaluation_count), tmp_path / "run"
    service = served(folder, task(gate), checkpoint_every=checkpoint_every)
    contribute_with_checkpoints(service, 8)
    assert gate.has_begun.wait(60)
    threading.Timer(0.1, gate.may_end.set).start()  # closing it waits for the one under way, which is then not recorded
    service.close()
    assert [line["arrival"] for line in evaluations(folder)] == [0, 2, 4, 6, 8][:evaluation_count]
    service = served(folder, task())
    contribute(service, 4, 8)
    service.state.run.finish_evaluations()
    service.close()
    assert evaluations(folder) == undisturbed


def test_evaluations_that_were_recorded_after_the_checkpoint_are_not_made_again(tmp_path, undisturbed):
    folder = tmp_path / "run"
    service = served(folder, task())
    contribute(service, 12)
    service.state.run.finish_evaluations()
    service.close()
    gate = Gate()
    service = served(folder, task(gate))
    service.state.run.finish_evaluations()
    service.close()
    assert evaluations(folder) == undisturbed and gate.calls == 0


def test_a_recorded_evaluation_of_an_arrival_that_was_lost_is_made_again(tmp_path):
    folder = tmp_path / "run"
    service = served(folder, task())
    contribute(service, 4)
    service.state.run.finish_evaluations()
    service.close()
    lines = evaluations(folder)
    (folder / "evals.jsonl").write_text("".join(f"{json.dumps({**line, 'time_s': line['time_s'] + 1})}\n" for line in lines))
    service = served(folder, task())
    service.state.run.finish_evaluations()
    service.close()
    assert evaluations(folder) == lines


def test_a_model_that_is_lost_with_the_checkpoint_before_it_is_computed_again(tmp_path, undisturbed):
    """After a power cut the models that wait may be gone. The journal gives them again, from an older checkpoint."""
    gate, folder = Gate(), tmp_path / "run"
    service = served(folder, task(gate), checkpoint_every=3)
    contribute_with_checkpoints(service, 8)
    threading.Timer(0.1, gate.may_end.set).start()
    service.close()
    for path in (folder / "evaluating").iterdir():
        path.unlink() if path.name.startswith("arrival-00000008") else path.write_bytes(bytes(path.stat().st_size))
    service = served(folder, task())
    contribute(service, 4, 8)
    service.state.run.finish_evaluations()
    service.close()
    assert evaluations(folder) == undisturbed


def test_evaluations_that_take_too_long_are_left_out_and_the_last_one_never_is(tmp_path, caplog):
    gate = Gate()
    service = served(tmp_path / "run", task(gate), arrivals=40)
    assert gate.has_begun.wait(60)
    contribute(service, 40)
    assert len(list((tmp_path / "run" / FOLDER).iterdir())) <= WAITING_LIMIT + 2, "models that were left out stay on disk"
    gate.may_end.set()
    service.finish_evaluations()
    service.close()
    arrivals = [line["arrival"] for line in evaluations(tmp_path / "run")]
    assert arrivals[0] == 0 and arrivals[-1] == 40 and arrivals == sorted(arrivals) and len(arrivals) == 8
    assert "evaluations take longer than the time between them" in caplog.text


class FailsOnce:
    """The second evaluation fails, or gives what a task may not give."""

    def __init__(self, scores: Any) -> None:
        self.calls, self._scores = 0, scores

    def __call__(self, model: nn.Module) -> Any:
        self.calls += 1
        if self.calls != 2:
            return scores_of(model)
        if isinstance(self._scores, Exception):
            raise self._scores
        return self._scores


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (ValueError("no such thing"), "The evaluation at arrival 2 failed: no such thing"),
        ({"a": {"loss": 1.0}, "b": {}}, "The evaluation at arrival 2 failed: The task's evaluation gave"),
        ({"a": {"loss": "low"}}, "The evaluation at arrival 2 failed: The task's evaluation gave"),
        ({"a": 1.0}, "The evaluation at arrival 2 failed: The task's evaluation gave"),
        ({("a",): {"loss": 1.0}}, "The evaluation at arrival 2 failed: The task's evaluation gave"),
        ({"\ud800": {"loss": 1.0}}, "The evaluation at arrival 2 failed: The task's evaluation gave"),
        (None, "The evaluation at arrival 2 failed: The task's evaluation gave"),
    ],
)
def test_an_evaluation_that_fails_does_not_end_the_run(tmp_path, caplog, scores, message):
    service = served(tmp_path / "run", task(FailsOnce(scores)))
    contribute(service, 4)
    service.state.run.finish_evaluations()
    service.close()
    assert [line["arrival"] for line in evaluations(tmp_path / "run")] == [0, 4]
    assert message in caplog.text


def test_a_machine_whose_scores_are_refused_goes_on_training(tmp_path):
    """Its task gives other measures for one source than for another. The synchronizer makes the evaluation."""
    service, lines = served(tmp_path / "run", task(), arrivals=4), list[str]()
    client = RunClient(LocalLink(service), "gpu", evaluate=lambda _: {"a": {"loss": 1.0}, "b": {}}, tell=lines.append)
    client.join()
    for seed in range(4):
        taken = client.take()
        assert taken is not None
        client.hand_in(taken.key, delta(seed), ContributionReport(loss=1.0, last_loss=1.0, samples=1, units=1))
        assert service.state.run is not None
        service.state.run.readers.wait()
    client.leave()
    service.finish_evaluations()
    service.close()
    assert [line["arrival"] for line in evaluations(tmp_path / "run")] == [0, 2, 4]
    assert len([line for line in lines if "no other is made here" in line]) == 1


# ---- in a process of its own


@pytest.fixture(scope="module")
def language(cache: Path) -> tuple[Any, RunConfig]:  # noqa: ARG001
    values = {"preset": "1m", "width": 32, "layers": 1, "heads": 2, "context": 16, "eval_windows": 4, "device": "cpu"}
    return build_task(resolve(with_fields(RunConfig(), values)))


def test_a_large_model_is_evaluated_in_another_process_with_the_same_scores(tmp_path, language):
    task, config = language
    model = task.build_model()
    tensors = blocks.name_start(model.parameters(), model.buffers())
    path = tmp_path / "model.safetensors"
    with path.open("wb", buffering=0) as file:
        write(file, Layout.from_tensors(tensors), tensors)
    scores, scorer = ScorerHere(task, torch.device("cpu"))(path), ScorerProcess(config)
    assert scorer(path) == scores
    pid = scorer.pid
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, ours + 10)
    os.kill(pid, signal.SIGKILL)
    assert scorer(path) == scores and scorer.pid != pid
    pid = scorer.pid
    scorer.close()
    assert not Path(f"/proc/{pid}").exists()


# ---- by a machine that offers it


def offered(service: Service, name: str) -> tuple[Hand, Any]:
    hand = Hand(service, name)
    return hand, service.next(hand.ticket, evaluates=True)


def test_a_machine_that_offers_it_evaluates_instead_of_the_synchronizer(tmp_path, undisturbed):
    gate, folder = Gate(after=1), tmp_path / "run"
    service = served(folder, task(gate))
    service.state.run.finish_evaluations()
    hand, answer = offered(service, "gpu")
    assert isinstance(answer, Assignment)  # nothing is due
    for seed in range(2):
        hand.take()
        hand.hand_in(delta(seed))
    service.state.run.readers.wait()
    job = service.next(hand.ticket, evaluates=True)
    assert isinstance(job, EvaluationJob) and job.arrival == 2 and service.next(hand.ticket, evaluates=True) == job
    other, answer = offered(service, "other")
    assert isinstance(answer, Wait)  # one machine at a time
    other.leave()
    layout = service.state.run.start_layout
    model = TwoBlocks()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(hand.link.fetch_evaluated(hand.ticket, job, layout)[f"parameter.{i}"])
    result = EvaluationResult(arrival=2, scores=scores_of(model))
    for wrong in ({}, {"a": {"loss": 1.0}, "b": {}}):
        with pytest.raises(Refused) as refused:
            hand.link.send_scores(hand.ticket, EvaluationResult(arrival=2, scores=wrong))
        assert refused.value.code is RefusalCode.MALFORMED
    for _ in range(2):  # an answer may be lost, and the request repeated
        hand.link.send_scores(hand.ticket, result)
    lines = evaluations(folder)
    assert lines[1].pop("machine") == hand.id and lines == undisturbed[:2] and gate.calls == 1
    with pytest.raises(Refused) as refused:
        hand.link.fetch_evaluated(hand.ticket, job, layout)
    assert refused.value.code is RefusalCode.NOT_HELD
    service.close()


def test_the_synchronizer_evaluates_if_the_machine_leaves(tmp_path, undisturbed):
    folder = tmp_path / "run"
    service = served(folder, task())
    service.state.run.finish_evaluations()
    hand, _ = offered(service, "gpu")
    for seed in range(2):
        hand.take()
        hand.hand_in(delta(seed))
    service.state.run.readers.wait()
    assert isinstance(service.next(hand.ticket, evaluates=True), EvaluationJob)
    hand.leave()
    service.state.run.finish_evaluations()
    service.close()
    assert evaluations(folder) == undisturbed[:2]


def test_a_model_that_could_not_be_written_holds_up_no_evaluation_after_it(tmp_path, caplog):
    folder = tmp_path / "run"
    service = served(folder, task())
    service.state.run.finish_evaluations()
    hand, _ = offered(service, "gpu")
    blocked = folder / "evaluating" / "arrival-00000002.partial"
    blocked.mkdir()
    for seed in range(4):
        hand.take()
        hand.hand_in(delta(seed))
        service.state.run.readers.wait()
    assert "The evaluation at arrival 2 was left out" in caplog.text
    with service.state.changed:
        service.state.changed.wait_for(lambda: service.state.run.evaluations.waiting == 1, timeout=60)
    job = service.next(hand.ticket, evaluates=True)
    assert isinstance(job, EvaluationJob) and job.arrival == 4
    blocked.rmdir()
    service.close()


def test_the_last_evaluation_of_a_finished_run_is_left_to_a_machine_too(tmp_path):
    folder = tmp_path / "run"
    service = served(folder, task(), arrivals=3)
    service.state.run.finish_evaluations()
    hand, _ = offered(service, "gpu")
    for seed in range(3):
        hand.take()
        hand.hand_in(delta(seed))
    service.state.run.readers.wait()
    for arrival in (2, 3):
        job = service.next(hand.ticket, evaluates=True)
        assert isinstance(job, EvaluationJob) and job.arrival == arrival
        hand.link.send_scores(hand.ticket, EvaluationResult(arrival=arrival, scores={"x": {"loss": None}}))
    with pytest.raises(Refused) as refused:
        service.next(hand.ticket, evaluates=True)
    assert refused.value.code is RefusalCode.ENDED
    service.close()
    assert [(line["arrival"], line["mean"], line.get("machine")) for line in evaluations(folder)] == [
        (0, {"loss": 0.0}, None), (2, {"loss": None}, hand.id), (3, {"loss": None}, hand.id),
    ]  # fmt: skip
