"""What the page of a report shows, as JSON can say it."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from heloco.records.json_numbers import shorten_number
from heloco.records.tape import CASES
from heloco.report import overview
from heloco.report.charts import correction_map, curves, machine_charts, worker_charts
from heloco.report.charts.chart import Bars, Chart, Content, Heat, Spans, View, run_colours
from heloco.report.charts.figures import Figure, Panel, describe_figure, y_ranges
from heloco.report.compare import tables_of_budgets
from heloco.report.machine_tables import machine_tables
from heloco.report.page_writer import render_report
from heloco.report.run_groups import group_runs
from heloco.report.run_reader import Run
from heloco.report.table_data import TableData


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """In the order of the page: first all runs together, then one at a time. If nothing is evaluated, the training losses that
    the machines report stand first."""
    has_begun, is_evaluated = any(len(run.tape) for run in runs), any(run.evals or not run.facts.is_external for run in runs)
    training = worker_charts.training(runs) if has_begun else None
    charts = [curves.scores(runs), curves.sources(runs), None if is_evaluated else training, curves.own_scores(runs)]
    charts += [curves.norms(runs), curves.traffic(runs)]
    if has_begun:
        charts += [machine_charts.participation(runs), worker_charts.timeline(runs), worker_charts.staleness(runs)]
        charts += [worker_charts.histogram(runs), worker_charts.shares(runs), machine_charts.shares(runs)]
        charts += [training if is_evaluated else None, correction_map.correction(runs)]
    return [chart for chart in charts if chart is not None]


def render_runs(runs: Sequence[Run]) -> str:
    """The report of these runs: one HTML page."""
    return render_report(page_data(runs))


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """All that the page shows, as JSON can say it."""
    groups = group_runs(runs)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return {
        "title": f"HeLoCo: {title}",
        "notes": overview.notes(runs),
        "runs": [{"name": group.name, "method": group.method, "colour": colour, "dashed": dashed}
                 for group, (colour, dashed) in zip(groups, run_colours(groups), strict=True)],
        "run": opening_run(runs),
        "tables": [asdict(table) for table in tables_of(runs)],
        "charts": [_chart(chart) for chart in charts_of(runs)],
    }  # fmt: skip


def tables_of(runs: Sequence[Run]) -> list[TableData]:
    """In the order of the page; the settings are the last."""
    return [overview.runs_table(runs), *tables_of_budgets(runs), *machine_tables(runs), overview.settings_table(runs)]


def opening_run(runs: Sequence[Run]) -> str:
    """The run that charts of one run show first: the first that corrects, because the map of the others has nothing to show."""
    return next((run for run in runs if correction_map.corrects(run)), runs[0]).name


def _chart(chart: Chart) -> dict[str, Any]:
    fields = {name: getattr(chart, name) for name in ("name", "title", "about", "by", "switches", "wide")}
    return {**fields, "views": [_view(chart, view) for view in chart.views]}


def _view(chart: Chart, view: View) -> dict[str, Any]:
    kind, content = _content(view.content)
    title = f"{chart.title}, {view.label}" if view.label else chart.title
    alt = f"{title}. {_in_words(view.content)} The numbers are in the table below."
    return {"label": view.label, "kind": kind, "alt": alt, "caption": " ".join(filter(None, view.notes)), **content}


def _content(content: Content) -> tuple[str, dict[str, Any]]:
    if isinstance(content, Figure):
        ranges = y_ranges(content)
        return "lines", {"columns": content.columns, "panels": [_panel(p, ranges[p.y_label].low, ranges[p.y_label].high)
                                                               for p in content.panels]}  # fmt: skip
    kind = {Bars: "bars", Spans: "spans", Heat: "heat"}[type(content)]
    return kind, _short(asdict(content)) | ({"cases": CASES} if kind == "heat" else {})


def _panel(panel: Panel, low: float, high: float) -> dict[str, Any]:
    lines = [_short({"label": line.kind[0], "x": list(line.x), "y": list(line.y), "colour": line.colour, "dashed": line.dashed}
                    | ({} if line.spread is None else {"spread": list(line.spread)})
                    | ({} if line.stripe is None else {"stripe": list(line.stripe)}))
             for line in panel.lines]  # fmt: skip
    has_values = any(line.last() is not None for line in panel.lines)
    return {"title": panel.title, "x_label": panel.x_label, "y_label": panel.y_label,
            "range": [low, high] if has_values else None, "counts": panel.counts, "points": panel.points,
            "lines": lines}  # fmt: skip


def _short(value: Any) -> Any:
    """Six significant digits, and null for what is no number."""
    if isinstance(value, float):
        return shorten_number(value, 6)
    if isinstance(value, dict):
        return {name: _short(inner) for name, inner in value.items()}
    return [_short(inner) for inner in value] if isinstance(value, list | tuple) else value


def _in_words(content: Content) -> str:
    if isinstance(content, Figure):
        ends = [(line.label, line.last()) for line in content.panels[0].lines[:12]]
        values = "; ".join(f"{label} {_figure(last)}" for label, last in ends)
        return f"{describe_figure(content).removeprefix(f'{content.title}. ')} At the end of the first: {values}."
    if isinstance(content, Bars):
        values = "; ".join(f"{series.label}: {', '.join(map(_figure, series.values))}" for series in content.series)
        return f"Bars of {content.y_label} for {', '.join(content.categories)}. {values}."[:2000]
    if isinstance(content, Spans):
        return f"{sum(content.count):,} rounds of {len(content.rows)} workers as bars over {content.x_label}."
    counts = {name: sum(row.count(letter) for row in content.case) for letter, name in CASES.items()}
    total = max(1, sum(counts.values()))
    shares = ", ".join(f"{name} {count / total:.0%}" for name, count in counts.items())
    return f"A map of {len(content.blocks)} blocks over arrivals {content.columns[0][0]} to {content.columns[-1][1]}: {shares}."


def _figure(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
