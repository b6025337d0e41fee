"""Hugging Face's Trainer takes part in a run: Trainer(..., callbacks=[HeLoCoCallback(address)])."""

import atexit
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from heloco.cluster.client.join_own_loop import join
from heloco.cluster.client.joined_loop import JoinedLoop
from heloco.cluster.client.loop_evaluation import VALIDATION, LoopScores
from heloco.cluster.client.loop_options import ModelScorer
from heloco.cluster.protocol.link import Link
from heloco.errors import UserError

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise UserError("HeLoCoCallback needs Hugging Face's transformers: pip install 'heloco[hf]' accelerate") from error


EVAL, SECONDS, MEMORY = "eval_", "runtime", "mem_"
TIMES = {
    SECONDS, "samples_per_second", "steps_per_second", "tokens_per_second", "model_preparation_time", "jit_compilation_time",
}  # fmt: skip
"""What the Trainer says of how long an evaluation took."""


class HeLoCoCallback(TrainerCallback):
    """Joins a run when the training begins and leaves it at the end. The options are those of
    `heloco.join`. Without an address it does nothing.

    follow_run: the Trainer's learning-rate schedule follows the progress of the whole run, not the count of this machine's steps:
        when the run ends it has reached its end, too. So does `state.max_steps`, by which others tell how long it takes. Give the
        Trainer more `max_steps` than it will need, because it counts its epochs before it begins.
    evaluate: scores the run's model, as in `heloco.join`. It may use the Trainer's own: `lambda model: trainer.evaluate()`.

    What the Trainer evaluates by itself goes to the run's evaluations too: the measures whose names begin with `eval_`."""

    def __init__(
        self,
        address: "str | Link | None" = None,
        *,
        token: str | None = None,
        name: str | None = None,
        reset_optimizer: bool = False,
        follow_run: bool = False,
        patience_s: float = 3600.0,
        evaluate: ModelScorer | None = None,
        tell: Callable[[str], Any] = print,
    ) -> None:
        self.joined: JoinedLoop | None = None
        """This machine's state in the run; None before the training begins."""
        self._address, self._follow_run = address, follow_run
        self._options: dict[str, Any] = {
            "token": token, "name": name, "reset_optimizer": reset_optimizer, "patience_s": patience_s, "tell": tell,
            "evaluate": None if evaluate is None else self._score_run,
        }  # fmt: skip
        self._evaluate = evaluate
        self._scores: dict[str, dict[str, Any]] = {}
        """What the Trainer has evaluated since its last step. With several sets it tells of one after the other."""
        self._is_scoring_run = False
        """Whether the run's model is in the place of the Trainer's."""

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # noqa: ARG002
        """Joins the run with the Trainer's model and optimizer."""
        self.leave()  # an earlier training may have been interrupted
        self._scores = {}
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
        """Stops the training if the run has ended, and not before that if it follows the run."""
        if self.joined is None or not self.joined.active:
            return
        if self.joined.ended:
            control.should_training_stop = True
        elif self._follow_run:
            state.max_steps = state.global_step + max(2, self.joined.steps_left)  # at 1 the Trainer would stop at the next step

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:  # noqa: ARG002
        """Reports what the Trainer evaluated since its last step."""
        self._report_scores()

    def on_evaluate(
        self,
        args: TrainingArguments,  # noqa: ARG002
        state: TrainerState,  # noqa: ARG002
        control: TrainerControl,  # noqa: ARG002
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Keeps the measures of an evaluation of the Trainer's, until its next step."""
        if self.joined is not None and not self._is_scoring_run:
            self._scores |= trainer_scores(metrics or {})

    def _report_scores(self) -> None:
        scores, self._scores = self._scores, {}
        if self.joined is not None and scores:
            self.joined.report_eval(scores)

    def _score_run(self, model: nn.Module) -> LoopScores:
        assert self._evaluate is not None
        self._is_scoring_run = True
        try:
            scores = self._evaluate(model)
        finally:
            self._is_scoring_run = False
        is_trainers = isinstance(scores, Mapping) and any(str(name).startswith(EVAL) for name in scores)
        return trainer_scores(scores) if is_trainers else scores  # type: ignore[arg-type]

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
        self._report_scores()
        self.leave()

    def leave(self) -> None:
        """Leaves the run. `joined` keeps its last state."""
        atexit.unregister(self.leave)
        if self.joined is not None:
            self.joined.__exit__(None, None, None)


def trainer_scores(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The measures of the Trainer's evaluations by the names of its evaluation sets: of `eval_loss` the loss of "validation", of
    `eval_de_loss` that of "de". The Trainer names the seconds of each set, so they say how its names begin."""
    timed = [name for name in metrics if name.startswith(EVAL) and name.endswith(f"_{SECONDS}")]
    beginnings = [name.removesuffix(SECONDS) for name in timed] or [EVAL]
    scores: dict[str, dict[str, Any]] = {}
    for name, value in metrics.items():
        beginning = max((each for each in beginnings if name.startswith(each)), key=len, default=None)
        if beginning is None or not isinstance(value, int | float) or isinstance(value, bool):
            continue
        measure = name.removeprefix(beginning)
        if measure not in TIMES and not measure.startswith(MEMORY):
            source = beginning.removeprefix(EVAL).removesuffix("_") or VALIDATION
            scores.setdefault(source, {})[measure] = value
    return scores


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
