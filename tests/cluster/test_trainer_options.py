"""Hugging Face's Trainer in a run: a schedule that follows the run, and what would spoil the run's model."""

from pathlib import Path
from typing import Any

import pytest
import torch

import heloco
from support.local_link import LocalLink
from support.own_loops import external_runs

transformers = pytest.importorskip("transformers", reason="transformers is not installed")


def trainer(folder: Path, callback: Any, **arguments: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    windows = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 8
    settings = {"max_steps": 1000, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1}
    quiet = {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}
    return transformers.Trainer(
        transformers.GPT2LMHeadModel(config),
        transformers.TrainingArguments(output_dir=str(folder), **{**settings, **quiet, **arguments}),
        train_dataset=windows,
        eval_dataset=windows,
        callbacks=[callback],
    )


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
