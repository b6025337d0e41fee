"""What Hugging Face's Trainer evaluates, in a run: its own evaluations, and those of the run's model."""

import math
from pathlib import Path
from typing import Any

import pytest

import heloco
from support.local_link import LocalLink
from support.own_loops import external_runs, tape
from support.runs import evals
from support.trainers import BACKWARDS, WINDOWS, trainer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def logged(trained: Any, name: str = "eval_loss") -> list[float]:
    return [entry[name] for entry in trained.state.log_history if name in entry]


def test_the_trainers_evaluations_are_of_the_runs_model_if_they_are_made_between_rounds(tmp_path: Path) -> None:
    with external_runs(tmp_path) as serve:
        callback = heloco.HeLoCoCallback(LocalLink(serve(inner_steps=5, arrivals=4)), tell=lambda _: None)
        trained = trainer(tmp_path / "out", callback, eval_strategy="steps", eval_steps=5)
        trained.train()
    lines = evals(tmp_path / "run")
    assert [(line["arrival"], line.get("own_steps", 0)) for line in lines] == [(1, 0), (2, 0), (3, 0)]
    assert [line["scores"]["validation"]["loss"] for line in lines] == logged(trained)[:3]
    assert all(line["mean"].keys() == {"loss"} for line in lines)


def test_in_the_middle_of_a_round_they_are_of_the_machines_own(tmp_path: Path) -> None:
    def accuracy(prediction: Any) -> dict[str, Any]:
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean()), "words": "none"}

    with external_runs(tmp_path) as serve:
        callback = heloco.HeLoCoCallback(LocalLink(serve(inner_steps=5, arrivals=4)), tell=lambda _: None)
        trained = trainer(tmp_path / "out", callback, eval_strategy="steps", eval_steps=7)
        trained.compute_metrics = accuracy
        trained.train()
    lines = evals(tmp_path / "run")
    assert [(line["arrival"], line["own_steps"]) for line in lines] == [(1, 2), (2, 4)]
    assert [line["mean"]["loss"] for line in lines] == logged(trained)[:2]
    assert [line["mean"]["accuracy"] for line in lines] == logged(trained, "eval_accuracy")[:2]
    assert all(line["mean"].keys() == {"loss", "accuracy"} for line in lines)


def test_several_evaluation_sets_have_their_names(tmp_path: Path) -> None:
    with external_runs(tmp_path) as serve:
        callback = heloco.HeLoCoCallback(LocalLink(serve(inner_steps=5, arrivals=2)), tell=lambda _: None)
        sets = {"there": WINDOWS, "back_again": BACKWARDS}
        trained = trainer(tmp_path / "out", callback, sets, eval_strategy="steps", eval_steps=5)
        trained.train()
    [line] = evals(tmp_path / "run")
    assert line["scores"] == {
        "there": {"loss": logged(trained, "eval_there_loss")[0]},
        "back_again": {"loss": logged(trained, "eval_back_again_loss")[0]},
    }


def test_the_trainers_own_evaluate_scores_the_runs_model(tmp_path: Path) -> None:
    """And the training is the same to the bit as without it."""
    digests, trainers = [], list[Any]()
    for name in ("plain", "evaluated"):
        with external_runs(tmp_path) as serve:
            service = serve(name, inner_steps=5, arrivals=4, eval_every=1)
            options: dict[str, Any] = {"evaluate": lambda _: trainers[-1].evaluate()} if name == "evaluated" else {}
            callback = heloco.HeLoCoCallback(LocalLink(service), tell=lambda _: None, **options)
            trainers.append(trainer(tmp_path / "out", callback))
            trainers[-1].train()
            service.finish_evaluations()
            digests.append([line["digest"] for line in tape(service)])
    trained = trainers[-1]
    assert digests[0] == digests[1] and not evals(tmp_path / "plain")
    lines = evals(tmp_path / "evaluated")
    assert [(line["arrival"], line.get("own_steps", 0)) for line in lines] == [(i, 0) for i in range(5)]
    losses = [line["mean"]["loss"] for line in lines]
    assert losses == logged(trained)
    assert abs(losses[0] - math.log(64)) < 0.5 and losses[-1] < losses[0] - 0.5
    assert trained.evaluate()["eval_loss"] == losses[-1]  # the run's final model is loaded
