"""One run at a time, worker by worker: who computed what when, how stale it arrived, what it counted for."""

import math
from collections import Counter
from collections.abc import Sequence

from heloco.report.charts.chart import PIECES, Bars, Chart, Group, Series, Spans, View, seat_groups, worker_groups
from heloco.report.charts.curves import figure_view, line_of, time_label
from heloco.report.charts.figures import Figure, Line, Panel, striped
from heloco.report.charts.sampling import budget
from heloco.report.run_reader import Run

ROWS, SPANS = 40, 1500
"""The most workers and the most bars that a timeline shows."""
BARS = 40
"""The most bars of a histogram."""


def timeline(runs: Sequence[Run]) -> Chart:
    about = (
        "Each bar is a round from its start to its arrival, which a tick marks. Long rounds come back to a model that moved on."
    )
    return Chart("timeline", "Rounds", about, [_timeline(run) for run in runs], "run")


def groups_of(run: Run) -> list[Group]:
    """Groups the workers by pace. In a real run it groups them by number, because any free machine may do a worker's round."""
    return seat_groups(len(run.summary.workers)) if run.facts.is_real else worker_groups(run.facts.paces)


def _row(run: Run, worker: int) -> str:
    pace_s = run.summary.pace_s(run.summary.workers[worker])
    return f"worker {worker}" if pace_s is None else f"worker {worker} ({pace_s:{'.3g' if run.facts.is_real else 'g'}} s)"


def _timeline(run: Run) -> View:
    tape, paces = run.tape, run.facts.paces
    workers = _spread(len(paces), ROWS)
    places_of_worker: dict[int, list[int]] = {worker: [] for worker in workers}
    for i, worker in enumerate(tape.worker):
        if worker in places_of_worker:
            places_of_worker[worker].append(i)
    total = sum(map(len, places_of_worker.values()))
    rounds_per_bar = max(1, math.ceil(total / SPANS))
    colours = {worker: group.colour for group in groups_of(run) for worker in group.workers}
    spans = Spans(time_label([run]), [_row(run, w) for w in workers], [], [], [], [], [], [colours[w] for w in workers])
    for row, worker in enumerate(workers):
        places = places_of_worker[worker]
        for begin in range(0, len(places), rounds_per_bar):
            part = places[begin : begin + rounds_per_bar]
            spans.row.append(row)
            spans.start.append(tape.start_s[part[0]])
            spans.end.append(tape.time_s[part[-1]])
            spans.count.append(len(part))
            spans.hover.append(_hover_text(run, part))
    notes = (
        [f"{len(workers)} of {len(paces)} workers are shown, from the first to the last."] if len(workers) < len(paces) else []
    )
    if rounds_per_bar > 1:
        notes.append(f"Thinned: {total:,} rounds, up to {rounds_per_bar} of a worker in one bar.")
    if run.facts.is_real:
        notes.append("In brackets: seconds per inner step as measured, from handing out to arrival, transfers included.")
    return View(run.name, spans, notes)


def _hover_text(run: Run, part: Sequence[int]) -> str:
    tape, first, last = run.tape, part[0], part[-1]
    stale = [tape.staleness[i] for i in part]
    odd = Counter(tape.verdict[i] for i in part if tape.verdict[i] != "applied")
    words = [f"round {tape.round[first]}" if len(part) == 1 else f"rounds {tape.round[first]} to {tape.round[last]}"]
    words.append(f"{tape.start_s[first]:g} s to {tape.time_s[last]:g} s")
    words += [f"by {', '.join(sorted({run.summary.label(tape.machine[i]) for i in part}))}"] if run.facts.is_real else []
    words.append(f"staleness {min(stale)}" if min(stale) == max(stale) else f"staleness {min(stale)} to {max(stale)}")
    if math.isfinite(tape.loss[last]):
        words.append(f"training loss {tape.loss[last]:.3f}")
    return ", ".join(words + [f"{count} {verdict}" if len(part) > 1 else verdict for verdict, count in odd.items()])


