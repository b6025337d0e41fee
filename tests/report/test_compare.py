"""`heloco compare`: runs at one budget of tokens and at one of virtual time, against their evaluations."""

import csv
import io
import shutil
from pathlib import Path

import pytest

from heloco.report.compare import table_at
from heloco.report.overview import marked, runs_table
from heloco.report.page_data import page_data
from heloco.report.run_reader import read_runs
from support.runs import assert_refused, evals, heloco

SETTINGS = {
    "fast": ("--paces", "1,2", "--arrivals", "12", "--eval-every", "3"),
    "slow": ("--paces", "3,9", "--arrivals", "8", "--eval-every", "2", "--method", "mla"),
}


@pytest.fixture(scope="module")
def folders(unbroken, tmp_path_factory) -> list[Path]:
    top = tmp_path_factory.mktemp("compared")
    return [Path(shutil.copytree(unbroken(*settings), top / name)) for name, settings in SETTINGS.items()]


def last_within(folder: Path, budget: str, limit: float) -> dict:
    return [line for line in evals(folder) if line[budget] <= limit][-1]


def compared(folders: list[Path], *more: str) -> list[list[dict[str, str]]]:
    result = heloco("compare", *folders, *more, "--format", "csv")
    assert (result.code, result.err) == (0, "")
    return [list(csv.DictReader(io.StringIO(part))) for part in result.out.split("\n\n")]


def test_the_smallest_budget_that_all_reached_is_the_default(folders):
    for rows, budget in zip(compared(folders), ("units", "time_s"), strict=True):
        limit = min(evals(folder)[-1][budget] for folder in folders)
        for row, folder in zip(rows, folders, strict=True):
            line = last_within(folder, budget, limit)
            assert row["run"] == folder.name
            assert row["arrival"] == str(line["arrival"])
            assert row["loss"] == f"{line['mean']['loss']:.3f}"
            assert row["bits per byte"] == f"{line['mean']['bits_per_byte']:.3f}"
            assert all(row[name] == f"{score['loss']:.3f}" for name, score in line["scores"].items())


def test_a_budget_that_is_given_is_kept_to(folders):
    tokens, times = compared(folders, "--at-tokens", "200", "--at-time", "7")
    for rows, budget, limit in ((tokens, "units", 200), (times, "time_s", 7)):
        for row, folder in zip(rows, folders, strict=True):
            assert row["arrival"] == str(last_within(folder, budget, limit)["arrival"])
    assert {row["arrival"] for row in times} != {"0"}


def test_a_run_that_ended_before_the_budget_is_named(folders):
    table = table_at(read_runs(folders), "time_s", 1e6)
    assert table.title == "At 1,000,000 s of virtual time"
    assert "Ended before the budget: fast, slow." in table.caption


def test_the_caption_says_how_far_apart_the_evaluations_are(folders):
    for budget, limit, unit in (("units", 200, "tokens"), ("time_s", 25, "s of virtual time")):
        places = [last_within(folder, budget, limit)[budget] for folder in folders]
        assert max(places) > min(places)
        spread = max(places) - min(places)
        expected = f"The evaluations are up to {spread:g} {unit} apart, {spread / limit:.1%} of the budget:"
        assert expected in table_at(read_runs(folders), budget, limit).caption
        option = "--at-tokens" if budget == "units" else "--at-time"
        assert expected in heloco("compare", *folders, option, str(limit), "--format", "markdown").out
    same = table_at(read_runs(folders[:1]), "units", 200).caption
    assert f"All are of {last_within(folders[0], 'units', 200)['units']:g} tokens." in same and "apart" not in same


def test_the_best_of_each_column_is_marked_at_the_same_budget(folders):
    budget = 384
    assert [last_within(folder, "units", budget)["units"] for folder in folders] == [budget] * 2
    table = table_at(read_runs(folders), "units", budget)
    for column, name in enumerate(table.header[1:-2], 1):
        cells = [row[column] for row in table.rows]
        best = min(float(cell.text) for cell in cells)
        assert all((cell.tone == "best") == (float(cell.text) == best) for cell in cells), name
    alone = table_at(read_runs(folders[:1]), "units")
    assert not any(cell.tone for row in alone.rows for cell in row)


def test_who_had_more_of_the_budget_is_not_the_best_by_that_alone(folders):
    """fast was trained on 768 tokens and slow on 512: a lower loss of fast says nothing about its method."""
    runs = read_runs(folders)
    losses = [evals(folder)[-1]["mean"]["loss"] for folder in folders]
    for table in (runs_table(runs), table_at(runs, "units", 768)):
        tones = [row[table.header.index("loss")].tone for row in table.rows]
        assert tones == ["", "best" if losses[1] < losses[0] else ""]
    for spent, tones in (([[384.0], [512.0]], ["best", ""]), ([[512.0], [510.0]], ["best", ""]), ([[600.0], [512.0]], ["", ""])):
        assert [cell.tone for cell in marked([{0: 5.0}, {0: 6.0}], "loss", spent)] == tones, spent
    assert "It is not marked if it had more of the budget than another." in table_at(runs, "units").caption


def test_a_page_compares_runs_of_unlike_budgets_at_equal_ones(folders):
    titles = [table["title"] for table in page_data(read_runs(folders))["tables"]]
    time_s = min(evals(folder)[-1]["time_s"] for folder in folders)
    assert titles == ["Runs", "At 512 tokens", f"At {time_s:g} s of virtual time", "Settings that differ"]
    assert [table["title"] for table in page_data(read_runs(folders[:1]))["tables"]] == ["Runs", "Settings"]


def test_it_comes_as_a_table_and_as_markdown(folders):
    result = heloco("compare", *folders)
    assert result.code == 0
    assert "★" in result.out and "fast" in result.out and "virtual time" in result.out
    markdown = heloco("compare", *folders, "--format", "markdown").out
    assert markdown.count("## At ") == 2
    assert "| run | loss | bits per byte | " in markdown and " | arrival | tokens |" in markdown
    assert "**" in markdown


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("--at-tokens", "many"), "--at-tokens cannot be 'many': give a number ≥ 0."),
        (("--at-time", "-3"), "--at-time cannot be '-3': give a number ≥ 0."),
        (("--at-time", "nan"), "--at-time cannot be 'nan'"),
        (("--format", "html"), "There is no format 'html'; known: table, markdown, csv."),
        (("--format", "markdwn"), "did you mean 'markdown'?"),
    ],
)
def test_what_cannot_be_is_refused(more, says, folders, tmp_path):
    assert_refused(tmp_path, "compare", *folders, *more, says=says)


def test_a_run_without_an_evaluation_is_named(folders, tmp_path):
    empty = Path(shutil.copytree(folders[0], tmp_path / "empty"))
    (empty / "evals.jsonl").write_text("")
    assert_refused(tmp_path, "compare", folders[1], empty, says=f"Nothing has been evaluated yet in {empty}: leave it out")
