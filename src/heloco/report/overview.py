"""The runs in words and tables: their results, where one was cut short, and how their settings differ."""

import math
from collections.abc import Sequence
from typing import Any

from heloco.report.charts.curves import measures_of, time_label
from heloco.report.run_reader import Run
from heloco.report.table_data import Cell, TableData
from heloco.report.wording import MEASURES, duration, number

LESS_IS_BETTER = {"accuracy": False}
"""Whether less is better, for each measure that is not like a loss. Less is better for all others."""


def runs_table(runs: Sequence[Run]) -> TableData:
    """Where each run stands; the best of each measure is marked if there are others."""
    measures = measures_of(runs)
    time = time_label(runs).removesuffix(" (s)")
    header = ["run", "method", "paces (s)", "arrivals", time, runs[0].facts.unit, "mean staleness"]
    rows = []
    for run in runs:
        s, goal = run.summary, f" of {run.planned:,}" if run.planned != run.summary.arrivals else ""
        stale = sum(worker.staleness_sum for worker in s.workers) / s.arrivals if s.arrivals else None
        facts = [run.name, run.method, _paces(run), f"{s.arrivals:,}{goal}", duration(s.time_s)]
        rows.append([Cell(text) for text in (*facts, f"{s.units:,}", number(stale, 2))])
    for measure in measures:
        last = [run.evals[-1].mean.get(measure) if run.evals else None for run in runs]
        for row, cell in zip(rows, marked(last, measure), strict=True):
            row.append(cell)
    caption = ["Scores are those of the last evaluation."] if measures else []
    if any(run.facts.is_real for run in runs):
        caption.append(
            "Paces of real machines are measured: seconds per inner step from handing out to arrival, transfers included. Real "
            "time is the run's own, which stands still while its synchronizer is down."
        )
    return TableData("Runs", [*header, *(MEASURES.get(m, m) for m in measures)], rows, " ".join(caption))


def _paces(run: Run) -> str:
    if not run.facts.is_real:
        return paces_in_words(run.facts.paces)
    measured = [pace for worker in run.summary.workers if (pace := worker.measured_s) is not None]
    return paces_in_words([float(f"{pace:.2g}") for pace in measured]) if measured else "–"


def marked(values: Sequence[float | None], measure: str, digits: int = 3) -> list[Cell]:
    """The cells of a measure of several runs. The best and all that look like it are marked, unless all look the same."""
    texts = [number(value, digits) for value in values]
    finite = [value for value in values if value is not None and math.isfinite(value)]
    differ = len({number(value, digits) for value in finite}) > 1
    best = number((min if LESS_IS_BETTER.get(measure, True) else max)(finite), digits) if differ else None
    return [Cell(text, tone="best" if text == best else "") for text in texts]


def paces_in_words(paces: Sequence[float], limit: int = 8) -> str:
    texts = [f"{pace:g}" for pace in paces]
    return ", ".join(texts) if len(texts) <= limit else f"{len(texts)} from {min(paces):g} to {max(paces):g}"


def settings_table(runs: Sequence[Run]) -> TableData:
    """The settings in which the runs differ; of a single run all of them."""
    columns = [{f"{section}.{name}": v for section, entries in run.config.items() for name, v in entries.items()} for run in runs]
    names = list(dict.fromkeys(name for settings in columns for name in settings))
    names_that_differ = [name for name in names if any(settings.get(name) != columns[0].get(name) for settings in columns)]
    rows = [
        [Cell(name), *(Cell(_setting_text(settings.get(name))) for settings in columns)]
        for name in (names if len(runs) == 1 else names_that_differ)
    ]
    if len(runs) == 1:
        return TableData("Settings", ["setting", runs[0].name], rows)
    shared_count = len(names) - len(names_that_differ)
    caption = f"The other {shared_count} settings are the same in all runs. –: the setting is not of that method."
    return TableData("Settings that differ", ["setting", *(run.name for run in runs)], rows, caption)


def _setting_text(value: Any) -> str:
    if isinstance(value, list):
        return (
            ", ".join(map(_setting_text, value))
            if len(value) <= 12
            else f"{', '.join(map(_setting_text, value[:12]))}, … ({len(value)})"
        )
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def notes(runs: Sequence[Run]) -> list[str]:
    """What a reader must know before believing the charts."""
    sentences = []
    if len({run.facts.is_real for run in runs}) > 1:
        sentences.append(
            f"Simulated time is not real time: {', '.join(run.name for run in runs if run.facts.is_real)} ran on real machines."
        )
    for run in runs:
        for name in run.cut_files:
            sentences.append(
                f"{run.name}: {name} ends in the middle of a line, as a killed run leaves it. What is whole is shown."
            )
        if run.summary.arrivals < run.planned:
            sentences.append(f"{run.name} stands at arrival {run.summary.arrivals:,} of {run.planned:,}.")
        if not run.evals and not run.facts.is_external:
            sentences.append(f"{run.name} has not been evaluated yet.")
        if run.evals and any(value is None for value in run.evals[-1].mean.values()):
            sentences.append(f"{run.name}: the last evaluation has no finite loss.")
        if refusals := run.summary.verdicts.get("refused"):
            sentences.append(f"{run.name}: {refusals:,} contributions were refused.")
        if run.journal.is_paused and run.summary.arrivals < run.planned:
            pause = run.journal.pauses[-1]
            sentences.append(f"{run.name} paused at {duration(pause.start_s)}: {pause.reason}.")
    return sentences
