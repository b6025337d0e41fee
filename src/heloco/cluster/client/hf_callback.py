"""Hugging Face's Trainer takes part in a run: Trainer(..., callbacks=[HeLoCoCallback(address)])."""

import atexit
from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LambdaLR

from heloco.cluster.client.join_own_loop import join
from heloco.cluster.client.joined_loop import JoinedLoop
from heloco.cluster.protocol.link import Link
from heloco.errors import UserError

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise UserError("HeLoCoCallback needs Hugging Face's transformers: pip install 'heloco[hf]' accelerate") from error


class HeLoCoCallback(TrainerCallback):
    """Joins a run when the training begins and leaves it at the end. The options are those of
    `heloco.join`. Without an address it does nothing.

    follow_run: the Trainer's learning-rate schedule follows the progress of the whole run, not the count of this machine's steps:
    when the run ends it has reached its end, too. Give the Trainer more `max_steps` than it will need."""

    def __init__(
        self,
        address: "str | Link | None" = None,
        *,
        token: str | None = None,
        name: str | None = None,
        reset_optimizer: bool = False,
        follow_run: bool = False,
        patience_s: float = 3600.0,
        tell: Callable[[str], Any] = print,
    ) -> None:
        self.joined: JoinedLoop | None = None
        """This machine's state in the run; None before the training begins."""
        self._address, self._follow_run = address, follow_run
        self._options: dict[str, Any] = {
            "token": token, "name": name, "reset_optimizer": reset_optimizer, "patience_s": patience_s, "tell": tell,
        }  # fmt: skip

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # noqa: ARG002
        """Joins the run with the Trainer's model and optimizer."""
        self.leave()  # an earlier training may have been interrupted
        joined = join(self._address, kwargs["model"], kwargs["optimizer"], stop_at_end=False, **self._options)
        if joined.active and args.load_best_model_at_end:
            raise UserError(
                "load_best_model_at_end would put one of this machine's own checkpoints in the place of the run's final model: "
                "set it to False."
            )
        if self._follow_run and joined.active:
            _follow(joined, kwargs["lr_scheduler"], state.max_steps)
        self.joined = joined.__enter__()
        atexit.register(self.leave)  # an interrupted Trainer does not call on_train_end

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # noqa: ARG002
        """Reports the samples of the step that follows."""
        if self.joined is not None:
            self.joined.report(samples=args.train_batch_size * args.gradient_accumulation_steps * args.world_size)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # noqa: ARG002
        """Stops the training if the run has ended."""
        if self.joined is not None and self.joined.ended:
            control.should_training_stop = True

    def on_log(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        logs: dict[str, Any] | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Reports the loss that the Trainer logs."""
        if self.joined is not None and logs and "loss" in logs:
            self.joined.report(float(logs["loss"]))

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # noqa: ARG002
        """Leaves the run."""
        self.leave()

    def leave(self) -> None:
        """Leaves the run. `joined` keeps its last state."""
        atexit.unregister(self.leave)
        if self.joined is not None:
            self.joined.__exit__(None, None, None)


def _follow(joined: JoinedLoop, scheduler: Any, max_steps: int) -> None:
    """Has a schedule look up its learning rate where the run is, on the way from the first step to the last."""
    if not isinstance(scheduler, LambdaLR):
        raise UserError(
            f"follow_run needs a schedule that is a function of the step, as those of transformers.get_scheduler mostly are, and "
            f"this one is a {type(scheduler).__name__}: choose another lr_scheduler_type, or leave follow_run out."
        )

    def follow(factor_of: Callable[[int], float]) -> Callable[[int], float]:
        return lambda _: factor_of(round(joined.progress * max_steps))

    scheduler.lr_lambdas = [follow(factor_of) for factor_of in scheduler.lr_lambdas]
