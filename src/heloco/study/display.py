"""A study in the terminal: how far it is, its tables, the list of all."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from heloco.report.wording import duration, number
from heloco.study.grid import Place, digest, grid, total_steps
from heloco.study.kept_runs import RunRecord
from heloco.study.spec import find_study, names


class StudyDisplay(AbstractContextManager["StudyDisplay"]):
    """How far the whole study is: a bar on a terminal, a line per finished run elsewhere."""

    def __init__(self, runs: int, finished: int, console: Console) -> None:
        self.runs, self.ended, self.console = runs, finished, console
        self.time_left = ""
        self._began = time.monotonic()
        columns = (BarColumn(None), TextColumn("{task.percentage:.0f} %  {task.description}"))
        self._bar = Progress(*columns, console=console, expand=True) if console.is_terminal else None
        self._task = self._bar.add_task("") if self._bar else None

    def __enter__(self) -> "StudyDisplay":
        (self._bar or nullcontext()).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        (self._bar or nullcontext()).__exit__(*error)

    def on_progress(self, steps_done: int, steps_total: int) -> None:
        """Takes in how many of the study's inner steps are done, and moves the bar. The time left is estimated from it."""
        elapsed_s = time.monotonic() - self._began
        self.time_left = f"{duration(elapsed_s / steps_done * (steps_total - steps_done))} left" if steps_done else ""
        if self._bar and self._task is not None:
            time_note = f", {self.time_left}" if self.time_left else ""
            description = f"{self.ended}/{self.runs} runs · {duration(elapsed_s)} gone{time_note}"
            self._bar.update(self._task, total=steps_total, completed=steps_done, description=description)

    def show_run(self, places: Sequence[Place], record: RunRecord) -> None:
        """Counts a run that has ended and prints a line about it. `places`: the cells of the grid that share the run."""
        self.ended += 1
        first = places[0]
        rows = first.row if len({place.row for place in places}) == 1 else f"{len({place.row for place in places})} rows"
        outcome = f"loss {number(record.evals.loss[-1])}" if record.finished else f"diverged: {record.reason}"
        time_note = f"  ({self.time_left})" if self.time_left and not self._bar else ""
        line = f"run {self.ended:>4}/{self.runs}  seed {first.seed}  {rows}  {first.method}  {outcome}{time_note}"
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def list_table() -> Table:
    """Every study with its runs and their inner steps, at the paper's scale."""
    table = Table(title="heloco study NAME", title_justify="left", caption_justify="left")
    for name in ("study", "what it shows", "rows × methods", "runs a seed", "not in those above", "inner steps a seed"):
        table.add_column(name, justify="left" if name in ("study", "what it shows") else "right")
    earlier_keys: set[str] = set()
    for name in names():
        described_study = find_study(name)
        runs = {digest(place.config, ""): place.config for place in grid(described_study, scale="paper", seeds=1)}
        new = {key: config for key, config in runs.items() if key not in earlier_keys}
        earlier_keys |= new.keys()
        steps = sum(map(total_steps, new.values()))
        shape = f"{len(described_study.rows)} × {len(described_study.methods)}"
        table.add_row(name, described_study.title, shape, str(len(runs)), str(len(new)), f"{steps:,}")
    table.caption = "Inner steps: of the runs not in the studies above, 256 tokens each. Finished runs are kept and shared."
    return table
