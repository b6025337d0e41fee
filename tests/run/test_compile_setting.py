"""`compile = true` is honoured or refused, whoever computes the rounds. (A study refuses it: test_fleet.py.)"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import heloco
from heloco.cluster.client.worker import Worker
from heloco.cluster.server.open_run import check_servable
from heloco.engine.build import build_task
from heloco.errors import UserError
from heloco.run import RunConfig, resolve, with_fields
from heloco.run.settings import read_toml
from support.runs import TINY, checkpoints, train
from support.runs import heloco as command

pytestmark = pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch's own


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The models that torch.compile was given; it gives them back as they are."""
    models: list[nn.Module] = []

    def compile_model(model: nn.Module) -> nn.Module:
        models.append(model)
        return model

    monkeypatch.setattr(torch, "compile", compile_model)
    return models


def test_train_and_resume_compile_the_model(compiled: list[nn.Module], tmp_path: Path) -> None:
    folder = train(tmp_path / "run", "--compile", "--checkpoint-every", "3")
    assert len(compiled) == 1
    shutil.rmtree(checkpoints(folder)[-1])
    assert command("resume", folder).code == 0
    assert len(compiled) == 2


def test_simulate_compiles_the_model(compiled: list[nn.Module]) -> None:
    heloco.simulate("images", compile=True, arrivals=1, inner_steps=1, paces=[1])
    assert len(compiled) == 1


def test_a_machine_that_joins_compiles_the_model(compiled: list[nn.Module], tmp_path: Path) -> None:
    folder = train(tmp_path / "run", "--compile")
    task, config = build_task(resolve(with_fields(RunConfig(), read_toml(folder / "config.toml"))))
    Worker(task, config)
    assert len(compiled) == 2


@pytest.mark.parametrize(("setting", "value"), [("compile", True), ("precision", "bf16")])
def test_a_run_of_models_that_machines_bring_refuses_it(setting: str, value: Any) -> None:
    usual = {"task": "external", "paces": [1.0, 1.0]}
    check_servable(resolve(with_fields(RunConfig(), usual)))
    with pytest.raises(UserError, match=f"^{setting} is set, but the machines of an external run have loops of their own"):
        check_servable(resolve(with_fields(RunConfig(), usual | {setting: value})))


def test_where_torch_cannot_compile_a_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("there is no C++ compiler")

    with_backend = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model: with_backend(model, backend=fail))
    result = command("train", *TINY, "--compile", "--out", tmp_path / "run")
    assert result.code == 2 and "torch.compile cannot compile this model here (" in result.sentence
    assert "there is no C++ compiler" in result.sentence
