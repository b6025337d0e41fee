"""Tables of real machines: what each contributed, when the run paused and why."""

from bisect import bisect_right
from collections.abc import Sequence

from heloco.report.run_reader import Run
from heloco.report.summary import MachineSummary
from heloco.report.table_data import Cell, TableData
from heloco.report.wording import duration, number

PAUSES = 100
"""The most pauses that are listed, the last ones."""


def machine_tables(runs: Sequence[Run]) -> list[TableData]:
    """The tables of the runs on real machines; empty if there is no such run."""
    real = [run for run in runs if run.facts.is_real]
    if not any(run.summary.machines for run in real):
        return [_pauses_table(real)] if any(run.journal.pauses for run in real) else []
    return [_machines_table(real), _pauses_table(real)]


def _machines_table(runs: Sequence[Run]) -> TableData:
    windows = sorted({run.window for run in runs})
    window = f"of the last {windows[0]} arrivals" if len(windows) == 1 else "of the last arrivals"
    header = [
        "machine",
        *(["run"] if len(runs) > 1 else []),
        "worker",
        "contributions",
        "share",
        window,
        "last contribution",
    ]
    rows = []
    for run in runs:
        for id_, machine in sorted(run.summary.machines.items()):
            run_cell = [Cell(run.name)] if len(runs) > 1 else []
            rows.append([Cell(run.summary.label(id_)), *run_cell, *_machine_cells(run, machine)])
    caption = (
        "A machine has one worker of its own and does the rounds of others that have none. Seconds per step are measured from "
        "handing out to arrival, transfers included. Refused: not finite, or too large by norm_limit."
    )
    return TableData("Machines", [*header, "refused", "mean staleness", "s per step"], rows, caption)


def _machine_cells(run: Run, machine: MachineSummary) -> list[Cell]:
    summary, departure = run.summary, run.journal.departures.get(machine.id)
    departure_note = f"{departure.kind} at {duration(departure.time_s)}: {departure.reason}" if departure else ""
    last = "–" if machine.last_s is None else f"arrival {machine.last_arrival:,} at {duration(machine.last_s)}"
    pace = "–" if machine.measured_s is None else f"{machine.measured_s:.3g}"
    return [
        Cell(", ".join(map(str, sorted(machine.workers))) or "–"), Cell(f"{machine.arrivals:,}"),
        Cell(f"{summary.share(machine):.1%}"), Cell(f"{summary.recent_share(machine):.1%}"), Cell(last, departure_note),
        Cell(f"{machine.refused:,}"), Cell(number(machine.mean_staleness if machine.arrivals else None, 2)), Cell(pace),
    ]  # fmt: skip


def _pauses_table(runs: Sequence[Run]) -> TableData:
    rows, left_out = list[list[Cell]](), 0
    for run in runs:
        left_out += max(0, len(run.journal.pauses) - PAUSES)
        for pause in run.journal.pauses[-PAUSES:]:
            count = bisect_right(run.tape.time_s, pause.start_s)
            arrival = run.tape.arrival[count - 1] if count else 0
            duration_text = "not ended" if pause.end_s is None else f"{pause.end_s - pause.start_s:,.1f} s"
            run_cell = [Cell(run.name)] if len(runs) > 1 else []
            rows.append([Cell(duration(pause.start_s)), *run_cell, Cell(f"{arrival:,}"), Cell(duration_text), Cell(pause.reason)])
    caption = [f"The first {left_out:,} are left out."] if left_out else []
    if unread := [run.name for run in runs if not run.has_journal]:
        caption.append(f"Pauses stand in a run's journal, which is not here: {', '.join(unread)}.")
    header = ["at", *(["run"] if len(runs) > 1 else []), "after arrival", "lasted", "because"]
    return TableData("Pauses", header, rows, " ".join(caption))
