"""`heloco.simulate`: a simulation in one call, from Python."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from heloco.engine.build import build_task
from heloco.engine.local import Collector, LocalRun
from heloco.errors import UserError
from heloco.records.evaluations import EvaluationRecord
from heloco.records.tape import ArrivalRecord
from heloco.run import RunConfig, resolve, with_fields
from heloco.run.config import FIELDS
from heloco.run.settings import with_recipe
from heloco.task import Task


@dataclass(frozen=True)
class Result:
    """The outcome of `heloco.simulate`: the trained model, the records of the run, and its effective config."""

    model: nn.Module
    """The outer model at the end."""
    tape: list[ArrivalRecord]
    """One record per arrival, as in tape.jsonl."""
    evals: list[EvaluationRecord]
    """One record per evaluation, as in evals.jsonl."""
    config: RunConfig

    @property
    def loss(self) -> float | None:
        """Mean validation loss at the end, over what the task evaluates."""
        return self.evals[-1].mean.get("loss")


def simulate(
    task: Task | str | None = None,
    *,
    method: str | None = None,
    paces: Sequence[float] = (1, 1, 2, 3, 6),
    recipe: str = "best",
    **settings: Any,
) -> Result:
    """Trains `task` (or the one the settings describe: "language", on the built-in languages by default, or "images") with
    unequal workers under a virtual clock. `settings` are the fields of a run's config: inner_steps, arrivals, seed, lr, …; where
    nothing is said, the recipe `best` holds, as in `heloco train`. `recipe="paper"` is the paper's setting."""
    if method is not None:
        settings["method"] = method
    if isinstance(task, str):
        settings["task"], task = task, None
    for name in settings if task is not None else ():
        if FIELDS.get(name) in ("input", "model"):
            raise UserError(f"{name} describes a task, and one was given: leave it out, or leave the task out.")
    config = resolve(with_fields(RunConfig(), with_recipe(recipe, {"paces": list(paces), **settings})))
    if task is None:
        task, config = build_task(config)
    collector = Collector()
    run = LocalRun(task, config, observers=[collector])
    run.run()  # its last evaluation leaves the buffers in the model
    return Result(run.model, collector.tape, collector.evals, config)
