"""What a study will cost on a device without a measurement of the whole: a few real steps, multiplied."""

import time
from collections.abc import Sequence
from dataclasses import replace

from heloco.engine.build import build_parts
from heloco.engine.fleet import PlannedRun
from heloco.study.grid import total_steps

MEASURED_STEPS = 3


def hours_here(runs: Sequence[PlannedRun], device: str) -> float:
    """Hours for these runs one inner step after the other, from a few steps of the first of each model."""
    seconds, step_seconds = 0.0, dict[str, float]()
    for run in runs:
        model = repr((run.config.model, run.config.inner.windows_per_step))
        if model not in step_seconds:
            step_seconds[model] = seconds_per_step(run, device)
        seconds += step_seconds[model] * total_steps(run.config)
    return seconds / 3600


def seconds_per_step(run: PlannedRun, device: str) -> float:
    config = replace(
        run.config,
        rounds=replace(run.config.rounds, inner_steps=MEASURED_STEPS, steps="constant"),
        run=replace(run.config.run, device=device),
    )
    parts = build_parts(run.task, config)
    round_ = parts.synchronizer.dispatch(0)
    parts.inner.run([round_])  # the first steps set things up
    began = time.perf_counter()
    parts.inner.run([round_])
    return (time.perf_counter() - began) / MEASURED_STEPS
