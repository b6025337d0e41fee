"""Runs side by side at the same budget: of tokens, and of time, virtual or real."""

from collections.abc import Callable, Sequence
from typing import Literal

from heloco.errors import UserError
from heloco.records.evaluations import EvaluationRecord
from heloco.report.charts.curves import measures_of, score_of, time_label
from heloco.report.overview import NOISE, SLACK, marked, span_in_words
from heloco.report.run_groups import group_runs, has_seeds
from heloco.report.run_reader import Run
from heloco.report.table_data import Cell, TableData
from heloco.report.wording import MEASURES

Budget = Literal["units", "time_s"]


def tables_at(runs: Sequence[Run], *, units: float | None = None, time_s: float | None = None) -> list[TableData]:
    """A table per budget. Without one given: the smallest that all runs reached."""
    for run in runs:
        if run.facts.is_external and not run.evals:
            raise UserError(
                f"No machine evaluates {run.path}, so there is nothing to compare: its data is with the machines. "
                "`heloco report` shows the training losses that they reported. heloco.join(…, evaluate=…) evaluates."
            )
        if not run.evals:
            raise UserError(f"Nothing has been evaluated yet in {run.path}: leave it out, or wait for its first evaluation.")
    return [table_at(runs, "units", units), table_at(runs, "time_s", time_s)]


def tables_of_budgets(runs: Sequence[Run]) -> list[TableData]:
    """For a page: a table for each budget of which the runs had not the same, so that their last scores do not compare."""
    tables: list[TableData] = []
    if len(group_runs(runs)) < 2 or not all(run.evals for run in runs):
        return tables
    budgets: list[Budget] = ["units", "time_s"] if len({run.facts.is_real for run in runs}) == 1 else ["units"]
    for budget in budgets:
        ends = [float(getattr(run.evals[-1], budget)) for run in runs]
        first = max(float(getattr(run.evals[0], budget)) for run in runs)
        if max(ends) > min(ends) * (1 + SLACK) and min(ends) > 0 and min(ends) >= first:
            tables.append(table_at(runs, budget))
    return tables


def table_at(runs: Sequence[Run], budget: Budget, limit: float | None = None) -> TableData:
    """Each run by its last evaluation within the budget. Nothing is interpolated, and the caption says how far the evaluations
    are apart."""
    reached = [getattr(run.evals[-1], budget) for run in runs]
    limit = min(reached) if limit is None else limit
    unit = runs[0].facts.unit if budget == "units" else f"s of {time_label(runs).removesuffix(' (s)')}"
    groups = group_runs(runs)
    records = {run.path: _last_within(run, budget, limit) for run in runs}
    rows = [[records[run.path] for run in group.runs] for group in groups]
    measures = [m for m in measures_of(runs) if any(record.mean.get(m) is not None for record in records.values())]
    sources = list(dict.fromkeys(source for record in records.values() for source in record.scores))
    header, columns = ["run"], [[Cell(group.name) for group in groups]]
    at = [[float(getattr(record, budget)) for record in row] for row in rows]
    ends = [[min(limit, float(getattr(run.evals[-1], budget))) for run in group.runs] for group in groups]
    spent = at if budget == "units" else ends  # a barrier's last model within the time is all that it has then

    def add(name: str, measure: str, value: Callable[[EvaluationRecord], float | None]) -> None:
        header.append(name)
        values = [dict(zip(group.seeds, map(value, row), strict=True)) for group, row in zip(groups, rows, strict=True)]
        columns.append(marked(values, measure, spent))

    for measure in measures:
        add(MEASURES.get(measure, measure), measure, score_of(measure))
    for source in sources if "loss" in measures else ():
        add(source, "loss", score_of("loss", source))
    header += [*(["seeds"] if has_seeds(groups) else []), "arrival", "at" if budget == "time_s" else unit]
    columns += [[Cell(str(len(group.runs))) for group in groups]] if has_seeds(groups) else []
    columns.append([Cell(span_in_words([record.arrival for record in row])) for row in rows])
    if budget == "time_s":
        columns.append([Cell(f"{span_in_words([float(f'{time_s:.6g}') for time_s in row])} s") for row in at])
    else:
        columns.append([Cell(span_in_words([record.units for record in row])) for row in rows])
    caption = "Each run's last evaluation within the budget, mean over sources; then the loss of each source. "
    caption += NOISE if has_seeds(groups) else "The best is marked."
    caption += " It is not marked if it had more of the budget than another." if len(groups) > 1 else ""
    caption += _spread_in_words([getattr(record, budget) for record in records.values()], limit, unit)
    short = [run.name for run, end in zip(runs, reached, strict=True) if end < limit]
    caption += f" Ended before the budget: {', '.join(short)}." if short else ""
    if budget == "time_s" and len({run.facts.is_real for run in runs}) > 1:
        caption += " Virtual seconds are not real ones: what was simulated and what was not do not compare by time."
    return TableData(f"At {limit:,.10g} {unit}", header, [list(row) for row in zip(*columns, strict=True)], caption)


def _spread_in_words(places: Sequence[float], limit: float, unit: str) -> str:
    """How far apart the runs were evaluated: a run that was evaluated later has trained for longer."""
    spread = max(places) - min(places)
    if not spread:
        return "" if max(places) == limit else f" All are of {max(places):,.6g} {unit}."
    return (
        f" The evaluations are up to {spread:,.6g} {unit} apart, {spread / limit:.1%} of the budget: a run that was evaluated "
        "earlier has trained for less. A smaller --eval-every brings them closer."
    )


def _last_within(run: Run, budget: Budget, limit: float) -> EvaluationRecord:
    within = [record for record in run.evals if getattr(record, budget) <= limit]
    if not within:
        first = getattr(run.evals[0], budget)
        raise UserError(f"{run.path} has no evaluation within {limit:g}: its first is at {first:g}. Give a larger budget.")
    return within[-1]
