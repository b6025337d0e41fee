"""What a run shows: its summary against the tape, its lines, its tables, its live display."""

import itertools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from msgspec import to_builtins

from heloco.records.evaluations import EvaluationRecord
from heloco.records.run_facts import read_facts
from heloco.records.tape import ArrivalRecord
from heloco.report.summary import RunSummary, read_summary, summarize
from heloco.report.terminal import workers_table
from heloco.report.wording import duration, number
from support.nursery import Fault
from support.runs import TINY, evals, heloco, tape
from support.terminals import on_a_terminal, without_colours

SETTINGS = {
    "heloco": ("--method", "heloco", "--paces", "1,2,3,4,5", "--arrivals", "20"),
    "sync": ("--method", "sync-nesterov", "--paces", "1,2,3", "--arrivals", "9"),
    "dropped": ("--drop", "zero", "--drop-above", "1", "--paces", "1,1,3", "--arrivals", "14"),
    "skipped": ("--drop", "skip", "--drop-above", "1", "--paces", "1,1,3", "--arrivals", "14"),
    "flexible": ("--assign", "flexible", "--paces", "1,2,3", "--steps", "dylu", "--inner-steps", "6"),
}


def summary_of(folder: Path):
    return read_summary(folder, read_facts(folder / "run.json"))


@pytest.mark.parametrize("name", SETTINGS)
def test_the_summary_is_what_the_tape_says(name, unbroken):
    folder = unbroken(*SETTINGS[name])
    lines, summary = tape(folder), summary_of(folder)
    assert summary.arrivals == len(lines)
    assert summary.outer_step == lines[-1]["outer_step"]
    assert summary.time_s == max(line["time_s"] for line in lines)
    assert summary.units == sum(line["units"] for line in lines) == evals(folder)[-1]["units"]
    assert summary.inner_steps == sum(line["inner_steps"] for line in lines) == evals(folder)[-1]["inner_steps"]
    assert summary.verdicts == Counter(line["verdict"] for line in lines)
    letters = Counter("".join(line["blocks"]["case"] for line in lines if line["verdict"] == "applied"))
    assert summary.cases == {"kept": letters["k"], "damped": letters["d"], "turned": letters["t"], "skipped": letters["s"]}
    for i, worker in enumerate(summary.workers):
        worker_lines = [line for line in lines if line["worker"] == i]
        staleness = [line["staleness"] for line in worker_lines]
        assert worker.arrivals == len(worker_lines)
        assert summary.share(worker) == len(worker_lines) / len(lines)
        assert worker.mean_staleness == (sum(staleness) / len(worker_lines) if worker_lines else 0)
        assert worker.max_staleness == max(staleness, default=0)
        assert worker.inner_steps == sum(line["inner_steps"] for line in worker_lines)
        assert worker.last_staleness == (staleness[-1] if worker_lines else None)
        assert worker.loss == (worker_lines[-1]["loss"] if worker_lines else None)
    assert sum(summary.share(worker) for worker in summary.workers) == pytest.approx(1)
    assert sum(summary.movement_share(worker) for worker in summary.workers) == pytest.approx(1)
    assert [to_builtins(summary.first_eval), to_builtins(summary.last_eval)] == [evals(folder)[0], evals(folder)[-1]]


def test_the_settings_above_show_every_verdict(unbroken):
    verdicts = {name: {line["verdict"] for line in tape(unbroken(*settings))} for name, settings in SETTINGS.items()}
    assert verdicts["sync"] == {"gathered", "applied"}
    assert verdicts["dropped"] == {"zeroed", "applied"}
    assert verdicts["skipped"] == {"skipped", "applied"}


def test_a_summary_can_be_added_to_line_by_line(unbroken):
    folder = unbroken(*SETTINGS["heloco"])
    lines = tape(folder)
    half = RunSummary.from_facts(read_facts(folder / "run.json"))
    summarize(half, msgspec.convert(lines[:7], list[ArrivalRecord]), msgspec.convert(evals(folder)[:1], list[EvaluationRecord]))
    assert half.arrivals == 7
    for line in lines[7:]:
        half.add_arrival(msgspec.convert(line, ArrivalRecord))
    for line in evals(folder)[1:]:
        half.add_evaluation(msgspec.convert(line, EvaluationRecord))
    assert half == summary_of(folder)


def refused(worker: int) -> ArrivalRecord:
    return ArrivalRecord(
        arrival=0, verdict="refused", time_s=3.0, start_s=1.0, outer_step=0, worker=worker, round=0, version=0, staleness=4,
        weight=1.0, shard=0, spans=(), inner_steps=2, loss=None, last_loss=None, samples=9, units=9, code="norm", reason="",
    )  # fmt: skip


def test_refused_contributions_are_counted_apart():
    record = refused(worker=1)
    summary = summarize(RunSummary([1, 2]), [record, record])
    assert [worker.refused for worker in summary.workers] == [0, 2]
    assert (summary.arrivals, summary.units, summary.inner_steps, summary.time_s) == (0, 0, 0, 3.0)
    assert summary.workers[1].max_staleness == 0 and summary.share(summary.workers[1]) == 0


def test_durations_and_numbers_read_well():
    assert [duration(s) for s in (0, 59.4, 60, 3599, 3600, 14400, 360000)] == [
        "0:00", "0:59", "1:00", "59:59", "1:00:00", "4:00:00", "100:00:00",
    ]  # fmt: skip
    assert [number(None), number(1.23456), number(0.5, 1)] == ["–", "1.235", "0.5"]


