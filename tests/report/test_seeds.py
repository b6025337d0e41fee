"""Runs that differ in the seed alone: one row, one line with a band and one colour; and no star inside the noise."""

import csv
import io
import json
import math
import re
import shutil
from pathlib import Path
from statistics import fmean, stdev

import pytest

from heloco.report import overview
from heloco.report.charts import curves
from heloco.report.charts.figures import METHOD_COLOURS
from heloco.report.compare import table_at
from heloco.report.page_data import page_data
from heloco.report.run_groups import group_runs
from heloco.report.run_reader import read_runs
from support.runs import evals, heloco, tape

SEEDS = (0, 1, 2)
METHODS = ("mla", "heloco")


@pytest.fixture(scope="module")
def folders(unbroken, tmp_path_factory) -> dict[str, list[Path]]:
    """Two methods with three seeds each, in folders as a loop in a shell names them."""
    top = tmp_path_factory.mktemp("seeds")
    settings = ("--arrivals", "12", "--eval-every", "3")
    return {
        method: [
            Path(shutil.copytree(unbroken("--method", method, *settings, "--seed", str(seed)), top / f"{method}-{seed}"))
            for seed in SEEDS
        ]
        for method in METHODS
    }


@pytest.fixture(scope="module")
def every(folders) -> list[Path]:
    return [folders[method][seed] for seed in SEEDS for method in METHODS]


def losses(parts: list[Path], place: int = -1) -> list[float]:
    return [evals(folder)[place]["mean"]["loss"] for folder in parts]


def text_of(values: list[float]) -> str:
    return f"{fmean(values):.3f} ± {stdev(values):.3f}"


def test_compare_has_a_row_per_method_with_mean_and_spread(folders, every):
    result = heloco("compare", *every, "--format", "csv")
    assert (result.code, result.err) == (0, "")
    for part in result.out.split("\n\n"):
        rows = list(csv.DictReader(io.StringIO(part)))
        assert [(row["run"], row["seeds"], row["arrival"]) for row in rows] == [("mla", "3", "12"), ("heloco", "3", "12")]
        for row in rows:
            values = losses(folders[row["run"]])
            assert (row["loss"], row["loss, ±"]) == (f"{fmean(values):.3f}", f"{stdev(values):.3f}")
            for source in evals(folders[row["run"]][0])[-1]["scores"]:
                scores = [evals(folder)[-1]["scores"][source]["loss"] for folder in folders[row["run"]]]
                assert (float(row[source]), float(row[f"{source}, ±"])) == pytest.approx((fmean(scores), stdev(scores)), abs=6e-4)
    markdown = heloco("compare", *every, "--format", "markdown").out
    assert all(text_of(losses(folders[method])) in markdown for method in METHODS)
    assert "± sample standard deviation over seeds" in markdown


def test_the_star_follows_the_differences_seed_by_seed(folders, every):
    pairs = zip(losses(folders["mla"]), losses(folders["heloco"]), strict=True)
    differences = [a - b for a, b in pairs]
    is_clear = abs(fmean(differences)) > stdev(differences)
    table = table_at(read_runs(every), "units")
    column = table.header.index("loss")
    assert [row[column].tone for row in table.rows].count("best") == is_clear


def marks(*groups: dict[int, float | None], measure: str = "loss") -> list[str]:
    return [cell.tone for cell in overview.marked(groups, measure)]


def test_no_star_inside_the_noise():
    noisy, close = {0: 5.0, 1: 5.4, 2: 5.2}, {3: 5.1, 4: 5.5, 5: 5.3}
    assert marks(noisy, close) == ["", ""]  # the luckiest seed is no winner
    assert marks(noisy, {3: 6.1, 4: 6.5, 5: 6.3}) == ["best", ""]
    assert marks({seed: value + 0.1 for seed, value in noisy.items()}, noisy) == ["", "best"]  # below it with every seed
    assert marks(noisy, {0: 5.1, 1: 5.3, 2: 5.3}) == ["", ""]  # not with every seed
    assert marks(noisy, {0: 5.05}) == ["", ""] and marks(noisy, {0: 9.0}) == ["best", ""]
    assert marks(noisy, {0: 9.0, 1: 9.1, 2: 9.0}, measure="accuracy") == ["", "best"]
    assert marks(noisy) == [""] and marks(noisy, {0: None, 1: None}) == ["", ""]
    assert marks({0: 5.0}, {0: 5.1}) == ["best", ""]  # without seeds nothing is known of noise


def test_seeds_without_a_number_are_left_out_and_counted():
    [cell] = overview.marked([{0: 5.0, 1: None, 2: 5.5}], "loss")
    assert cell.text == f"5.250 ± {stdev([5.0, 5.5]):.3f} (2 of 3 seeds)"
    assert overview.marked([{0: None, 1: math.nan}], "loss")[0].text == "–"


