"""Runs that differ in the seed alone, in the terminal: how far each is, and what came out of all of them."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from heloco.records.evaluations import EvaluationRecord
from heloco.records.tape import ArrivalRecord
from heloco.report.overview import NOISE, marked
from heloco.report.run_groups import seed_of
from heloco.report.run_reader import Run
from heloco.report.table_data import Cell, TableData
from heloco.report.wording import MEASURES, duration, number

SEED_COLUMNS = 6
"""With more seeds, each one's numbers would not fit into a terminal: the table then has their mean alone."""


class SeedsProgress(AbstractContextManager["SeedsProgress"]):
    """How far the runs are: a bar for each on a terminal, a line per evaluation elsewhere."""

    def __init__(self, seeds: Sequence[int], arrivals: int, unit: str, console: Console) -> None:
        self.arrivals, self.unit, self.console = arrivals, unit, console
        self._began = time.monotonic()
        columns = (TextColumn("seed {task.fields[seed]}"), BarColumn(None), TextColumn("{task.description}"))
        self.bars = Progress(*columns, console=console, expand=True) if console.is_terminal else None
        self.observers = {seed: SeedObserver(self, seed) for seed in seeds}
        """What looks on at the run of each seed."""

    def __enter__(self) -> "SeedsProgress":
        (self.bars or nullcontext()).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        (self.bars or nullcontext()).__exit__(*error)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the display was made."""
        return time.monotonic() - self._began

    def time_left_s(self) -> float | None:
        """Seconds until all runs are at their end, if they go on at their pace so far; None if nothing has arrived."""
        arrivals = sum(observer.arrivals for observer in self.observers.values())
        return self.elapsed_s / arrivals * (self.arrivals * len(self.observers) - arrivals) if arrivals else None


@dataclass
class SeedObserver:
    """Looks on at the run of one seed."""

    display: SeedsProgress
    seed: int
    arrivals: int = 0
    loss: float | None = None
    bar: TaskID | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.display.bars is not None:
            self.bar = self.display.bars.add_task("", total=self.display.arrivals, seed=self.seed)

    def on_arrival(self, record: ArrivalRecord) -> None:
        """Moves the bar, or prints a refusal."""
        self.arrivals = record.arrival
        if record.verdict == "refused":
            self.display.console.print(
                f"[yellow]seed {self.seed}: worker {record.worker}'s contribution was refused: {record.reason}[/]"
            )
        self._draw()

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Shows the loss next to the bar, or prints a line."""
        self.loss = record.mean.get("loss")
        self._draw()
        if self.bar is None:
            self.display.console.print(
                f"seed {self.seed}  arrival {record.arrival:>6}/{self.display.arrivals}  virtual {duration(record.time_s)}  "
                f"{record.units:,} {self.display.unit}  mean validation loss {number(self.loss)}",
                highlight=False,
                soft_wrap=True,
            )

    def _draw(self) -> None:
        if self.bar is None or self.display.bars is None:
            return
        left_s = self.display.time_left_s()
        left = "" if left_s is None else f", {duration(left_s)} left"
        description = (
            f"{self.arrivals}/{self.display.arrivals} arrivals · loss {number(self.loss)} · "
            f"{duration(self.display.elapsed_s)} gone{left}"
        )
        self.display.bars.update(self.bar, completed=self.arrivals, description=description)


def seeds_table(runs: Sequence[Run]) -> TableData:
    """The last evaluation of each run, and the mean over those that reached their end."""
    whole_runs = [run for run in runs if run.is_whole]
    shown_runs = runs if len(runs) <= SEED_COLUMNS else []
    header = ["", *(f"seed {seed_of(run)}" for run in shown_runs), "mean ± standard deviation"]
    rows = []
    for name, measure, source in _lines(runs):
        cells = [Cell(number(_last(run, measure, source))) for run in shown_runs]
        [mean] = marked([{seed_of(run): _last(run, measure, source) for run in whole_runs}], measure)
        rows.append([Cell(name), *cells, mean])
    caption = NOISE.partition(". ")[0] + "."
    if stopped_seeds := [str(seed_of(run)) for run in runs if not run.is_whole]:
        caption += f" Not in the mean, because the run did not reach its end: seed {', '.join(stopped_seeds)}."
    return TableData(f"Validation at the end, {len(runs)} seeds", header, rows, caption)


def _lines(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """Name, measure and source of each line: the means over the sources, then the loss of each source."""
    measures = [measure for measure in MEASURES if measure in runs[0].measures]
    sources = runs[0].sources if "loss" in measures and len(runs[0].sources) > 1 else []
    lines = [(f"{MEASURES[measure]}, mean" if sources else MEASURES[measure], measure, "") for measure in measures]
    return [*lines, *((f"loss, {source}", "loss", source) for source in sources)]


def _last(run: Run, measure: str, source: str) -> float | None:
    if not run.evals:
        return None
    record = run.evals[-1]
    return (record.scores.get(source, {}) if source else record.mean).get(measure)
