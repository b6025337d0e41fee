"""The figures of a study as its TOML asks for them: curves over inner steps or virtual time."""

from collections.abc import Mapping
from itertools import product

from heloco.errors import UserError
from heloco.report.charts.figures import Figure, Line, Panel, staleness_colour, striped
from heloco.study.results import PlacedRun, Results, stat
from heloco.study.spec import Axis, FigureSpec

X_LABELS = {"inner_steps": "inner steps", "time_s": "virtual time in s"}
Y_LABEL = "validation loss"


def figures_of(results: Results) -> list[Figure]:
    """Every figure that has something to show."""
    return [figure for spec in results.study.figures if (figure := _figure(results, spec)).panels]


def _figure(results: Results, spec: FigureSpec) -> Figure:
    along = {axis: _along(results, spec, axis) for axis in ("rows", "methods", "sources")}
    free = [axis for axis in ("rows", "methods") if axis not in (*spec.panels, spec.lines) and len(along[axis]) > 1]
    if free:
        raise UserError(f"{results.study.name}: figure {spec.name} must name one of its {free[0]}, or give them panels or lines.")
    panels = []
    for combination in product(*(along[axis] for axis in spec.panels)):
        fixed: dict[str, str] = dict(zip(spec.panels, combination, strict=True))
        lines = [line for name in along[spec.lines] if (line := _line(results, spec, along, {**fixed, spec.lines: name}))]
        if lines:
            panels.append(Panel(", ".join(combination), striped(lines), X_LABELS[spec.x], Y_LABEL + results.loss_unit))
    band = "" if len(results.seeds) == 1 else " Bands: ± one standard deviation over seeds."
    return Figure(spec.name, spec.title, f"{spec.caption}{band}".strip(), panels, spec.columns)


def _along(results: Results, spec: FigureSpec, axis: Axis) -> list[str]:
    """The names along an axis, of those that the figure asks for; for sources that are neither panels nor lines the mean, ''."""
    if axis == "sources":
        if "sources" not in (*spec.panels, spec.lines):
            return [""]
        count = len(results.sources)
        numbered = [results.sources[s] for s in spec.sources if isinstance(s, int) and -count <= s < count]
        return [s for s in results.sources if not spec.sources or s in numbered or s in spec.sources]
    names, selected_names = (results.rows, spec.rows) if axis == "rows" else (results.methods, spec.methods)
    return [name for name in names if not selected_names or name in selected_names]


def _line(results: Results, spec: FigureSpec, along: Mapping[str, list[str]], at: Mapping[str, str]) -> Line | None:
    row, method, source = (at.get(axis) or next(iter(along[axis]), "") for axis in ("rows", "methods", "sources"))
    runs = results.at(row, method)
    if not runs:
        return None
    # a run that diverged is cut short, so only as many evaluations as all seeds have
    length = min(len(run.record.evals.arrival) for run in runs)
    points = [stat(values) for values in zip(*(run.values(source)[:length] for run in runs), strict=True)]
    first = runs[0]
    return Line(
        {"rows": row, "methods": method, "sources": source}[spec.lines],
        _x(first, spec)[:length],
        [point.mean if point else None for point in points],
        [point.spread if point else None for point in points] if len(runs) > 1 else None,
        colour=staleness_colour(first.place.paces) if spec.lines == "rows" else None,
        dashed=spec.lines == "methods" and first.waits,
    )


def _x(run: PlacedRun, spec: FigureSpec) -> list[float]:
    return [float(x) for x in run.record.evals.inner_steps] if spec.x == "inner_steps" else run.times_s
