"""A run in the terminal: live while it goes, as tables when it has ended."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from heloco.records.evaluations import EvaluationRecord, Measures
from heloco.records.run_facts import RunFacts
from heloco.records.tape import ArrivalRecord
from heloco.report.fitted_table import FittedTable
from heloco.report.run_reader import Milestone
from heloco.report.summary import RunSummary, WorkerSummary
from heloco.report.wording import MEASURES, duration, number

if TYPE_CHECKING:
    from heloco.engine.schedule import WorkerShare

NOTHING_EVALUATED = "Nothing is evaluated in this run: the data is with the machines, and none of them evaluates its model."
MEASURED = "pace: seconds per inner step as measured, from handing out to arrival"


def pace(summary: RunSummary, worker: WorkerSummary) -> str:
    pace_s = summary.pace_s(worker)
    return "–" if pace_s is None else f"{pace_s:.3g} s" if summary.is_real else f"{pace_s:g} s"


class Progress:
    """Looks on at a run. On a terminal it redraws one panel; elsewhere it prints a line per evaluation."""

    def __init__(self, summary: RunSummary, facts: RunFacts, arrivals: int, console: Console) -> None:
        self.summary, self.facts = summary, facts
        self.arrivals = arrivals
        self.console = console
        self.live: Live | None = None
        self._began = time.monotonic()
        self._begun_at = summary.arrivals

    def on_arrival(self, record: ArrivalRecord) -> None:
        """Adds a line of the tape, prints a refusal, and redraws the panel."""
        self.summary.add_arrival(record)
        if record.verdict == "refused":
            self.console.print(f"[yellow]worker {record.worker}'s contribution was refused: {record.reason}[/]")
        if self.live:
            self.live.update(self.panel())

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Takes in an evaluation: redraws the panel, or prints a line if there is none."""
        self.summary.add_evaluation(record)
        if self.live:
            self.live.update(self.panel())
        else:
            self.print_line(record)

    def print_line(self, stage: EvaluationRecord | Milestone) -> None:
        """An evaluation in one line. If nothing is evaluated, the line has the losses that the machines report."""
        if isinstance(stage, EvaluationRecord):
            loss = f"validation loss {number(stage.mean.get('loss'))}"
        else:
            loss = f"training loss {'not reported' if stage.training_loss is None else number(stage.training_loss)}"
        self.console.print(
            f"arrival {stage.arrival:>6}/{self.arrivals}  {self.summary.clock} {duration(stage.time_s)}  "
            f"{stage.units:,} {self.facts.unit}  mean {loss}"
        )

    def panel(self, progress: str = "") -> RenderableType:
        """The panel as it looks now: progress with the time that is left, loss, and a row per worker. `progress`: other words
        for the progress."""
        s = self.summary
        elapsed_s = time.monotonic() - self._began
        arrivals_done = s.arrivals - self._begun_at
        remaining_s = elapsed_s / arrivals_done * (self.arrivals - s.arrivals) if arrivals_done else None
        facts = Table.grid(padding=(0, 3))
        facts.add_row(
            f"outer step [b]{s.outer_step}[/]",
            f"{s.clock} time [b]{duration(s.time_s)}[/]",
            f"{self.facts.unit} [b]{s.units:,}[/]",
            _loss(s),
        )
        table = Table(box=None, padding=(0, 2), header_style="dim")
        for name in ("worker", "pace", "shard", "arrivals", "staleness", "mean", "training loss"):
            table.add_column(name, justify="left" if name in ("worker", "shard") else "right")
        for i, w in enumerate(s.workers):
            table.add_row(
                str(i),
                pace(s, w),
                "–" if w.shard is None else self.facts.shards[w.shard].name,
                str(w.arrivals),
                "–" if w.last_staleness is None else str(w.last_staleness),
                f"{w.mean_staleness:.1f}",
                number(w.loss),
            )
        times = f"{duration(elapsed_s)} gone" + (f", {duration(remaining_s)} left" if remaining_s is not None else "")
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(ProgressBar(self.arrivals, s.arrivals), progress or f"{s.arrivals}/{self.arrivals} arrivals · {times}")
        return Panel(Group(bar, facts, Text(), FittedTable(table)), title=f"[b]{self.facts.method}[/]", title_align="left")


def _loss(summary: RunSummary) -> str:
    if summary.is_external and summary.last_eval is None:
        last = [worker.loss for worker in summary.workers if worker.loss is not None]
        return f"training loss [b]{number(sum(last) / len(last) if last else None)}[/] (nothing is evaluated)"
    return f"validation loss [b]{number(summary.last_eval.mean.get('loss') if summary.last_eval else None)}[/]"


@contextmanager
def show_progress(progress: Progress) -> Iterator[Progress]:
    """A context in which the panel of `progress` is on the screen. If the output is no terminal, nothing is drawn."""
    if not progress.console.is_terminal:
        yield progress
        return
    with Live(progress.panel(), console=progress.console, refresh_per_second=8) as live:
        progress.live = live
        yield progress
    progress.live = None


