"""What a page shows first, and how: no chart over outer steps, a run that corrects, palettes, points, stripes."""

import shutil
from pathlib import Path

import pytest

from heloco.report.charts import curves
from heloco.report.charts.chart import PIECES, RUN_COLOURS, worker_colours
from heloco.report.page_data import page_data
from heloco.report.run_reader import Run, read_runs
from support.runs import tape

HELOCO = ("--method", "heloco", "--paces", "1,2,3,4,5", "--arrivals", "20", "--eval-every", "4")
MLA = (*HELOCO, "--method", "mla")


@pytest.fixture(scope="module")
def folders(unbroken, tmp_path_factory) -> list[Path]:
    """Two runs under names of their own."""
    top = tmp_path_factory.mktemp("runs")
    return [Path(shutil.copytree(unbroken(*s), top / name)) for s, name in ((HELOCO, "heloco-001"), (MLA, "mla-001"))]


@pytest.fixture(scope="module")
def runs(folders) -> list[Run]:
    return read_runs(folders)


def test_no_chart_opens_over_outer_steps(runs):
    for chart in page_data(runs)["charts"]:
        assert not any("outer step" in panel["x_label"] for panel in chart["views"][0].get("panels", [])), chart["name"]


def test_the_page_opens_on_a_run_that_corrects(folders):
    plain, corrected = read_runs([folders[1], folders[0]])
    assert not any(set(a["blocks"]["case"]) & set("dt") for a in tape(folders[1]))
    assert page_data([plain, corrected])["run"] == corrected.name == "heloco-001"
    assert page_data([plain])["run"] == "mla-001"


def test_runs_and_workers_have_no_colour_in_common():
    for count in range(1, 13):
        colours = worker_colours(count)
        assert len(set(colours)) == count and not set(colours) & set(RUN_COLOURS)
    assert not set(PIECES) & {*RUN_COLOURS, *worker_colours(12)}


def test_staleness_is_drawn_as_points_and_counts_are_known_as_such(runs):
    charts = {chart["name"]: chart for chart in page_data(runs)["charts"]}
    [panel] = charts["staleness"]["views"][0]["panels"]
    assert panel["points"] and panel["counts"] and charts["staleness"]["switches"] == ()
    assert charts["histogram"]["views"][0]["counts"] and not charts["shares"]["views"][0]["counts"]
    [panel] = charts["training"]["views"][0]["panels"]
    assert not panel["points"] and not panel["counts"]


def test_lines_that_lie_on_each_other_take_turns(runs):
    """Runs of one schedule have the same tokens at the same time, whatever their method."""
    tokens, _ = curves.traffic(runs).views[0].content.panels
    assert list(tokens.lines[0].y) == list(tokens.lines[1].y)
    assert [line.stripe for line in tokens.lines] == [(0, 2), (1, 2)]
    scores = curves.scores(runs).views[0].content.panels[0]
    assert [line.stripe for line in scores.lines] == [None, None]
