"""`deterministic`: torch's deterministic algorithms during a run, and only then."""

from typing import Any

import pytest
import torch
from torch import nn

from heloco.engine.local import LocalRun
from heloco.run import RunConfig, resolve, with_fields
from heloco.task.datasets import DatasetTask
from support.inner_rounds import mlp


def run_with(loss: Any, **settings: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    samples = [(torch.randn(4, generator=draw), torch.randn(2, generator=draw)) for _ in range(16)]
    task = DatasetTask(mlp(), loss, {"a": samples})
    defaults = {"task": "language", "paces": [1.0], "arrivals": 2, "inner_steps": 2, "batch_size": 2, "device": "cpu"}
    LocalRun(task, resolve(with_fields(RunConfig(), defaults | settings))).run()


@pytest.mark.parametrize("deterministic", [False, True])
def test_it_holds_during_the_run_alone(deterministic: bool) -> None:
    seen = []

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(torch.are_deterministic_algorithms_enabled())
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    run_with(loss, deterministic=deterministic)
    assert len(seen) >= 4 and set(seen) == {deterministic}
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_operation_without_a_deterministic_form_is_warned_of() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        output = model(batch[0])
        torch.zeros(4).put_(torch.tensor([0, 1]), torch.ones(2))
        return nn.functional.mse_loss(output, batch[1])

    with pytest.warns(UserWarning, match="put_ does not have a deterministic implementation"):
        run_with(loss, deterministic=True)


def test_it_is_no_part_of_what_a_run_is_known_by() -> None:
    digests = {
        resolve(with_fields(RunConfig(), settings)).digest()
        for settings in ({}, {"deterministic": True}, {"compile": True}, {"recompute": True}, {"execution": "sequential"})
    }
    assert len(digests) == 1
