"""Real machines: who contributed lately, and what each brought."""

from collections import Counter, deque
from collections.abc import Iterator, Sequence

from heloco.report.charts.chart import PIECES, WORKER_LIMIT, Bars, Chart, Series, View, worker_colours
from heloco.report.charts.curves import figure_view, line_of, time_label
from heloco.report.charts.figures import Figure, Line, Panel, striped
from heloco.report.charts.sampling import budget
from heloco.report.run_reader import Run
from heloco.report.summary import MachineSummary

PARTICIPANTS_STYLE, MINIMUM_STYLE = ("took part", "#4d4d4d"), ("at least (min_workers)", "#d55e00")
PAUSE_STYLE = ("paused", "#cc79a7")
"""(label, colour) of a line."""
MACHINE_LIMIT = WORKER_LIMIT
"""The most machines that have a line or bars of their own."""
PAUSES = 100
"""The most pauses that are drawn, the last ones."""


def participation(runs: Sequence[Run]) -> Chart | None:
    """How many machines contributed lately, against how many must, and each one's part of it."""
    views = [_participation(run, len(runs)) for run in runs if run.facts.is_real and len(run.tape)]
    about = (
        "A machine takes part if it contributed to the last arrivals; being here is not enough. With fewer than min_workers the "
        "run pauses. On the right: how much of those arrivals came from whom."
    )
    return Chart("participation", "Participation", about, views, "run", switches=()) if views else None


def _participation(run: Run, runs: int) -> View:
    tape, limit = run.tape, budget(runs)
    places = [i for i, verdict in enumerate(tape.verdict) if verdict != "refused"]
    counts = [float(len(window)) for window in _windows(run, places)]
    over = {time_label([run]): [tape.time_s[i] for i in places], "arrival": [float(tape.arrival[i]) for i in places]}
    panels = []
    for label, x in over.items():
        lines = [line_of(PARTICIPANTS_STYLE[0], x, counts, (PARTICIPANTS_STYLE[1], False), limit)]
        if x:
            lines.append(Line(MINIMUM_STYLE[0], [x[0], x[-1]], [run.min_workers] * 2, colour=MINIMUM_STYLE[1], dashed=True))
        panels.append(Panel(f"over {label}", striped(lines), label, "machines that took part", shows_all=True, counts=True))
    if pauses := _pause_line(run):
        panels[0].lines.append(pauses)
    panels.append(Panel("each machine's part", _part_lines(run, places, limit), time_label([run]), "share", shows_all=True))
    view = figure_view(run.name, Figure("participation", "", "", panels, 3), len(places), limit)
    view.notes.append(f"Counted over the last {run.window} arrivals.")
    if len(run.summary.machines) > MACHINE_LIMIT:
        view.notes.append(f"The {MACHINE_LIMIT} machines with the most contributions of {len(run.summary.machines)} have a line.")
    return view


def _windows(run: Run, places: Sequence[int]) -> Iterator[Counter[str]]:
    """After each arrival: how many of the last ones came from which machine."""
    recent, counts = deque[str](maxlen=run.window), Counter[str]()
    for i in places:
        if len(recent) == recent.maxlen:
            counts[recent[0]] -= 1
            counts += Counter()  # without those that are at 0
        recent.append(run.tape.machine[i])
        counts[run.tape.machine[i]] += 1
        yield counts


def _pause_line(run: Run) -> Line | None:
    """The pauses as one line along the time axis, with gaps between them."""
    x, y = list[float](), list[float | None]()
    for pause in run.journal.pauses[-PAUSES:]:
        end_s = run.journal.time_s if pause.end_s is None else pause.end_s
        x += [pause.start_s, end_s, end_s]
        y += [0.0, 0.0, None]
    return Line(PAUSE_STYLE[0], x, y, colour=PAUSE_STYLE[1]) if x else None


def _part_lines(run: Run, places: Sequence[int], limit: int) -> list[Line]:
    """A line for each machine: its part of the last arrivals, over time."""
    parts = {machine.id: list[float]() for machine in _drawn_machines(run)}
    for window in _windows(run, places):
        for machine, part in parts.items():
            part.append(window[machine] / window.total())
    x = [run.tape.time_s[i] for i in places]
    looks = zip(parts.items(), worker_colours(len(parts)), strict=True)
    return striped([line_of(run.summary.label(machine), x, part, (colour, False), limit) for (machine, part), colour in looks])


def shares(runs: Sequence[Run]) -> Chart | None:
    """The chart of each machine's part of the contributions: over the whole run, and of the last ones."""
    about = "Each machine's part of all contributions, and of the last ones: who has stopped shows, whether it is here or not."
    views = [_shares(run) for run in runs if run.facts.is_real and run.summary.arrivals]
    return Chart("machines", "Machines' shares", about, views, "run") if views else None


def _shares(run: Run) -> View:
    machines, summary = _drawn_machines(run), run.summary
    series = [
        Series("of all contributions", [summary.share(machine) for machine in machines], PIECES[0]),
        Series(f"of the last {run.window} arrivals", [summary.recent_share(machine) for machine in machines], PIECES[1]),
    ]
    more = len(summary.machines) - len(machines)
    notes = [f"The {MACHINE_LIMIT} with the most contributions; {more} others are in the table."] if more else []
    labels = [summary.label(machine.id) for machine in machines]
    return View(run.name, Bars("machine", "share", labels, series), notes)


def _drawn_machines(run: Run) -> list[MachineSummary]:
    """The machines with the most contributions, sorted by id, so that each keeps its colour."""
    contributors = sorted(run.summary.machines.values(), key=lambda machine: -machine.arrivals)[:MACHINE_LIMIT]
    return sorted(contributors, key=lambda machine: machine.id)