def tables(summary: RunSummary) -> Iterator[RenderableType]:
    """What a finished run shows: losses, workers, what the correction did."""
    if summary.last_eval:
        first, last = summary.first_eval or summary.last_eval, summary.last_eval
        yield FittedTable(scores_table(last.mean, last.scores, (first.mean, first.scores)))
    elif summary.is_external:
        yield Text(NOTHING_EVALUATED)
    yield FittedTable(workers_table(summary))
    if summary.machines:
        yield FittedTable(contributions_table(summary))
    if sum(summary.cases.values()):
        yield FittedTable(cases_table(summary))


Scores = dict[str, Measures]


def scores_table(mean: Measures, scores: Scores, start: tuple[Measures, Scores] | None = None) -> Table:
    """Each measure at the end, next to the start where there is one."""
    measures = [*[m for m in MEASURES if m in mean], *sorted(mean.keys() - MEASURES.keys())]
    table = Table(title="Validation", title_justify="left")
    table.add_column("")
    for measure in measures:
        name = MEASURES.get(measure, measure)
        if start is not None:
            table.add_column(Text(f"{name}, start"), justify="right", style="dim")
        table.add_column(Text(name if start is None else "end"), justify="right", style="bold")

    def cells(*stages: Measures) -> list[str]:
        return [number(stage.get(measure)) for measure in measures for stage in stages]

    for name in scores:
        table.add_row(Text(name), *cells(*([start[1].get(name, {})] if start else []), scores[name]))
    table.add_section()
    table.add_row("mean", *cells(*([start[0]] if start else []), mean))
    return table


def workers_table(summary: RunSummary) -> Table:
    table = Table(title="Workers", title_justify="left", caption=MEASURED if summary.is_real else None, caption_justify="left")
    for name in ("worker", "pace", "arrivals", "share", "mean staleness", "max", "share of movement"):
        table.add_column(name, justify="left" if name == "worker" else "right")
    has_refusals = any(w.refused for w in summary.workers)
    if has_refusals:
        table.add_column("refused", justify="right")

    def row(i: int, w: WorkerSummary) -> list[str]:
        cells = [str(i), pace(summary, w), str(w.arrivals), f"{summary.share(w):.1%}", f"{w.mean_staleness:.2f}"]
        return [*cells, str(w.max_staleness), f"{summary.movement_share(w):.1%}", *([str(w.refused)] if has_refusals else [])]

    for i, worker in enumerate(summary.workers):
        table.add_row(*row(i, worker))
    return table


def contributions_table(summary: RunSummary) -> Table:
    """The table of a real run's machines: what each contributed, and whether it still does."""
    caption = f"lately: of the last {len(summary.recent)} arrivals"
    table = Table(title="Machines", title_justify="left", caption=caption, caption_justify="left")
    has_refusals = any(machine.refused for machine in summary.machines.values())
    names = ("machine", "workers", "arrivals", "share", "lately", "last at", "stale", "pace")
    for name in (*names, *(["refused"] if has_refusals else [])):
        table.add_column(name, justify="left" if name in ("machine", "workers") else "right")
    for _, machine in sorted(summary.machines.items()):
        pace = "–" if machine.measured_s is None else f"{machine.measured_s:.3g} s"
        last = "–" if machine.last_s is None else duration(machine.last_s)
        cells = [summary.label(machine.id), ", ".join(map(str, sorted(machine.workers))), str(machine.arrivals)]
        cells += [f"{summary.share(machine):.1%}", f"{summary.recent_share(machine):.1%}", last]
        cells += [f"{machine.mean_staleness:.2f}", pace, *([str(machine.refused)] if has_refusals else [])]
        table.add_row(*map(Text, cells))
    return table


def cases_table(summary: RunSummary) -> Table:
    table = Table(title="What the correction did, over all blocks and arrivals", title_justify="left")
    total = sum(summary.cases.values())
    for name in summary.cases:
        table.add_column(name, justify="right")
    table.add_row(*(f"{count:,} ({count / total:.1%})" for count in summary.cases.values()))
    return table


def schedule_table(time_s: float, workers: "Sequence[WorkerShare]", paces: list[float]) -> Table:
    """The table of `heloco schedule`: each worker's inner steps, arrivals and staleness within the virtual time `time_s`."""
    table = Table(title=f"Virtual time {duration(time_s)} ({time_s:g} s)", title_justify="left")
    for name in ("worker", "pace", "inner steps", "arrivals", "share", "mean staleness", "max"):
        table.add_column(name, justify="left" if name == "worker" else "right")
    for i, (worker, pace) in enumerate(zip(workers, paces, strict=True)):
        table.add_row(
            str(i), f"{pace:g} s", str(worker.inner_steps), str(worker.arrivals), f"{worker.share:.1%}",
            f"{worker.mean_staleness:.2f}", str(worker.max_staleness),
        )  # fmt: skip
    return table
