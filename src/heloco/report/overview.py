"""The runs in words and tables: their results, where one was cut short, and how their settings differ."""

from collections.abc import Sequence
from typing import Any

from heloco.records.provenance import note_if_mixed
from heloco.report.charts.curves import measures_of, time_label
from heloco.report.run_groups import (
    RunGroup,
    SeedValues,
    finite_numbers,
    group_runs,
    has_seeds,
    is_beyond_noise,
    seed_mean,
    seed_of,
)
from heloco.report.run_reader import Run
from heloco.report.table_data import Cell, TableData
from heloco.report.wording import MEASURES, duration, number

NOISE = (
    "Mean ± sample standard deviation over seeds. The best is marked only if it differs from every other by more than the "
    "standard deviation of their difference, which is taken seed by seed where the seeds are the same."
)
SLACK = 0.01
"""Runs that were given the same budget but for this part of it are compared as if it were the same."""
LESS_IS_BETTER = {"accuracy": False}
"""Whether less is better, for each measure that is not like a loss. Less is better for all others."""


def runs_table(runs: Sequence[Run]) -> TableData:
    """Where each run stands, its scores first. Seeds are one row. The best of each measure is marked if there are others, and if
    it was trained on no more than they were."""
    measures, groups = measures_of(runs), group_runs(runs)
    time = time_label(runs).removesuffix(" (s)")
    unit = runs[0].facts.unit
    header = ["run", *(MEASURES.get(m, m) for m in measures), *(["seeds"] if has_seeds(groups) else [])]
    header += ["method", "paces (s)", "arrivals", time, unit, "mean staleness"]
    spent = [[float(run.evals[-1].units) for run in group.runs if run.evals] for group in groups]
    columns = [[Cell(group.name) for group in groups]]
    for measure in measures:
        last = [{seed_of(run): run.evals[-1].mean.get(measure) if run.evals else None for run in group.runs} for group in groups]
        columns.append(marked(last, measure, spent))
    if has_seeds(groups):
        columns.append([Cell(str(len(group.runs)), ", ".join(map(str, group.seeds))) for group in groups])
    rows = [[*first, *_facts(group)] for first, group in zip(zip(*columns, strict=True), groups, strict=True)]
    caption = ["Scores are those of the last evaluation."] if measures else []
    caption += [NOISE] if has_seeds(groups) else []
    if measures and len(groups) > 1:
        caption.append(f"A best one is marked only if it was trained on no more {unit} than the others.")
    if any(run.facts.is_real for run in runs):
        caption.append(
            "Paces of real machines are measured: seconds per inner step from handing out to arrival, transfers included. Real "
            "time is the run's own, which stands still while its synchronizer is down."
        )
    return TableData("Runs", header, rows, " ".join(caption))


def _facts(group: RunGroup) -> list[Cell]:
    """The method of a group's runs, and how far they are."""
    summaries = [run.summary for run in group.runs]
    planned = group.runs[0].planned
    arrivals = span_in_words([s.arrivals for s in summaries])
    goal = f" of {planned:,}" if any(s.arrivals != planned for s in summaries) else ""
    stale = [sum(worker.staleness_sum for worker in s.workers) / s.arrivals for s in summaries if s.arrivals]
    facts = [group.method, _paces(group.runs[0]), f"{arrivals}{goal}", duration(max(s.time_s for s in summaries))]
    staleness = number(seed_mean(stale).mean, 2)
    return [Cell(text) for text in (*facts, span_in_words([s.units for s in summaries]), staleness)]


def span_in_words(values: Sequence[float]) -> str:
    """The number that all have, or the least and the greatest."""
    low, high = min(values), max(values)
    return f"{low:,.10g}" if low == high else f"{low:,.10g}–{high:,.10g}"


def _paces(run: Run) -> str:
    if not run.facts.is_real:
        return paces_in_words(run.facts.paces)
    measured = [pace for worker in run.summary.workers if (pace := worker.measured_s) is not None]
    return paces_in_words([float(f"{pace:.2g}") for pace in measured]) if measured else "–"


def marked(groups: Sequence[SeedValues], measure: str, spent: Sequence[Sequence[float]] = (), digits: int = 3) -> list[Cell]:
    """The cells of a measure of several groups of runs: a mean, with its spread where there are seeds. The best is marked.

    Where there are no seeds, all that look like the best are marked, unless all look the same. Where there are, the best is
    marked if it differs from every other by more than noise. `spent`: how much of the budget each run of a group had; a best
    one that had more than another is not marked, because it may be the best by that alone."""
    means = [seed_mean(list(values.values())) for values in groups]
    texts = [number(each.mean, digits) + ("" if each.spread is None else f" ± {each.spread:.{digits}f}") for each in means]
    indices = [i for i, each in enumerate(means) if each.mean is not None]
    sign = 1 if LESS_IS_BETTER.get(measure, True) else -1
    best = min(indices, key=lambda i: sign * (means[i].mean or 0.0), default=None)
    if any(len(values) > 1 for values in groups):
        usual_spread = max((each.spread for each in means if each.spread is not None), default=0.0)
        others = [groups[i] for i in indices if i != best]
        is_clear = bool(others) and all(is_beyond_noise(groups[best or 0], other, usual_spread) for other in others)
        best_texts = {texts[best]} if best is not None and is_clear else set()
    else:
        best_texts = {texts[best]} if best is not None and len({texts[i] for i in indices}) > 1 else set()
    spent = spent or [()] * len(groups)
    smallest = min((value for i in indices for value in spent[i]), default=0.0)
    cells = []
    for values, text, budgets in zip(groups, texts, spent, strict=True):
        count = len(finite_numbers(list(values.values())))
        partial = f" ({count} of {len(values)} seeds)" if 0 < count < len(values) else ""
        has_more = max(budgets, default=0.0) > smallest + SLACK * abs(smallest)
        cells.append(Cell(text + partial, tone="best" if text in best_texts and not has_more else ""))
    return cells


def paces_in_words(paces: Sequence[float], limit: int = 8) -> str:
    texts = [f"{pace:g}" for pace in paces]
    return ", ".join(texts) if len(texts) <= limit else f"{len(texts)} from {min(paces):g} to {max(paces):g}"


def settings_table(runs: Sequence[Run]) -> TableData:
    """The settings in which the runs differ; of a single run all of them."""
    groups = group_runs(runs)
    columns = [{f"{section}.{name}": v for section, entries in run.config.items() for name, v in entries.items()} for run in runs]
    names = list(dict.fromkeys(name for settings in columns for name in settings))
    names_that_differ = [name for name in names if any(settings.get(name) != columns[0].get(name) for settings in columns)]
    settings_of_run = dict(zip((run.path for run in runs), columns, strict=True))

    def cell(name: str, group: RunGroup) -> Cell:
        texts = [_setting_text(settings_of_run[run.path].get(name)) for run in group.runs]
        return Cell(", ".join(texts if len(set(texts)) > 1 else texts[:1]))

    rows = [[Cell(name), *(cell(name, group) for group in groups)] for name in (names if len(runs) == 1 else names_that_differ)]
    if len(runs) == 1:
        return TableData("Settings", ["setting", runs[0].name], rows)
    shared_count = len(names) - len(names_that_differ)
    caption = f"The other {shared_count} settings are the same in all runs. –: the setting is not of that method."
    return TableData("Settings that differ", ["setting", *(group.name for group in groups)], rows, caption)


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
    if mixture_note := note_if_mixed(computed for run in runs if (computed := run.facts.provenance)):
        sentences.append(mixture_note)
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
