"""The curves of all runs together: scores, norms, what was moved."""

import math
from collections.abc import Callable, Sequence

from heloco.records.evaluations import EvaluationRecord
from heloco.report.charts.chart import Chart, View, run_colours
from heloco.report.charts.figures import Figure, Line, Panel, caption_of
from heloco.report.charts.sampling import budget, note, thinned
from heloco.report.run_reader import Run
from heloco.report.wording import MEASURES

STEPS = "outer step"
Position = Callable[[EvaluationRecord], float]
NOTHING_EVALUATED = (
    "Nothing is evaluated in such a run: the data is with the machines, and the synchronizer has none. How it gets on is the "
    "training loss that the machines report."
)
Y_LABELS = {"loss": "loss (nats per token)", "bits_per_byte": "bits per byte", "accuracy": "accuracy"}


def figure_view(label: str, figure: Figure, longest: int, limit: int) -> View:
    return View(label, figure, [caption_of(figure), *note(longest, limit)])


def line_of(label: str, x: Sequence[float], y: Sequence[float], look: tuple[str, bool], limit: int) -> Line:
    places = thinned(y, limit)
    return Line(label, [x[i] for i in places], [y[i] for i in places], colour=look[0], dashed=look[1])


def time_label(runs: Sequence[Run]) -> str:
    """The label of the time axis: it says whether the time is virtual or real."""
    clocks = {run.summary.clock for run in runs}
    return f"{clocks.pop()} time (s)" if len(clocks) == 1 else "virtual or real time (s)"


def axes_of(runs: Sequence[Run]) -> dict[str, Position]:
    return {STEPS: lambda record: record.outer_step, time_label(runs): lambda record: record.time_s}


def measures_of(runs: Sequence[Run]) -> list[str]:
    measured_names = {measure for run in runs for measure in run.measures}
    return [measure for measure in MEASURES if measure in measured_names] + sorted(measured_names - MEASURES.keys())


def y_label(measure: str, runs: Sequence[Run]) -> str:
    return "loss" if measure == "loss" and runs[0].task()[0] != "language" else Y_LABELS.get(measure, measure)


def scores(runs: Sequence[Run]) -> Chart:
    """The chart of the mean over sources, drawn over steps and over time."""
    if all(run.facts.is_external for run in runs):
        return Chart("scores", "Validation", NOTHING_EVALUATED, [], "view")
    views, x = [], axes_of(runs)
    for measure in measures_of(runs):
        panels = [Panel(f"over {name}", [], name, y_label(measure, runs)) for name in (*x, runs[0].facts.unit)]
        for panel, position in zip(panels, (*x.values(), lambda record: record.units), strict=True):
            panel.lines = _lines(runs, position, _score(measure))
        longest = max(len(run.evals) for run in runs)
        views.append(figure_view(MEASURES.get(measure, measure), Figure("scores", "", "", panels, 3), longest, budget(len(runs))))
    about = "Mean over the sources at each evaluation. Runs of unequal paces are best compared over time."
    return Chart("scores", "Validation", about, views, "view")


def sources(runs: Sequence[Run]) -> Chart | None:
    """The chart of each source: a panel per source, a line per run."""
    names = list(dict.fromkeys(source for run in runs for source in run.sources))
    views = []
    for measure in measures_of(runs):
        for x_label, x in axes_of(runs).items():
            panels = [Panel(name, _lines(runs, x, _score(measure, name)), x_label, y_label(measure, runs)) for name in names]
            figure = Figure("sources", "", "", panels, 3)
            label = f"{MEASURES.get(measure, measure)} over {x_label}"
            views.append(figure_view(label, figure, max(len(run.evals) for run in runs), budget(len(runs))))
    return Chart("sources", "Validation per source", "One panel per source, all on one scale.", views, "view") if views else None


def _score(measure: str, source: str | None = None) -> Callable[[EvaluationRecord], float | None]:
    """Returns a function that picks the measure of one source, or the mean over sources, from an evaluation."""

    def score(record: EvaluationRecord) -> float | None:
        return (record.mean if source is None else record.scores.get(source, {})).get(measure)

    return score


def _lines(
    runs: Sequence[Run], x: Callable[[EvaluationRecord], float], y: Callable[[EvaluationRecord], float | None]
) -> list[Line]:
    lines = []
    for run, look in zip(runs, run_colours(runs), strict=True):
        values = [math.nan if (value := y(record)) is None else value for record in run.evals]
        lines.append(line_of(run.name, [x(record) for record in run.evals], values, look, budget(len(runs))))
    return lines


def norms(runs: Sequence[Run]) -> Chart | None:
    """The chart of three norms over outer steps, each of all blocks together."""
    columns = {"pseudo-gradient": "pseudo_gradient_norm", "outer momentum": "momentum_norm", "outer movement": "movement"}
    limit, panels = budget(len(runs)), []
    for title, name in columns.items():
        lines = []
        for run, look in zip(runs, run_colours(runs), strict=True):
            places = [i for i, value in enumerate(getattr(run.tape, name)) if math.isfinite(value)]
            x, y = [run.tape.outer_step[i] for i in places], [getattr(run.tape, name)[i] for i in places]
            lines.append(line_of(run.name, x, y, look, limit))
        panels.append(Panel(title, lines, STEPS, f"norm of the {title}"))
    if not any(line.x for panel in panels for line in panel.lines):
        return None
    about = "Of all blocks together: what arrives, what the synchronizer remembers, and how far each arrival moves the model."
    view = figure_view("", Figure("norms", "", "", panels, 3), max(len(run.tape) for run in runs), limit)
    return Chart("norms", "Norms", about, [view])


def traffic(runs: Sequence[Run]) -> Chart | None:
    """Tokens trained on and bytes moved, over time."""
    limit, unit, time = budget(len(runs)), runs[0].facts.unit, time_label(runs)
    panels = [Panel(unit, [], time, unit), Panel("megabytes moved", [], time, "MB")]
    for run, look in zip(runs, run_colours(runs), strict=True):
        units, megabytes, total = [0.0], [0.0], 0
        for count, verdict in zip(run.tape.units, run.tape.verdict, strict=True):
            total += count if verdict != "refused" else 0
            units.append(total)
            megabytes.append(megabytes[-1] + run.round_bytes / 1e6)
        for panel, y in zip(panels, (units, megabytes), strict=True):
            panel.lines.append(line_of(run.name, [0.0, *run.tape.time_s], y, look, limit))
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
