"""The README's picture: a run's last live panel and its tables, as the terminal shows them.

python docs/draw_run.py runs/heloco-ramp-001 docs/run.svg
"""

import io
import json
import sys
from pathlib import Path

from rich.console import Console

from heloco.report.summary import summarize
from heloco.report.terminal import Progress, tables
from heloco.run.lines import read_lines


def main(run: Path, out: Path) -> None:
    meta = json.loads((run / "run.json").read_text())
    tape = list(read_lines(run / "tape.jsonl"))
    evals = list(read_lines(run / "evals.jsonl"))
    middle = len(tape) * 2 // 3
    console = Console(record=True, width=92, file=io.StringIO(), force_terminal=True)
    console.print("[b]$ heloco train[/]")
    partial = summarize(meta, tape[:middle], [e for e in evals if e["arrival"] <= middle])
    console.print(Progress(partial, len(tape), console).panel())
    for table in tables(summarize(meta, tape, evals)):
        console.print(table)
    console.print(f"The run's folder: [b]{run}[/]")
    console.save_svg(str(out), title="heloco train")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
