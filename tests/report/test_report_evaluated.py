"""Reports of external runs that their machines evaluate: as of other runs, and apart from what machines found for themselves."""

from pathlib import Path

import pytest

import heloco as package
from heloco.cluster.protocol.score_messages import ScoreReport
from heloco.report.charts.curves import NOTHING_EVALUATED, own_scores, scores
from heloco.report.page_data import page_data
from heloco.report.page_writer import render_report
from heloco.report.run_reader import Run, read_runs
from support.browsers import silent_page
from support.runs import heloco
from support.small_cluster import Clock, Hand, delta, opened


def evaluated(folder: Path, shift: float = 0.0) -> Path:
    """A run of 8 arrivals whose model was scored at the even ones, and machines' own models at two others."""
    clock = Clock()
    service = opened(folder, clock, paces=[1.0, 1.0], arrivals=8, eval_every=2)
    hands = [Hand(service, name) for name in ("one", "two")]

    def report(hand: Hand, own_steps: int, loss: float) -> None:
        assert hand.key is not None
        measures = {source: {"loss": loss + i, "words": 10 * loss} for i, source in enumerate(("de", "[/en]"))}
        hand.link.report_scores(hand.ticket, ScoreReport(**hand.key._asdict(), own_steps=own_steps, scores=measures))

    for seed in range(8):
        clock.now += 1.0
        hand = hands[seed % 2]
        hand.take()
        if seed % 2 == 0:
            report(hand, 0, 5.0 - seed / 4 + shift)
        if seed in (3, 4):
            report(hand, 1, 0.5)
        hand.hand_in(delta(seed), loss=2.0)
    service.close()
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Run:
    [only_run] = read_runs([evaluated(tmp_path / "run")])
    return only_run


def test_the_curve_of_the_run_has_the_scores_of_its_model_alone(run: Run) -> None:
    assert [record.arrival for record in run.evals] == [0, 2, 4, 6] and run.sources == ["de", "[/en]"]
    assert run.measures == ["loss", "words"]
    loss, words, *_ = scores([run]).views
    assert list(loss.content.panels[0].lines[0].y) == [5.5, 5.0, 4.5, 4.0]
    assert list(words.content.panels[0].lines[0].y) == [50.0, 45.0, 40.0, 35.0]
    chart = own_scores([run])
    assert chart is not None and [view.label for view in chart.views] == ["loss", "words"]
    lines = chart.views[0].content.panels[0].lines
    assert {line.label: list(line.y) for line in lines} == {"one": [1.0], "two": [1.0]}
    names = [chart["name"] for chart in page_data([run])["charts"]]
    assert names[:3] == ["scores", "sources", "own"] and names[-2:] == ["training", "correction"]
    assert (run.summary.first_eval, run.summary.last_eval) == (run.evals[0], run.evals[-1])


def test_such_runs_are_compared_and_watched_like_others(run: Run, tmp_path: Path) -> None:
    other = evaluated(tmp_path / "worse", shift=0.5)
    result = heloco("compare", run.path, other)
    assert result.code == 0, result.err
    rows = [line for line in result.out.splitlines() if "run" in line.split() or "worse" in line.split()]
    assert any("4.000" in row and "3.500" in row and "4.500" in row for row in rows), result.out
    assert any("4.500" in row for row in rows)
    assert heloco("report", run.path, other, "--out", tmp_path / "page.html").code == 0
    watched = heloco("watch", run.path, "--text")
    assert watched.code == 0, watched.err
    assert "6/8" in watched.out and "mean validation loss 4.000" in watched.out and "mean training loss 2.000" in watched.out
    assert "Validation" in watched.out and NOTHING_EVALUATED not in watched.out and "5.500" in watched.out


def test_frames_keep_them_apart(run: Run) -> None:
    pytest.importorskip("pandas")
    data = package.load_run(run.path)
    assert list(data.evals.arrival) == [0, 2, 4, 6] and list(data.evals["loss/[/en]"]) == [6.0, 5.5, 5.0, 4.5]
    assert "own_steps" not in data.evals
    assert list(data.own_evals.own_steps) == [1, 1] and list(data.own_evals.loss) == [1.0, 1.0]


def test_a_browser_shows_them_in_silence(run: Run, tmp_path: Path, browser_path: str | None) -> None:
    (tmp_path / "page.html").write_text(render_report(page_data([run])))
    with silent_page(browser_path) as page:
        page.goto((tmp_path / "page.html").as_uri())
        page.evaluate("heloco.drawAll()")
        assert page.locator("#chart-scores .plot").is_visible()
        assert "no scores of the run's model" in page.locator("#chart-own").inner_text()
        assert page.evaluate("heloco.cards.get('own').plot.data.map(trace => trace.name)") == ["one", "two"]
