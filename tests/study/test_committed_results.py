"""The results that are committed: their runs are still those of their studies, and results/README.md says what they say."""

import json
import re
import runpy
from dataclasses import replace
from types import SimpleNamespace

import pytest

from heloco.study.plan import make_plan
from heloco.study.spec import find_study
from support.repository import REPOSITORY

RESULTS = REPOSITORY / "results"
STUDIES = [path.parent.name for path in sorted(RESULTS.glob("*/study.json"))]


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_still_needs_the_runs_that_are_kept(name):
    """So the recipe `paper`, which all studies are over, has not changed by a single setting since they were made."""
    manifest = json.loads((RESULTS / name / "study.json").read_text())

    def build(config):
        shards = [SimpleNamespace(name=source) for source in manifest["sources"]]
        data = replace(config.input, languages=manifest["sources"])
        config = replace(config, input=data, model=replace(config.model, vocab_size=50257))  # GPT-2's
        return SimpleNamespace(digest=manifest["data"], shards=shards), config

    plan = make_plan(
        find_study(name), seeds=len(manifest["seeds"]), rows=manifest["rows"], methods=manifest["methods"], build_task=build
    )
    assert set(manifest["runs"]) <= set(plan.digests)
    assert all((RESULTS / "runs" / f"{run}.json").exists() for run in manifest["runs"])


def test_the_readme_says_how_far_the_goals_are_reached():
    text = (RESULTS / "README.md").read_text()
    goals = list(runpy.run_path(str(REPOSITORY / "benchmarks" / "recipe" / "goals.py"))["check_goals"](RESULTS))
    for goal in goals:
        for figure in re.findall(r"\d+\.\d+(?: (?:to|±) \d+\.\d+)?", goal.figure):
            assert figure in text or re.sub(r"\b0\.", ".", figure) in text, goal
    assert sum(not goal.is_met for goal in goals) == 2 and "Its two misses" in text
