"""A LightningModule in a run. The callback is heloco's; without HELOCO_ADDRESS it does nothing.

python examples/lightning_module.py
HELOCO_ADDRESS=https://head:8443 HELOCO_TOKEN=… python examples/lightning_module.py        # on each machine
"""

from typing import Any

import lightning
import torch
from torch import Tensor, nn

import heloco


class Sine(lightning.LightningModule):
    """Learns the sine of the sum of three numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def loader(seed: int) -> torch.utils.data.DataLoader[tuple[Tensor, ...]]:
    x = torch.randn(512, 3, generator=torch.Generator().manual_seed(seed))
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
    return torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)


def train(address: Any = None, *, epochs: int = 5, seed: int = 0) -> lightning.Trainer:
    lightning.seed_everything(seed, verbose=False)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        callbacks=[heloco.HeLoCoLightningCallback(address)],
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Sine(), loader(seed))
    return trainer


if __name__ == "__main__":
    trainer = train()
    x, y = next(iter(loader(1)))
    error = nn.functional.mse_loss(trainer.lightning_module.net(x), y)
    print(f"{trainer.global_step} steps, the error on other data is {error:.3f}")
