"""What the correction did: blocks × arrivals."""

import math
from collections import Counter
from collections.abc import Sequence

from heloco.report.charts.chart import Chart, Heat, View
from heloco.report.run_reader import Run

CELLS = 40_000
"""The most cells that the map of one run has; a page of many runs has fewer of each."""

NAMED_WORKERS = 6
"""The most workers of a column that are named one by one."""


def correction(runs: Sequence[Run]) -> Chart | None:
    """The chart of the runs that have blocks on their tape; None if there is no such run."""
    cells = max(4000, min(CELLS, 4 * CELLS // len(runs)))
    views = [view for run in runs if (view := heat_of(run, cells))]
    about = (
        "The cosine of each arriving block with the outer momentum, and what became of it: kept, damped, turned towards the "
        "momentum, or skipped (left as it was, one of the two being all but zero). Rules without one damp and turn nothing."
    )
    return Chart("correction", "What the correction did", about, views, "run") if views else None


def heat_of(run: Run, cells: int) -> View | None:
    """The map of a run, thinned to at most `cells` cells or one column; None if the run has no blocks."""
    tape, blocks = run.tape, run.facts.blocks
    places = [i for i, verdict in enumerate(tape.verdict) if verdict != "refused" and len(tape.case[i]) == len(blocks)]
    if not places:
        return None
    column_size = math.ceil(len(places) / max(1, cells // len(blocks)))
    parts = [places[begin : begin + column_size] for begin in range(0, len(places), column_size)]
    heat = Heat(
        blocks=[block.name for block in blocks],
        sizes=[math.prod(block.shape) for block in blocks],
        columns=[(tape.arrival[part[0]], tape.arrival[part[-1]]) for part in parts],
        about=[_about(run, part) for part in parts],
        cosine=[[_mean(run, part, block) for part in parts] for block in range(len(blocks))],
        case=["".join(_most_frequent_case(run, part, block) for part in parts) for block in range(len(blocks))],
    )
    note = f"Thinned: a column stands for {column_size} arrivals, with the mean of their cosines and their most frequent case."
    return View(run.name, heat, [note] if column_size > 1 else [])


def corrects(run: Run) -> bool:
    """Whether the run's outer rule has damped or turned a block."""
    return run.summary.cases["damped"] + run.summary.cases["turned"] > 0


def _about(run: Run, part: Sequence[int]) -> str:
    """Which arrivals a column stands for, of which workers, and how stale they were."""
    tape, first, last = run.tape, part[0], part[-1]
    if len(part) == 1:
        return f"arrival {tape.arrival[first]}, worker {tape.worker[first]}, staleness {tape.staleness[first]}"
    workers, stale = sorted({tape.worker[i] for i in part}), [tape.staleness[i] for i in part]
    names = ", ".join(map(str, workers)) if len(workers) <= NAMED_WORKERS else f"{workers[0]} to {workers[-1]}"
    ages = f"{min(stale)}" if min(stale) == max(stale) else f"{min(stale)} to {max(stale)}"
    return f"arrivals {tape.arrival[first]} to {tape.arrival[last]}, worker{'s' * (len(workers) > 1)} {names}, staleness {ages}"


def _mean(run: Run, part: Sequence[int], block: int) -> float | None:
    values = [v for i in part if run.tape.cosine[i] and math.isfinite(v := run.tape.cosine[i][block])]
    return sum(values) / len(values) if values else None


def _most_frequent_case(run: Run, part: Sequence[int], block: int) -> str:
    return Counter(run.tape.case[i][block] for i in part).most_common(1)[0][0]
