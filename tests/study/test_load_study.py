"""`heloco.load_study`: a study's folder as DataFrames, against its files."""

import csv
import json
import shutil

import pytest

import heloco
from heloco.errors import UserError
from heloco.report.table_data import Cell, TableData
from heloco.report.table_text import as_csv
from support.repository import REPOSITORY

pytest.importorskip("pandas", reason="pandas is not installed")
TABLE1 = REPOSITORY / "results" / "table1"


@pytest.fixture(scope="module")
def study():
    return heloco.load_study(TABLE1)


@pytest.fixture(scope="module")
def records():
    return json.loads((TABLE1 / "table1.json").read_text())["records"]


def test_a_row_for_each_run_with_the_numbers_of_the_files(study, records):
    runs = study.runs
    assert list(zip(runs.row, runs.method, runs.seed, strict=True)) == [(r["row"], r["method"], r["seed"]) for r in records]
    assert runs.loss.tolist() == [r["loss"] for r in records] and runs.time_s.tolist() == [r["time_s"] for r in records]
    for source in study.manifest.sources:
        assert runs[f"loss/{source}"].tolist() == [r["loss by source"][source] for r in records]
    assert runs.kept.tolist() == [r["cases"]["kept"] for r in records]


def test_the_summary_is_the_mean_over_seeds(study):
    line = study.summary.set_index(["row", "method"]).loc[("1,1,6,6,6", "heloco-ramp")]
    losses = study.runs.query("row == '1,1,6,6,6' and method == 'heloco-ramp'").loss
    assert (line["mean"], line["std"], line["count"]) == (pytest.approx(losses.mean()), pytest.approx(losses.std()), 3)


def test_curves_end_where_the_runs_do_on_the_clock_of_their_row(study):
    last = study.curves.groupby(["row", "method", "seed"], sort=False).last().reset_index()
    runs = study.runs
    assert last.loss.tolist() == runs.loss.tolist()
    assert last.time_s.tolist() == pytest.approx(runs.time_s.tolist())
    assert set(study.curves.columns) >= {"arrival", "inner_steps", *(f"loss/{source}" for source in study.manifest.sources)}


def test_it_says_in_a_line_what_it_is(study):
    assert repr(study) == f"<heloco.StudyData: table1 at the scale paper, {len(study.manifest.runs)} runs in {TABLE1}>"


def test_what_is_no_study_is_refused_and_so_are_missing_runs(tmp_path):
    with pytest.raises(UserError, match=r"holds no study \(it has no study\.json\): give the folder that `heloco study` named"):
        heloco.load_study(tmp_path)
    alone = shutil.copytree(TABLE1, tmp_path / "table1")
    with pytest.raises(UserError, match=r"is missing: keep the folder .*runs next to the study's"):
        _ = heloco.load_study(alone).runs


def test_the_tables_of_a_study_hold_numbers_as_csv():
    """With the mean and its spread in columns of their own."""
    rows = [["a", "6.537 ± 0.009", "+1.72 ± 0.17"], ["b", "6.1", "-1.53 ± 1.11"]]
    table = TableData("t", ["", "L", "Δ %"], [list(map(Cell, row)) for row in rows])
    lines = list(csv.DictReader(as_csv(table, split_spreads=True).splitlines()))
    assert [float(line["L"]) for line in lines] == [6.537, 6.1] and [float(line["Δ %, ±"]) for line in lines] == [0.17, 1.11]
    assert lines[0]["L, ±"] == "0.009" and lines[1]["L, ±"] == ""
