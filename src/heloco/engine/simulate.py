"""`heloco.simulate`: a simulation in one call, from Python."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from heloco.engine.build import build_task
from heloco.engine.local import Collector, LocalRun, Observer, describe
from heloco.engine.progress_bar import progress_bar
from heloco.errors import UserError
from heloco.methods import Method
from heloco.records.evaluations import EvaluationRecord
from heloco.records.tape import ArrivalRecord
from heloco.run import RunConfig, RunFolder, resolve, with_fields
from heloco.run.argument_names import in_python, python_errors
from heloco.run.config import FIELDS
from heloco.run.rates import rate_warnings
from heloco.run.settings import NAMED, check_knob_names, with_recipe
from heloco.task import Task


@dataclass(frozen=True, repr=False)
class Result:
    """The outcome of `heloco.simulate`: the trained model, the records of the run, and its effective config."""

    model: nn.Module
    """The outer model at the end."""
    tape: list[ArrivalRecord]
    """One record per arrival, as in tape.jsonl."""
    evals: list[EvaluationRecord]
    """One record per evaluation, as in evals.jsonl."""
    config: RunConfig
    path: Path | None = None
    """The run's folder, if one was written."""

    @property
    def loss(self) -> float | None:
        """Mean validation loss at the end, over what the task evaluates."""
        return self.evals[-1].mean.get("loss")

    def __repr__(self) -> str:
        last = self.evals[-1]
        loss = "" if self.loss is None else f", loss {self.loss:.4g}"
        folder = "" if self.path is None else f", in {self.path}"
        return (
            f"<heloco.Result: {self.config.outer.method}, {last.arrival:,} arrivals in {last.time_s:,g} virtual s{loss}{folder}>"
        )


def simulate(
    task: Task | str | None = None,
    *,
    method: Any = None,
    paces: Sequence[float] = (1, 1, 2, 3, 6),
    recipe: str = "best",
    out: str | PathLike[str] | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Result:
    """Trains `task` (or the one the settings describe: "language", on the built-in languages by default, or "images") with
    unequal workers under a virtual clock. `settings` are the fields of a run's config: inner_steps, arrivals, seed, lr, …; where
    nothing is said, the recipe `best` holds, as in `heloco train`. `recipe="paper"` is the paper's setting.

    `method`, `weight`, `assign` and `inner_optimizer` are names, or what `heloco.register_method` and its like take: a function
    or a class of your own.

    `out`: a folder to write, as `heloco train` does. `heloco report` and `compare` take it, and `heloco.load_run` reads it.

    `progress`: whether a bar shows how far the run is. Unset: in notebooks alone.
    """
    if method is not None:
        settings["method"] = method
    if isinstance(task, str):
        settings["task"], task = task, None
    with python_errors():
        for name in settings if task is not None else ():
            if FIELDS.get(name) in ("input", "model"):
                raise UserError(f"{name} describes a task, and one was given: leave it out, or leave the task out.")
        name_items(settings)
        config = resolve(with_fields(RunConfig(), with_recipe(recipe, {"paces": list(paces), **settings})))
        check_knob_names(config, settings)
        for warning in rate_warnings(config):
            warnings.warn(in_python(warning), stacklevel=2)
        if out is not None:
            RunFolder.check_free(Path(out))
        if task is None:
            task, config = build_task(config)
        else:
            config = replace(config, input=replace(config.input, task=type(task).__name__))
        with progress_bar(config.run.arrivals, is_shown=progress) as bars:
            return _carry_out(task, config, None if out is None else Path(out), bars)


def name_items(settings: dict[str, Any]) -> None:
    """Registers functions and classes that stand in the place of a name, and puts their names there."""
    for setting, registry in NAMED.items():
        item = settings.get(setting)
        if callable(item) or isinstance(item, Method):
            settings[setting] = registry.name_of(item)


def _carry_out(task: Task, config: RunConfig, path: Path | None, observers: Sequence[Observer]) -> Result:
    collector = Collector()
    run = LocalRun(task, config, observers=[collector, *observers])
    if path is not None:
        run.folder = RunFolder.create(path, config, describe(task, config, run.model, execution=run.execution))
    try:
        if run.folder is not None:
            run.folder.start_writing()
        run.run()  # its last evaluation leaves the buffers in the model
    finally:
        if run.folder is not None:
            run.folder.close()
    return Result(run.model, collector.tape, collector.evals, config, path)