def test_a_line_is_the_mean_with_a_band(folders, every):
    runs = read_runs(every)
    view = curves.scores(runs).views[0]
    for panel, place in zip(view.content.panels, ("units", "time_s"), strict=True):
        assert [line.label for line in panel.lines] == list(METHODS)
        assert [line.colour for line in panel.lines] == [METHOD_COLOURS[method] for method in METHODS]
        for line in panel.lines:
            parts = folders[line.label]
            assert list(line.x) == [fmean(row) for row in zip(*([e[place] for e in evals(f)] for f in parts), strict=True)]
            rows = list(zip(*([e["mean"]["loss"] for e in evals(folder)] for folder in parts), strict=True))
            assert list(line.y) == pytest.approx([fmean(row) for row in rows])
            assert list(line.spread) == pytest.approx([stdev(row) for row in rows])
    norms, traffic = curves.norms(runs), curves.traffic(runs)
    line = norms.views[0].content.panels[2].lines[0]
    moves = [[math.hypot(*(m for m in arrival["blocks"]["movement"] if m)) for arrival in tape(f)] for f in folders["mla"]]
    assert list(line.y) == pytest.approx([fmean(row) for row in zip(*moves, strict=True)], rel=1e-5)
    assert list(traffic.views[0].content.panels[0].lines[0].y)[-1] == fmean(evals(f)[-1]["units"] for f in folders["mla"])


def test_the_page_has_a_colour_a_name_and_a_row_per_method(folders, every, tmp_path):
    result = heloco("report", *every, "--out", tmp_path / "report.html")
    assert result.code == 0, result.err
    page = (tmp_path / "report.html").read_text()
    [content] = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, flags=re.DOTALL)
    data = json.loads(content)
    assert [(run["name"], run["colour"]) for run in data["runs"]] == [(m, METHOD_COLOURS[m]) for m in METHODS]
    table = data["tables"][0]
    seeds, column = table["header"].index("seeds"), table["header"].index("loss")
    assert [(row[0]["text"], row[seeds]["text"], row[seeds]["note"]) for row in table["rows"]] == [
        (method, "3", "0, 1, 2") for method in METHODS
    ]
    assert [row[column]["text"] for row in table["rows"]] == [text_of(losses(folders[method])) for method in METHODS]
    differing = {row[0]["text"]: [cell["text"] for cell in row[1:]] for row in data["tables"][-1]["rows"]}
    assert differing["run.seed"] == ["0, 1, 2"] * 2 and differing["outer.method"] == list(METHODS)
    charts = {chart["name"]: chart for chart in data["charts"]}
    assert all(len(line["spread"]) == len(line["y"]) for line in charts["scores"]["views"][0]["panels"][0]["lines"])
    assert "(seeds: mla 3, heloco 3)" in charts["scores"]["about"]
    assert len(charts["timeline"]["views"]) == 6  # what workers did is a run's own


def test_groups_are_named_by_what_tells_them_apart(folders, unbroken, tmp_path):
    def copied(source: Path, name: str) -> Path:
        return Path(shutil.copytree(source, tmp_path / name))

    def names(*parts: Path) -> list[str]:
        return [group.name for group in group_runs(read_runs(parts))]

    other = [unbroken("--method", "mla", "--arrivals", "12", "--eval-every", "3", "--lr", "0.001", "--seed", s) for s in "01"]
    usual = [copied(folder, f"usual-lr-{i}") for i, folder in enumerate(folders["mla"])]
    slow = [copied(folder, f"slow-lr-{i}") for i, folder in enumerate(other)]
    assert names(*usual, *slow) == ["usual-lr", "slow-lr"]
    assert names(*usual, slow[0]) == ["mla", "slow-lr-0"]
    assert names(usual[0], slow[0]) == ["usual-lr-0", "slow-lr-0"]
    first = [copied(folder, f"seed-{i}-a") for i, folder in enumerate(folders["mla"])]
    second = [copied(folder, f"seed-{i}-b") for i, folder in enumerate(other)]
    assert names(*first, *second) == ["a", "b"]
    assert names(usual[0], first[0]) == ["usual-lr-0", "seed-0-a"]  # the same run twice is no second seed


def test_a_seed_that_is_still_going_is_in_the_mean_as_far_as_it_is(folders, tmp_path):
    begun = Path(shutil.copytree(folders["mla"][0], tmp_path / "begun"))
    lines = (begun / "evals.jsonl").read_text().splitlines(keepends=True)
    (begun / "evals.jsonl").write_text("".join(lines[:2]))
    (begun / "tape.jsonl").write_text("".join((begun / "tape.jsonl").read_text().splitlines(keepends=True)[:3]))
    runs = read_runs([begun, folders["mla"][1]])
    [line] = curves.scores(runs).views[0].content.panels[0].lines
    ours, theirs = evals(begun), evals(folders["mla"][1])
    assert list(line.y[:2]) == pytest.approx([fmean((a["mean"]["loss"], b["mean"]["loss"])) for a, b in zip(ours, theirs)])  # noqa: B905
    assert list(line.y[2:]) == [b["mean"]["loss"] for b in theirs[2:]] and list(line.spread[2:]) == [None] * len(theirs[2:])
    table = page_data(runs)["tables"][0]
    assert table["rows"][0][table["header"].index("arrivals")]["text"] == "3–12 of 12"
