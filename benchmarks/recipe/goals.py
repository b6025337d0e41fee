"""The goals that the recipe was made for, checked against the kept runs: python benchmarks/recipe/goals.py [FOLDER]

It reads `recipe/recipe.json`, `scale/scale.json` and the runs that scale.json names in a folder of results [results]. It trains
nothing. It prints each goal with its figure, and its exit status is 1 if one is not met.

Sync, `mla`, `heloco` and `heloco-ramp` have the recipe's inner settings and its kind of shards. Equal time: the time T when the
last of a row's asynchronous runs ends. Sync's loss at T is that after its last round finished by then.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from heloco.study.kept_runs import RunStore

FIXED, FLEXIBLE, SYNC = "heloco-adaptive", "heloco-adaptive-flexible", "sync-nesterov"
RIVALS = ("mla", "heloco", "heloco-ramp")
Records = dict[tuple[str, str, int], dict[str, Any]]
"""The records of a study by row, method and seed."""


class Goal(NamedTuple):
    """A goal, the figure that the runs give, and whether that meets it."""

    text: str
    figure: str
    is_met: bool


def gains(records: Records, row: str, method: str, others: Sequence[str], budget: str = "loss") -> dict[int, float]:
    """By how many percent the method's final loss is below the lowest of the others', for each seed of the row."""
    seeds = [seed for at_row, name, seed in records if (at_row, name) == (row, method)]
    losses = {s: number(records[row, method, s]["loss"]) for s in seeds}
    return {s: 100 * (1 - losses[s] / min(number(records[row, name, s][budget]) for name in others)) for s in seeds}


def number(loss: float | None) -> float:
    """The loss; infinity for a run that diverged."""
    return float("inf") if loss is None else loss


def below_sync(records: Records, rows: Sequence[str], shards: str, budget: str) -> Goal:
    method, sync = (FLEXIBLE, f"{SYNC}-flexible") if shards == "flexible" else (FIXED, SYNC)
    by_row = [gains(records, row, method, [sync], "loss at T" if budget == "time" else "loss").values() for row in rows]
    means = [fmean(values) for values in by_row]
    reached = sum(min(values) > 0 for values in by_row)
    figure = f"{reached} of {len(rows)} rows, by {min(means):.1f} to {max(means):.1f} %"
    return Goal(f"{shards}, below sync at equal {budget}, every seed", figure, reached == len(rows))


def near_the_best(records: Records, rows: Sequence[str]) -> Iterator[Goal]:
    """With fixed shards: how far the recipe is above the best of the other asynchronous methods."""
    by_seed = {f"{row}, seed {s}": -gain for row in rows for s, gain in gains(records, row, FIXED, RIVALS).items()}
    by_mean = {row: 100 * (mean(records, row, FIXED) / min(mean(records, row, m) for m in RIVALS) - 1) for row in rows}
    text = "fixed, at most .5 % above the best of the others"
    for which, lags, unit in (("mean of seeds", by_mean, "rows"), ("each seed", by_seed, "runs")):
        worst, reached = max(lags, key=lambda place: lags[place]), sum(lag <= 0.5 for lag in lags.values())
        figure = f"{reached} of {len(lags)} {unit}, at most {lags[worst]:+.2f} % ({worst})"
        yield Goal(f"{text}, {which}", figure, reached == len(lags))


def mean(records: Records, row: str, method: str) -> float:
    return fmean(number(record["loss"]) for place, record in records.items() if place[:2] == (row, method))


def mean_below(summary: dict[str, Any], shards: str, method: str, limit: float) -> Goal:
    loss = summary[f"{shards.capitalize()} shards"]["mean over rows"]["loss"][method]
    figure = f"{loss['mean']:.3f} ± {loss['spread']:.3f}"
    return Goal(f"{shards}, mean over the rows ≤ {limit:.2f}", figure, loss["mean"] <= limit)


def largest_rise(arrivals: Sequence[int], losses: Sequence[float | None]) -> float:
    """By how much an evaluation after the first quarter of a run is above the lowest before it, at most."""
    numbers = list(map(number, losses))
    return max(numbers[i] - min(numbers[:i]) for i in range(1, len(numbers)) if arrivals[i] > arrivals[-1] / 4)


def steady(records: Records, store: RunStore) -> Goal:
    """Whether no run of the recipe, from 1 to 128 workers, has a loss that jumps."""
    rises = {}
    for (row, method, seed), record in records.items():
        if method == FIXED and (run := store.read(record["run"])) is not None:
            rises[row, seed] = largest_rise(run.evals.arrival, run.evals.loss) if run.finished else float("inf")
    (workers, seed), met = max(rises, key=lambda place: rises[place]), sum(rise <= 0.3 for rise in rises.values())
    figure = f"{met} of {len(rises)} runs, at most {rises[workers, seed]:+.2f} ({workers} workers, seed {seed})"
    return Goal("1 to 128 workers, no evaluation over .3 above the lowest before", figure, met == len(rises))


def check_goals(folder: Path) -> Iterator[Goal]:
    recipe, scale = (json.loads((folder / name / f"{name}.json").read_text()) for name in ("recipe", "scale"))
    placed, many = ({(r["row"], r["method"], r["seed"]): r for r in study["records"]} for study in (recipe, scale))
    rows = list(recipe["summary"]["Fixed shards"]["rows"])
    yield below_sync(placed, rows, "flexible", "tokens")
    yield below_sync(placed, rows, "flexible", "time")
    yield mean_below(recipe["summary"], "flexible", FLEXIBLE, 5.25)
    yield below_sync(placed, rows, "fixed", "time")
    yield from near_the_best(placed, rows)
    yield mean_below(recipe["summary"], "fixed", FIXED, 5.7)
    values = gains(many, "64", FIXED, [SYNC]).values()
    yield Goal(
        "64 workers, below sync at equal tokens, every seed", f"by {min(values):.1f} to {max(values):.1f} %", min(values) > 0
    )
    yield steady(many, RunStore(folder / "runs"))


if __name__ == "__main__":
    goals = list(check_goals(Path(sys.argv[1] if len(sys.argv) > 1 else "results")))
    for goal in goals:
        print(f"{goal.text:66}{'met' if goal.is_met else 'NOT MET':9}{goal.figure}")
    sys.exit(not all(goal.is_met for goal in goals))
