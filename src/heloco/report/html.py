"""Charts and tables as one interactive page that needs nothing else. The page takes its data as JSON, and can be given more."""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from heloco.errors import UserError
from heloco.report import blocks, curves, machines, overview, workers
from heloco.report.chart import Bars, Chart, Content, Heat, Spans, View, run_colours
from heloco.report.figures import Figure, Panel, y_ranges
from heloco.report.page import TableData, described
from heloco.report.reading import Run
from heloco.report.summary import CASES

TEMPLATES = Path(__file__).parent / "templates"
PARTS = ("plotly", "jinja2")


# ---- the data


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """In the order of the page: first all runs together, then one at a time. Where nothing is evaluated, what the machines say
    of their losses stands first."""
    found, begun = [curves.scores(runs), curves.sources(runs)], any(len(run.tape) for run in runs)
    training = workers.training(runs) if begun else None
    told_first = all(run.external for run in runs)
    found += [training if told_first else None, curves.norms(runs), curves.traffic(runs)]
    if begun:
        found += [machines.participation(runs), workers.timeline(runs), workers.staleness(runs), workers.histogram(runs)]
        found += [workers.shares(runs), machines.shares(runs), None if told_first else training, blocks.correction(runs)]
    return [chart for chart in found if chart is not None]


def page_data(runs: Sequence[Run]) -> dict[str, Any]:
    """All that the page shows, as JSON can say it."""
    looks = run_colours(runs)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return {
        "title": f"HeLoCo: {title}",
        "notes": overview.notes(runs),
        "runs": [{"name": run.name, "method": run.method, "colour": colour, "dashed": dashed}
                 for run, (colour, dashed) in zip(runs, looks, strict=True)],
        "tables": [_table(t) for t in (overview.runs_table(runs), *machines.tables(runs), overview.settings_table(runs))],
        "charts": [_chart(chart) for chart in charts_of(runs)],
    }  # fmt: skip


def _table(table: TableData) -> dict[str, Any]:
    return asdict(table)


def _chart(chart: Chart) -> dict[str, Any]:
    views = [_view(chart, view) for view in chart.views]
    said = {"name": chart.name, "title": chart.title, "about": chart.about, "by": chart.by, "switches": list(chart.switches)}
    return {**said, "wide": chart.wide, "views": views}


def _view(chart: Chart, view: View) -> dict[str, Any]:
    kind, content = _content(view.content)
    named = f"{chart.title}, {view.label}" if view.label else chart.title
    alt = f"{named}. {_in_words(view.content)} The numbers are in the table below."
    return {"label": view.label, "kind": kind, "alt": alt, "caption": " ".join(filter(None, view.notes)), **content}


def _content(content: Content) -> tuple[str, dict[str, Any]]:
    if isinstance(content, Figure):
        ranges = y_ranges(content)
        return "lines", {"columns": content.columns, "panels": [_panel(p, ranges[p.y_label].low, ranges[p.y_label].high)
                                                               for p in content.panels]}  # fmt: skip
    kind = {Bars: "bars", Spans: "spans", Heat: "heat"}[type(content)]
    return kind, _short(asdict(content)) | ({"cases": CASES} if kind == "heat" else {})


def _panel(panel: Panel, low: float, high: float) -> dict[str, Any]:
    lines = [_short({"label": line.kind[0], "x": list(line.x), "y": list(line.y), "colour": line.colour, "dashed": line.dashed})
             for line in panel.lines]  # fmt: skip
    there = any(line.last() is not None for line in panel.lines)
    return {"title": panel.title, "x_label": panel.x_label, "y_label": panel.y_label,
            "range": [low, high] if there else None, "lines": lines}  # fmt: skip


def _short(value: Any) -> Any:
    """Six significant digits, and null for what is no number."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _short(inner) for name, inner in value.items()}
    return [_short(inner) for inner in value] if isinstance(value, list | tuple) else value


def _in_words(content: Content) -> str:
    if isinstance(content, Figure):
        ends = [(line.label, line.last()) for line in content.panels[0].lines[:12]]
        said = "; ".join(f"{label} {_figure(last)}" for label, last in ends)
        return f"{described(content).removeprefix(f'{content.title}. ')} At the end of the first: {said}."
    if isinstance(content, Bars):
        said = "; ".join(f"{series.label}: {', '.join(map(_figure, series.values))}" for series in content.series)
        return f"Bars of {content.y_label} for {', '.join(content.categories)}. {said}."[:2000]
    if isinstance(content, Spans):
        return f"{sum(content.count):,} rounds of {len(content.rows)} workers as bars over {content.x_label}."
    counts = {name: sum(row.count(letter) for row in content.case) for letter, name in CASES.items()}
    total = max(1, sum(counts.values()))
    said = ", ".join(f"{name} {count / total:.0%}" for name, count in counts.items())
    return f"A map of {len(content.blocks)} blocks over arrivals {content.columns[0][0]} to {content.columns[-1][1]}: {said}."


def _figure(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


# ---- the page


def check_parts() -> None:
    """Says what is missing before anything is read."""
    missing = [name for name in PARTS if find_spec(name) is None]
    if missing:
        raise UserError(f'A report needs {" and ".join(missing)}: pip install "heloco[report]"')


def chart_library() -> str:
    """Plotly's own bundle, from its package: nothing is fetched, by us or by the page."""
    spec = find_spec("plotly")
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0]) / "package_data" / "plotly.min.js"
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f'{path} cannot be read ({error.strerror}): pip install --force-reinstall "heloco[report]"') from error


def as_json(data: Any) -> str:
    """JSON that may stand inside a script element: no text of it can end the element."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def render(data: dict[str, Any], *, live: bool = False) -> str:
    """The page. Its policy lets only its own scripts run, by their digests, and nothing be fetched; a live page may ask where it
    came from for newer data."""
    check_parts()
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined)
    own = ("report.js", "live.js") if live else ("report.js",)
    scripts = [chart_library(), *((TEMPLATES / name).read_text(encoding="utf-8") for name in own)]
    assert not any("</script" in script.lower() or "\r" in script for script in scripts)
    style = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    template = environment.get_template("report.html")
    return template.render(title=data["title"], style=style, scripts=scripts, digests=digests, data=as_json(data), live=live)
