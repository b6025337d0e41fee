"""Lightning's Trainer in a run: what a LightningModule with the callback trains, reports and holds at the end."""

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heloco
from support.local_link import LocalLink
from support.own_loops import assert_same, example, external_runs, net, outer, quiet, tape, values

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

BATCH = 8
QUIET = {
    "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip


def module_of(package: Any = lightning) -> Any:
    """A LightningModule of this package, with automatic optimization. It keeps the losses that its steps gave."""

    class Small(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.losses: list[float] = []

        def training_step(self, batch: list[Tensor]) -> Tensor:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Small()


class Twice(lightning.LightningModule):
    """Two optimizers, each for one of its nets, that step in turn; as often in a batch as it is told."""

    def __init__(self, steps: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second, self.steps = net(0), net(1), steps

    def training_step(self, batch: list[Tensor]) -> None:
        for _ in range(self.steps):
            for part, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):
                loss = nn.functional.mse_loss(part(batch[0]), batch[1])
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.first, self.second)]


def loader(samples: int = 32) -> torch.utils.data.DataLoader[tuple[Tensor, ...]]:
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=BATCH)


def fit(module: Any, callback: Any, package: Any = lightning, **settings: Any) -> Any:
    trainer = package.Trainer(callbacks=[callback], **{"max_epochs": 500, **QUIET, **settings})
    trainer.fit(module, loader())
    return trainer


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Any]:
    with external_runs(tmp_path) as start:
        yield start


def test_the_example_takes_part_until_the_run_ends(serve, capsys):
    service = serve(inner_steps=6, arrivals=6)
    trainer = example("lightning_module").train(LocalLink(service), epochs=500)
    [callback] = [c for c in trainer.callbacks if isinstance(c, heloco.HeLoCoLightningCallback)]
    assert trainer.global_step == 36 and callback.joined.ended and callback.joined.arrivals == 6
    lines = tape(service)
    assert lines[-1]["loss"] < lines[0]["loss"] and all(line["samples"] == 96 for line in lines)
    assert_same(values(trainer.lightning_module), outer(service))
    assert not trainer.optimizers[0]._optimizer_step_post_hooks
    assert "Left" not in capsys.readouterr().out


def test_without_a_run_the_example_is_as_it_was_to_the_bit(monkeypatch):
    monkeypatch.delenv("HELOCO_ADDRESS", raising=False)
    script = example("lightning_module")
    with_callback = script.train(epochs=1)
    monkeypatch.setattr(script.heloco, "HeLoCoLightningCallback", lambda _: lightning.Callback(), raising=False)
    assert_same(values(with_callback.lightning_module), values(script.train(epochs=1).lightning_module))


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_micro_batches_are_no_steps_and_their_losses_are_on_the_tape(package, serve):
    """Either package's Trainer: two rounds of two steps, each of two micro-batches."""
    pl = pytest.importorskip(package)
    service, module = serve(inner_steps=2, arrivals=2), module_of(pl)
    trainer = fit(
        module, heloco.HeLoCoLightningCallback(LocalLink(service), tell=quiet), pl, accumulate_grad_batches=2, min_steps=1000
    )
    assert trainer.global_step == 4, "the run's end is the training's, whatever min_steps says"
    first, second = tape(service)
    assert first["loss"] == pytest.approx(sum(module.losses[:4]) / 4) and first["samples"] == 4 * BATCH
    assert second["loss"] == pytest.approx(sum(module.losses[4:8]) / 4) and second["last_loss"] == pytest.approx(module.losses[7])
    assert_same(values(module), outer(service))


def test_manual_optimization_with_two_optimizers(serve):
    service, module = serve(inner_steps=3, arrivals=2), Twice()
    callback = heloco.HeLoCoLightningCallback(LocalLink(service), tell=quiet)
    trainer = fit(module, callback)
    assert callback.joined.arrivals == 2 and trainer.global_step == 12, "six steps of each optimizer"
    assert all(line["samples"] == 3 * BATCH and line["loss"] > 0 for line in tape(service))
    assert_same(values(module), outer(service))


def test_steps_of_a_batch_after_the_runs_end_move_nothing(serve):
    """The run ends with the second of the three steps in the first batch."""
    service, module = serve(inner_steps=2, arrivals=1), Twice(steps=3)
    fit(module, heloco.HeLoCoLightningCallback(LocalLink(service), tell=quiet))
    assert_same(values(module), outer(service))


@pytest.mark.parametrize("is_alone", [False, True])
def test_a_schedule_can_end_with_the_run_or_alone_with_the_training(is_alone, serve, monkeypatch):
    """The run has 8 of the 2,000 steps that the Trainer could make; alone it makes 8."""
    monkeypatch.delenv("HELOCO_ADDRESS", raising=False)
    link = None if is_alone else LocalLink(serve(inner_steps=2, arrivals=4))
    callback, module, rates = heloco.HeLoCoLightningCallback(link, tell=quiet), module_of(), []

    def configure_optimizers() -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 - callback.progress)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    module.configure_optimizers = configure_optimizers
    module.on_train_batch_start = lambda *_: rates.append(module.optimizers().param_groups[0]["lr"])
    trainer = fit(module, callback, max_epochs=2 if is_alone else 500)
    assert trainer.global_step == 8 and rates[0] == 1e-2 and rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(1e-2 / 8, rel=0.01) and trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0)


def test_an_error_in_the_module_leaves_the_run(serve):
    lines: list[str] = []
    callback = heloco.HeLoCoLightningCallback(LocalLink(serve()), tell=lines.append)
    module = module_of()
    module.training_step = lambda _: 1 / 0
    with pytest.raises(ZeroDivisionError):
        fit(module, callback)
    assert lines[-1].startswith("Left ") and not callback.joined.ended


def test_strategies_that_spread_the_parameters_are_refused(serve, monkeypatch):
    monkeypatch.setattr("os.environ", os.environ.copy())  # Lightning writes the addresses of its processes there
    strategies = importlib.import_module("lightning.pytorch.strategies")
    module = module_of()
    module.configure_model = lambda: None
    callback = heloco.HeLoCoLightningCallback(LocalLink(serve()), tell=quiet)
    strategy = strategies.ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    with pytest.raises(heloco.UserError, match=r"^The Trainer's ModelParallelStrategy spreads the parameters over processes: "):
        fit(module, callback, strategy=strategy, devices=1)
    torch.distributed.destroy_process_group()