# ---- at the end


def tables(out: str) -> dict[str, list[list[str]]]:
    """Title -> rows of cells, of every table printed."""
    rows_by_title: dict[str, list[list[str]]] = {}
    before, title = "", ""
    for line in out.splitlines():
        if line.startswith("┏"):
            title = before.strip()
            rows_by_title[title] = []
        elif line.startswith(("│", "┃")):
            rows_by_title[title].append([cell.strip() for cell in re.split("[│┃]", line)[1:-1]])
        elif line.strip():
            before = line
    return rows_by_title


def test_a_finished_run_shows_its_losses_workers_correction_and_folder(tmp_path):
    result = heloco("train", *TINY, *SETTINGS["heloco"], "--out", tmp_path / "run")
    summary, shown_tables = summary_of(tmp_path / "run"), tables(result.out)
    first, last = summary.first_eval, summary.last_eval
    scores = shown_tables["Validation"]
    assert scores[0] == ["", "loss, start", "end", "bits per byte, start", "end"]
    assert [row[0] for row in scores[1:]] == ["arzhan", "auren", "thelis", "vesnar", "zumeri", "mean"]
    for name, *cells in scores[1:]:
        pairs = [(record.mean if name == "mean" else record.scores[name]) for record in (first, last)]
        assert cells == [f"{score[measure]:.3f}" for measure in ("loss", "bits_per_byte") for score in pairs]
    assert shown_tables["Workers"][0] == ["worker", "pace", "arrivals", "share", "mean staleness", "max", "share of movement"]
    for i, (worker, row) in enumerate(zip(summary.workers, shown_tables["Workers"][1:], strict=True)):
        share, movement = f"{summary.share(worker):.1%}", f"{summary.movement_share(worker):.1%}"
        mean = f"{worker.mean_staleness:.2f}"
        assert row == [str(i), f"{i + 1} s", str(worker.arrivals), share, mean, str(worker.max_staleness), movement]
    [header, counts] = next(rows for title, rows in shown_tables.items() if "correction" in title or title == "arrivals")
    total = sum(summary.cases.values())
    assert header == ["kept", "damped", "turned", "skipped"]
    assert counts == [f"{count:,} ({count / total:.1%})" for count in summary.cases.values()]
    assert result.out.splitlines()[-1] == f"The run's folder: {tmp_path / 'run'}"


def test_a_resumed_run_shows_the_tables_of_the_whole_run(tmp_path, nursery):
    whole = heloco("train", *TINY, "--out", tmp_path / "whole")
    fault = Fault("heloco.run.folder:RunFolder.write_arrival", 5, signal=9)
    nursery.run("train", *TINY, "--checkpoint-every", "2", "--out", tmp_path / "run", fault=fault)
    assert tables(heloco("resume", tmp_path / "run").out) == tables(whole.out)


def test_refusals_have_a_column_of_their_own():
    summary = summarize(RunSummary([1, 2]), [refused(worker=0)])
    table = workers_table(summary)
    assert [str(column.header) for column in table.columns][-1] == "refused"
    assert list(table.columns[-1].cells) == ["1", "0"]


# ---- while it runs


def test_without_a_terminal_there_is_a_plain_line_per_evaluation(tmp_path):
    result = heloco("train", *TINY, "--eval-every", "3", "--out", tmp_path / "run")
    assert "\x1b" not in result.out
    printed_lines = list(itertools.takewhile(lambda line: line.startswith("arrival"), result.out.splitlines()))
    expected = [
        f"arrival {line['arrival']:>6}/8  virtual {duration(line['time_s'])}  {line['units']:,} tokens  "
        f"mean validation loss {line['mean']['loss']:.3f}"
        for line in evals(tmp_path / "run")
    ]
    assert printed_lines == expected
    assert [line.split()[1] for line in printed_lines] == ["0/8", "3/8", "6/8", "8/8"]


def test_on_a_terminal_a_live_display_shows_how_the_run_stands(tmp_path):
    code, drawn = on_a_terminal("train", *TINY, "--paces", "1,2,3,3,3", "--out", tmp_path / "run")
    assert code == 0
    assert "\x1b[" in drawn, "nothing was drawn"
    plain = without_colours(drawn)
    frames = plain.split("╭─ heloco-ramp ")[1:]
    assert len(frames) > 1
    assert "0/8 arrivals" in frames[0]
    last, lines = frames[-1], tape(tmp_path / "run")
    assert "8/8 arrivals" in last
    assert f"outer step {lines[-1]['outer_step']} " in last
    assert f"virtual time {duration(lines[-1]['time_s'])} " in last
    assert f"tokens {sum(line['units'] for line in lines)} " in last
    assert f"validation loss {evals(tmp_path / 'run')[-1]['mean']['loss']:.3f}" in last
    for i, name in enumerate(("arzhan", "auren", "thelis", "vesnar", "zumeri")):
        worker_lines = [line for line in lines if line["worker"] == i]
        [row] = [line.strip("│ ").split() for line in last.splitlines() if re.match(rf"│ +{i} +\d", line)]
        stale = [str(worker_lines[-1]["staleness"]), f"{sum(line['staleness'] for line in worker_lines) / len(worker_lines):.1f}"]
        assert row[3:] == [name, str(len(worker_lines)), *stale, f"{worker_lines[-1]['loss']:.3f}"]
    assert f"The run's folder: {tmp_path / 'run'}" in plain


def test_reports_read_no_tensors():
    code = "import sys, heloco.report.summary, heloco.report.terminal; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
