"""Tables of a study: no colour for a difference inside the noise."""

import re
from pathlib import Path

import pytest

from heloco.study.results import Stat, tones
from support.runs import heloco

STUDY = """
like = "table1"
[small]
width = 16
context = 16
inner_steps = 2
arrivals = 20
eval_every = 20
eval_windows = 2
batch_size = 2
[rows]
"1,1,1,1,1" = { paces = [1, 1, 1, 1, 1] }
[methods]
heloco = {}
again = { method = "heloco", eps = 2e-8 }
slow = { method = "heloco", lr = 1e-7, lr_min = 1e-7 }
[[tables]]
kind = "budget"
title = "Budget"
variants = ["heloco"]
against = ["again", "slow"]
[[tables]]
kind = "losses"
title = "Losses"
"""


def test_the_best_and_the_worst_are_beyond_the_noise():
    noisy, close, far = {0: 5.0, 1: 5.4, 2: 5.2}, {0: 5.1, 1: 5.3, 2: 5.3}, {0: 7.0, 1: 7.4, 2: 7.2}
    assert tones({"a": noisy, "b": close}) == {"a": "", "b": ""}
    assert tones({"a": noisy, "b": close, "c": far}) == {"a": "", "b": "", "c": "worst"}
    assert tones({"a": noisy, "c": far}) == {"a": "best", "c": ""}
    assert tones({"a": noisy}) == {"a": ""} and tones({"a": {0: None}, "b": noisy}) == {"a": "", "b": ""}
    better = {seed: loss - 0.01 for seed, loss in noisy.items()}
    assert tones({"a": noisy, "b": better}) == {"a": "", "b": "best"}, "better with every seed"


def test_of_one_seed_a_percent_may_be_noise():
    assert tones({"a": {0: 5.0}, "b": {0: 5.04}}) == {"a": "", "b": ""}
    assert tones({"a": {0: 5.0}, "b": {0: 5.06}}) == {"a": "best", "b": ""}
    assert [Stat(mean, None, 1).is_clear_percentage for mean in (0.9, -0.9, 1.1, -1.1)] == [False, False, True, True]
    assert [Stat(mean, 0.5, 3).is_clear_percentage for mean in (0.4, -0.4, 0.6)] == [False, False, True]


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    folder: Path = tmp_path_factory.mktemp("noise")
    (folder / "noise.toml").write_text(STUDY)
    result = heloco("study", folder / "noise.toml", "--scale", "small", "--seeds", "2", "--out", folder / "results")
    assert result.code == 0, result.err
    return (folder / "results" / "noise" / "index.html").read_text()


def test_a_study_colours_only_what_is_clear(page):
    """`again` is heloco but for a knob that hardly matters: only `slow`, which did not learn, is told from the others."""
    tables = re.findall(r'<table aria-label="([^"]*)".*?<tbody>(.*?)</tbody>', page, flags=re.DOTALL)
    cells = {title: re.findall(r'<td [^>]*class="([^"]*)">(.*?)</td>', body) for title, body in tables}
    losses = [names for names, _ in cells["Losses"]]
    assert losses == ["number", "number", "number worst"]
    ours, again, slow, than_again, than_slow = [names for names, _ in cells["Budget, fixed tokens: heloco"]]
    assert (ours, again, slow) == ("number", "number", "number worst")
    assert (than_again, than_slow) == ("number", "number good")
    assert "What lies within the noise is not marked." in page
