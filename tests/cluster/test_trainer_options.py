"""Hugging Face's Trainer in a run: a schedule that follows the run, and what would spoil the run's model."""

from pathlib import Path
from typing import Any

import pytest

import heloco
from support.local_link import LocalLink
from support.own_loops import external_runs
from support.trainers import trainer

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def rates(trained: Any) -> list[float]:
    return [entry["learning_rate"] for entry in trained.state.log_history if "learning_rate" in entry]


@pytest.mark.parametrize(("follow_run", "lowest"), [(True, 0.0), (False, 0.98)])
def test_a_schedule_can_end_with_the_run(tmp_path: Path, follow_run: bool, lowest: float) -> None:
    """The run ends after 20 of the Trainer's 1,000 steps."""
    with external_runs(tmp_path) as serve:
        callback = heloco.HeLoCoCallback(LocalLink(serve(inner_steps=5, arrivals=4)), follow_run=follow_run, tell=lambda _: None)
        trained = trainer(tmp_path / "out", callback, lr_scheduler_type="linear")
        trained.train()
    assert trained.state.global_step == 20
    factors = [rate / 1e-2 for rate in rates(trained)]
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] == pytest.approx(lowest, abs=0.06)


def test_a_schedule_that_is_no_function_of_the_step_is_refused(tmp_path: Path) -> None:
    with external_runs(tmp_path) as serve:
        callback = heloco.HeLoCoCallback(LocalLink(serve()), follow_run=True, tell=lambda _: None)
        trained = trainer(
            tmp_path / "out", callback, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", eval_steps=5
        )  # fmt: skip
        with pytest.raises(heloco.UserError, match="follow_run needs a schedule that is a function of the step"):
            trained.train()


def test_the_best_model_of_one_machine_does_not_take_the_place_of_the_runs(tmp_path: Path) -> None:
    settings = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "eval_steps": 5,
        "save_steps": 5,
    }
    with external_runs(tmp_path) as serve:
        callback = heloco.HeLoCoCallback(LocalLink(serve()), tell=lambda _: None)
        with pytest.raises(heloco.UserError, match=r"^load_best_model_at_end would put one of this machine's own checkpoints"):
            trainer(tmp_path / "out", callback, **settings).train()
    trainer(tmp_path / "alone", heloco.HeLoCoCallback(), **settings, max_steps=5).train()


class Notes(transformers.TrainerCallback):
    """What others read off the Trainer's state after each step."""

    def __init__(self) -> None:
        self.planned: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self.planned.append(state.max_steps)


def test_the_trainers_number_of_steps_follows_the_run(tmp_path: Path) -> None:
    """The run takes 20 of the Trainer's 1,000 steps, or more of them than the Trainer was to make."""
    for max_steps in (1000, 12):
        with external_runs(tmp_path / str(max_steps)) as serve:
            link = LocalLink(serve(inner_steps=5, arrivals=4))
            callback, notes = heloco.HeLoCoCallback(link, follow_run=True, tell=lambda _: None), Notes()
            trained = trainer(tmp_path / "out", callback, max_steps=max_steps)
            trained.add_callback(notes)
            trained.train()
        assert notes.planned[:11] == [20] * 11
        assert trained.state.global_step == (20 if max_steps == 1000 else 12)  # of which it has counted the epochs before
