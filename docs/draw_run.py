"""The README's picture: a run's last live panel and its tables, as the terminal shows them.

python docs/draw_run.py runs/heloco-adaptive-001 docs/run.svg
"""

import io
import sys
from pathlib import Path

from rich.console import Console

from heloco.records.evaluations import EvaluationRecord
from heloco.records.lines import read_records
from heloco.records.run_facts import read_facts
from heloco.records.run_files import EVALS, META, TAPE
from heloco.records.tape import ArrivalRecord
from heloco.report.summary import RunSummary, read_summary, summarize
from heloco.report.terminal import Progress, tables


def main(run: Path, out: Path) -> None:
    facts = read_facts(run / META)
    tape = list(read_records(run / TAPE, ArrivalRecord))
    evaluations = list(read_records(run / EVALS, EvaluationRecord))
    middle = len(tape) * 2 // 3
    console = Console(record=True, width=92, file=io.StringIO(), force_terminal=True)
    console.print("[b]$ heloco train[/]")
    partial = summarize(
        RunSummary.from_facts(facts), tape[:middle], [record for record in evaluations if record.arrival <= middle]
    )
    console.print(Progress(partial, facts, len(tape), console).panel())
    for table in tables(read_summary(run, facts)):
        console.print(table)
    console.print(f"The run's folder: [b]{run}[/]")
    console.save_svg(str(out), title="heloco train")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
