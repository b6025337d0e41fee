"""Lightning's Trainer takes part in a run: Trainer(..., callbacks=[HeLoCoLightningCallback(address)])."""

import atexit
import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from heloco.cluster.client.join_own_loop import join
from heloco.cluster.client.joined_loop import JoinedLoop
from heloco.cluster.protocol.link import Link
from heloco.errors import UserError
from heloco.task import batch_size

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""Two packages with the same classes. Each has its own copy of them."""
SHARDING = {"FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"}
"""Lightning's strategies that spread the parameters over processes."""


def _callback_class() -> Any:
    """The class Callback of the package that the script has imported, or of one that is installed."""
    for package in [name for name in PACKAGES if name in sys.modules] or PACKAGES:
        try:
            return importlib.import_module(package).Callback
        except ImportError:
            continue
    raise UserError("HeLoCoLightningCallback needs Lightning: pip install 'heloco[lightning]'.")


if TYPE_CHECKING:
    Callback = object
else:
    Callback = _callback_class()


class HeLoCoLightningCallback(Callback):
    """Joins a run when the training begins and leaves it at the end. The options are those of `heloco.join`. Without an address
    it does nothing.

        lightning.Trainer(max_epochs=-1, callbacks=[heloco.HeLoCoLightningCallback(address)]).fit(module, loader)

    When the run has ended, its final model is in the module, and the training stops after the batch, whatever the Trainer's
    `min_steps` and `min_epochs` are. The run's tape gets the losses that backward is called with.
    """

    def __init__(
        self,
        address: "str | Link | None" = None,
        *,
        token: str | None = None,
        name: str | None = None,
        reset_optimizer: bool = False,
        patience_s: float = 3600.0,
        tell: Callable[[str], Any] = print,
    ) -> None:
        self.joined: JoinedLoop | None = None
        """This machine's state in the run; None before the training begins."""
        self._address = address
        self._trainer: Any = None
        self._options: dict[str, Any] = {
            "token": token, "name": name, "reset_optimizer": reset_optimizer, "patience_s": patience_s, "tell": tell,
        }  # fmt: skip

    @property
    def progress(self) -> float:
        """How much of the training is done, from 0 to 1: of the whole run, or without a run of the Trainer's own steps. For
        learning-rate schedules."""
        if self.joined is not None:
            return self.joined.progress
        trainer = self._trainer
        return min(1.0, trainer.global_step / trainer.estimated_stepping_batches) if trainer and trainer.global_step else 0.0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ARG002
        """Notes the Trainer."""
        self._trainer = trainer

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Joins the run with the module and all its optimizers."""
        self.leave()  # an earlier training may have been interrupted
        self.joined = None
        joined = join(self._address, pl_module, trainer.optimizers, stop_at_end=False, **self._options)
        if not joined.active:
            return
        if names := SHARDING & {kind.__name__ for kind in type(trainer.strategy).__mro__}:
            raise UserError(
                f"The Trainer's {names.pop()} spreads the parameters over processes: a run needs them whole on each one. Choose "
                "another strategy, such as ddp."
            )
        self.joined = joined.__enter__()
        atexit.register(self.leave)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Reports the samples of the batch, before a step may end the round."""
        if self.joined is not None:
            self.joined.report(samples=batch_size(batch) * trainer.world_size)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:  # noqa: ARG002
        """Reports the loss, as `training_step` gave it."""
        if self.joined is not None:
            scaler = getattr(trainer.precision_plugin, "scaler", None)  # of float16; it has scaled the loss
            scale = scaler.get_scale() if scaler is not None else 1.0
            self.joined.report(loss.detach() * (trainer.accumulate_grad_batches / scale))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Optimizer) -> None:  # noqa: ARG002
        """If the run ended within this batch, the batch's further steps do not move its final model."""
        if self.joined is not None and self.joined.ended:
            optimizer.zero_grad(set_to_none=True)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002
        """Stops the training if the run has ended."""
        if self.joined is not None and self.joined.ended:
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ARG002
        """Leaves the run."""
        self.leave()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ARG002
        """Leaves the run."""
        self.leave()

    def leave(self) -> None:
        """Leaves the run. `joined` keeps its last state."""
        atexit.unregister(self.leave)
        if self.joined is not None:
            self.joined.__exit__(None, None, None)