def _spread(count: int, limit: int) -> list[int]:
    return sorted({round(i * (count - 1) / (limit - 1)) for i in range(limit)}) if count > limit else list(range(count))


def staleness(runs: Sequence[Run]) -> Chart:
    about = "How many outer steps others made between a round's start and its arrival: a point per arrival."
    views = [_over_time(run, "staleness", len(runs)) for run in runs]
    for run, view in zip(runs, views, strict=True):
        if len(groups_of(run)) > 1:
            view.notes.append("Workers' points are drawn a little apart, so that equal ones can be seen.")
    return Chart("staleness", "Staleness over time", about, views, "run", switches=())


def training(runs: Sequence[Run]) -> Chart:
    about = "The mean loss of each round's inner steps, on the worker's own data: smooth it to see where each worker is going."
    views = [_over_time(run, "loss", len(runs)) for run in runs]
    for run, view in zip(runs, views, strict=True):
        if len(run.tape) and not any(map(math.isfinite, run.tape.loss)):
            view.notes.append("The machines report no loss: `run.report(loss)` before the step does.")
    return Chart("training", "Training loss", about, views, "run", wide=any(run.facts.is_real for run in runs))


def _over_time(run: Run, name: str, runs: int) -> View:
    lines, longest, limit = list[Line](), 0, budget(runs)
    for group, places in _places(run):
        longest = max(longest, len(places))
        values = [float(getattr(run.tape, name)[i]) for i in places]
        lines.append(line_of(group.label, [run.tape.time_s[i] for i in places], values, (group.colour, False), limit))
    counts = name == "staleness"
    panel = Panel("", lines if counts else striped(lines), time_label([run]), name, counts, counts, counts)
    return figure_view(run.name, Figure(name, "", "", [panel], 1), longest, limit)


def _places(run: Run) -> list[tuple[Group, list[int]]]:
    """Each group of workers with the places of its arrivals on the tape. Refused ones are left out."""
    groups = groups_of(run)
    group_of = {worker: i for i, group in enumerate(groups) for worker in group.workers}
    places: list[list[int]] = [[] for _ in groups]
    for i, (worker, verdict) in enumerate(zip(run.tape.worker, run.tape.verdict, strict=True)):
        if verdict != "refused":
            places[group_of[worker]].append(i)
    return list(zip(groups, places, strict=True))


def histogram(runs: Sequence[Run]) -> Chart:
    return Chart("histogram", "Staleness, counted", "Arrivals by their staleness.", [_histogram(run) for run in runs], "run")


def _histogram(run: Run) -> View:
    stale = [run.tape.staleness[i] for _, places in _places(run) for i in places]
    width = max(1, math.ceil((max(stale, default=0) + 1) / BARS))
    edges = list(range(0, max(stale, default=0) + 1, width))
    names = [str(edge) if width == 1 else f"{edge}–{edge + width - 1}" for edge in edges]
    series = []
    for group, places in _places(run):
        counts = Counter(run.tape.staleness[i] // width for i in places)
        series.append(Series(group.label, [counts[i] for i in range(len(edges))], group.colour))
    return View(run.name, Bars("staleness", "arrivals", names, series, stacked=True, counts=True))


def shares(runs: Sequence[Run]) -> Chart:
    about = "Each worker's part of all arrivals, and of the way the model was moved (the sum of its outer movements' norms)."
    return Chart("shares", "Shares", about, [_shares(run) for run in runs], "run")


def _shares(run: Run) -> View:
    summary, groups = run.summary, groups_of(run)
    series = [
        Series(label, [sum(share(summary.workers[i]) for i in group.workers) for group in groups], colour)
        for (label, share), colour in zip(
            {"of arrivals": summary.share, "of outer movement": summary.movement_share}.items(), PIECES, strict=True
        )
    ]
    return View(run.name, Bars("", "share", [group.label for group in groups], series))
