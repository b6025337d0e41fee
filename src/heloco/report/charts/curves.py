"""The curves of all runs together: scores, norms, what was moved."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean

from heloco.records.evaluations import EvaluationRecord
from heloco.report.charts.chart import Chart, View, run_colours, worker_colours
from heloco.report.charts.figures import Figure, Line, Panel, caption_of, striped
from heloco.report.charts.sampling import budget, note, thinned
from heloco.report.run_groups import RunGroup, group_runs, has_seeds, seed_mean
from heloco.report.run_reader import Run
from heloco.report.wording import MEASURES

STEPS = "outer step"
Position = Callable[[EvaluationRecord], float]
Point = tuple[int, float, float]
"""What is the same in all seeds, such as the arrival; x; y."""
NOTHING_EVALUATED = (
    "Nothing is evaluated in this run: the data is with the machines, and none of them evaluates the run's model. How it gets on "
    "is the training loss that the machines report."
)
Y_LABELS = {"loss": "loss (nats per token)", "bits_per_byte": "bits per byte", "accuracy": "accuracy"}


def figure_view(label: str, figure: Figure, longest: int, limit: int) -> View:
    return View(label, figure, [caption_of(figure), *note(longest, limit)])


def line_of(
    label: str,
    x: Sequence[float],
    y: Sequence[float],
    look: tuple[str, bool],
    limit: int,
    spread: Sequence[float | None] | None = None,
) -> Line:
    places = thinned(y, limit)
    band = None if spread is None else [spread[i] for i in places]
    return Line(label, [x[i] for i in places], [y[i] for i in places], band, colour=look[0], dashed=look[1])


def group_line(group: RunGroup, points: Sequence[Sequence[Point]], look: tuple[str, bool], limit: int) -> Line:
    """The line of a run, or of the mean over seeds with a band of a standard deviation. `points`: those of each run."""
    if len(group.runs) == 1:
        [run_points] = points
        return line_of(group.name, [x for _, x, _ in run_points], [y for _, _, y in run_points], look, limit)
    places: dict[int, list[tuple[float, float]]] = {}
    for run_points in points:
        for place, x, y in run_points:
            places.setdefault(place, []).append((x, y))
    rows = [places[place] for place in sorted(places)]
    means = [seed_mean([y for _, y in row]) for row in rows]
    y_means = [math.nan if each.mean is None else each.mean for each in means]
    return line_of(group.name, [fmean(x for x, _ in row) for row in rows], y_means, look, limit, [each.spread for each in means])


def seeds_in_words(groups: Sequence[RunGroup]) -> str:
    """The sentence under a chart or table that takes seeds together; empty if none does."""
    if not has_seeds(groups):
        return ""
    counts = ", ".join(f"{group.name} {len(group.runs)}" for group in groups if len(group.runs) > 1)
    return f"Runs that differ in the seed alone are one line, with a band of one standard deviation (seeds: {counts})."


def time_label(runs: Sequence[Run]) -> str:
    """The label of the time axis: it says whether the time is virtual or real."""
    clocks = {run.summary.clock for run in runs}
    return f"{clocks.pop()} time (s)" if len(clocks) == 1 else "virtual or real time (s)"


def axes_of(runs: Sequence[Run]) -> dict[str, Position]:
    """What scores are drawn over, by the axis' label. Outer steps are the last: a step of a method with a barrier has the tokens
    of all workers, so a chart over them flatters it."""
    return {
        runs[0].facts.unit: lambda record: record.units,
        time_label(runs): lambda record: record.time_s,
        STEPS: lambda record: record.outer_step,
    }


def measures_of(runs: Sequence[Run]) -> list[str]:
    measured_names = {measure for run in runs for measure in run.measures}
    return [measure for measure in MEASURES if measure in measured_names] + sorted(measured_names - MEASURES.keys())


def y_label(measure: str, runs: Sequence[Run]) -> str:
    return "loss" if measure == "loss" and runs[0].task()[0] != "language" else Y_LABELS.get(measure, measure)


def scores(runs: Sequence[Run]) -> Chart:
    """The chart of the mean over sources, drawn over tokens and over time, and over outer steps in views of their own."""
    if all(run.facts.is_external and not run.evals for run in runs):
        return Chart("scores", "Validation", NOTHING_EVALUATED, [], "view")
    views, steps_views, x, longest = list[View](), list[View](), axes_of(runs), max(len(run.evals) for run in runs)
    for measure in measures_of(runs):
        name, y = MEASURES.get(measure, measure), y_label(measure, runs)
        panels = [Panel(f"over {over}", _lines(runs, at, score_of(measure)), over, y) for over, at in x.items()]
        views.append(figure_view(name, Figure("scores", "", "", panels[:-1]), longest, budget(len(runs))))
        label = f"{name} over {STEPS}s"
        steps_views.append(figure_view(label, Figure("scores", "", "", panels[-1:], 1), longest, budget(len(runs))))
    views += steps_views
    about = "Mean over the sources at each evaluation. Runs of unequal paces are best compared over time."
    about = f"{about} {seeds_in_words(group_runs(runs))}".strip()
    return Chart("scores", "Validation", about, views, "view")


def sources(runs: Sequence[Run]) -> Chart | None:
    """The chart of each source: a panel per source, a line per run. It opens over tokens."""
    names = list(dict.fromkeys(source for run in runs for source in run.sources))
    views = []
    for measure in measures_of(runs):
        for x_label, x in axes_of(runs).items():
            panels = [Panel(name, _lines(runs, x, score_of(measure, name)), x_label, y_label(measure, runs)) for name in names]
            figure = Figure("sources", "", "", panels, 3)
            label = f"{MEASURES.get(measure, measure)} over {x_label}"
            views.append(figure_view(label, figure, max(len(run.evals) for run in runs), budget(len(runs))))
    return Chart("sources", "Validation per source", "One panel per source, all on one scale.", views, "view") if views else None


def own_scores(runs: Sequence[Run]) -> Chart | None:
    """The chart of what machines found for their own models, within their rounds: a line per machine."""
    lines_of: dict[str, list[Line]] = {}
    longest, limit, time = 0, budget(len(runs)), time_label(runs)
    for run in runs:
        machines = sorted({record.machine for record in run.own_evals})
        for machine, colour in zip(machines, worker_colours(len(machines)), strict=True):
            records = [record for record in run.own_evals if record.machine == machine]
            longest = max(longest, len(records))
            name = run.summary.label(machine)
            label = name if len(runs) == 1 else f"{run.name}: {name}"
            for measure in records[0].mean:
                values = [math.nan if (value := score_of(measure)(record)) is None else value for record in records]
                look = (colour, False)
                line = line_of(label, [record.time_s for record in records], values, look, limit)
                lines_of.setdefault(measure, []).append(line)
    if not lines_of:
        return None
    views = []
    for measure, lines in lines_of.items():
        figure = Figure("own", "", "", [Panel("", lines, time, y_label(measure, runs))], 1)
        views.append(figure_view(MEASURES.get(measure, measure), figure, longest, limit))
    about = "What machines found for their own models in the middle of a round. These are no scores of the run's model."
    return Chart("own", "Validation of the machines' own models", about, views, "view")


def score_of(measure: str, source: str | None = None) -> Callable[[EvaluationRecord], float | None]:
    """Returns a function that picks the measure of one source, or the mean over sources, from an evaluation."""

    def score(record: EvaluationRecord) -> float | None:
        return (record.mean if source is None else record.scores.get(source, {})).get(measure)

    return score


def _lines(
    runs: Sequence[Run], x: Callable[[EvaluationRecord], float], y: Callable[[EvaluationRecord], float | None]
) -> list[Line]:
    def point(record: EvaluationRecord) -> Point:
        return record.arrival, x(record), math.nan if (value := y(record)) is None else value

    groups = group_runs(runs)
    return striped(
        [
            group_line(group, [[point(record) for record in run.evals] for run in group.runs], look, budget(len(runs)))
            for group, look in zip(groups, run_colours(groups), strict=True)
        ]
    )


def norms(runs: Sequence[Run]) -> Chart | None:
    """The chart of three norms over time, or over outer steps, each of all blocks together."""
    names = {"pseudo-gradient": "pseudo_gradient_norm", "outer momentum": "momentum_norm", "outer movement": "movement"}
    limit, views, groups = budget(len(runs)), list[View](), group_runs(runs)
    for x_label, column in {time_label(runs): "time_s", STEPS: "outer_step"}.items():
        panels = []
        for title, name in names.items():
            lines = [
                group_line(group, [_norm_points(run, column, name) for run in group.runs], look, limit)
                for group, look in zip(groups, run_colours(groups), strict=True)
            ]
            panels.append(Panel(title, striped(lines), x_label, f"norm of the {title}"))
        figure = Figure("norms", "", "", panels, 3)
        views.append(figure_view(f"over {x_label}", figure, max(len(run.tape) for run in runs), limit))
        if not any(line.x for panel in panels for line in panel.lines):
            return None
    about = "Of all blocks together: what arrives, what the synchronizer remembers, and how far each arrival moves the model."
    return Chart("norms", "Norms", about, views, "view")


def _norm_points(run: Run, x: str, name: str) -> list[Point]:
    positions, values, tape = getattr(run.tape, x), getattr(run.tape, name), run.tape
    return [(tape.arrival[i], positions[i], value) for i, value in enumerate(values) if math.isfinite(value)]


def traffic(runs: Sequence[Run]) -> Chart | None:
    """Tokens trained on and bytes moved, over time."""
    limit, unit, time = budget(len(runs)), runs[0].facts.unit, time_label(runs)
    panels = [Panel(unit, [], time, unit), Panel("megabytes moved", [], time, "MB")]
    groups = group_runs(runs)
    for group, look in zip(groups, run_colours(groups), strict=True):
        points = [_traffic_points(run) for run in group.runs]
        for i, panel in enumerate(panels):
            panel.lines.append(group_line(group, [run_points[i] for run_points in points], look, limit))
    for panel in panels:
        panel.lines = striped(panel.lines)
    if not any(len(run.tape) for run in runs):
        return None
    run = runs[0]
    numbers = "" if run.facts.is_external else " of float32 numbers"
    about = (
        f"Bytes are counted from the model's size: every round takes a model{numbers} and hands back a pseudo-gradient "
        f"of the same size, together {run.round_bytes / 1e6:,.2f} MB a round in {run.name}."
    )
    view = figure_view("", Figure("traffic", "", "", panels, 2), max(len(run.tape) + 1 for run in runs), limit)
    return Chart("traffic", f"{unit.capitalize()} and bytes", about, [view], switches=())


def _traffic_points(run: Run) -> tuple[list[Point], list[Point]]:
    """What was trained on and what was moved until each arrival: units, and megabytes."""
    units, megabytes, total = [(0, 0.0, 0.0)], [(0, 0.0, 0.0)], 0
    rows = zip(run.tape.time_s, run.tape.units, run.tape.verdict, strict=True)
    for i, (time_s, count, verdict) in enumerate(rows, start=1):
        total += count if verdict != "refused" else 0
        units.append((i, time_s, float(total)))
        megabytes.append((i, time_s, megabytes[-1][2] + run.round_bytes / 1e6))
    return units, megabytes
