"""Runs several study files as one fleet, with chosen seeds and orders of the languages.

    PYTHONPATH=src python benchmarks/explore.py GRID.toml[@SEEDS[@LANGUAGES]] … [+ GRID.toml …] --data DIR --out RUNS

`heloco study` runs one study with seeds from 0 on. A stack stays full only if many runs share it, so a search over settings
runs faster as one fleet. SEEDS are numbers with commas between them (0 where left out), LANGUAGES an order of the sources. RUNS
is a folder of finished runs like results/runs: a run that is there is not made again.

`--seconds` limits the time. Grids after a `+` are then begun only as far as the time suffices at the rate measured before. When
the time is over, the evaluations of unfinished runs are written to RUNS-unfinished.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import msgspec
import torch

from heloco.engine.build import build_task, pick_device
from heloco.engine.fleet import Fleet, PlannedRun, host_work_first, make_member
from heloco.engine.local import Collector, StopRequested
from heloco.study.grid import Place, digest, grid, total_steps
from heloco.study.kept_runs import RunStore, make_record
from heloco.study.plan import Tasks
from heloco.study.spec import find_study

REPORT_EVERY_S = 20
SAFETY = 0.9  # of the time that is left: what is begun after the + should also end

Runs = dict[str, tuple[PlannedRun, Place]]
"""By digest."""


class Keeper:
    """Keeps each run when it ends, and prints its loss and how fast all go on."""

    def __init__(self, runs: Runs, store: RunStore) -> None:
        self.runs, self.store = runs, store
        self.began = self.reported = time.monotonic()
        self.steps_reported = 0
        self.rates: list[float] = []

    @property
    def seconds_per_step(self) -> float:
        return median(self.rates) if self.rates else 1e-3

    def on_progress(self, steps_done: int, steps_total: int) -> None:
        now = time.monotonic()
        if now - self.reported < REPORT_EVERY_S:
            return
        if steps_done > self.steps_reported:
            self.rates.append((now - self.reported) / (steps_done - self.steps_reported))
        self.reported, self.steps_reported = now, steps_done
        rate = self.rates[-1] if self.rates else math.nan
        forecast = f"{1e3 * rate:.3f} ms a step, {rate * (steps_total - steps_done):.0f} s left"
        print(f"{now - self.began:.0f} s: {steps_done / steps_total:.1%}, {forecast}", flush=True)

    def on_finish(self, key: str, collector: Collector, reason: str | None = None) -> None:
        run, place = self.runs[key]
        record = make_record(run.config, run.task.digest, collector, reason)
        self.store.write(record)
        name = f"{place.row}  {place.config.rounds.assign}  {place.method}  seed {place.config.run.seed}"
        print(f"{time.monotonic() - self.began:.0f} s  {name}  {record.evals.loss[-1]}", flush=True)

    def on_divergence(self, key: str, reason: str, collector: Collector) -> None:
        self.on_finish(key, collector, reason or "for no stated reason")

    def keep_unfinished(self, key: str, collector: Collector) -> None:
        run, _ = self.runs[key]
        record = make_record(run.config, run.task.digest, collector)
        folder = self.store.folder.with_name(f"{self.store.folder.name}-unfinished")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{key}.json").write_text(json.dumps({**msgspec.to_builtins(record), "verdict": "unfinished"}))


def places_of(spec: str, settings: dict[str, object], scale: str) -> list[Place]:
    name, seeds, languages = [*spec.split("@"), "", ""][:3]
    places = grid(find_study(name), scale=scale, seeds=1, settings=settings | ({"languages": languages} if languages else {}))
    chosen = [int(seed) for seed in seeds.split(",")] if seeds else [0]
    return [replace(p, seed=s, config=replace(p.config, run=replace(p.config.run, seed=s))) for s in chosen for p in places]


def planned(specs: Sequence[str], settings: dict[str, object], scale: str, tasks: Tasks) -> Runs:
    runs: Runs = {}
    for spec in specs:
        for place in places_of(spec, settings, scale):
            task, config = tasks.build_once(place.config)
            key = digest(config, task.digest)
            runs.setdefault(key, (PlannedRun(key, task, config), replace(place, config=config)))
    return runs


def steps_of(run: PlannedRun) -> int:
    return total_steps(run.config)


def carry_out(runs: Sequence[PlannedRun], keeper: Keeper, device: torch.device, until: float) -> bool:
    """Whether all runs were finished in time."""
    # the longest chains of rounds first: they decide when everything ends
    runs = sorted(runs, key=lambda run: -max(make_member(0, run).chains.values()))
    keeper.steps_reported = 0
    with host_work_first(device):
        fleet = Fleet(runs, keeper, device, lambda: time.monotonic() > until)
        try:
            fleet.run()
        except StopRequested:
            for member in fleet.running:
                keeper.keep_unfinished(member.planned_run.key, member.collector)
            print(f"stopped: {len(fleet.running) + len(fleet.waiting)} runs are unfinished", flush=True)
            return False
    return True


def that_fit(runs: Sequence[PlannedRun], steps: float) -> list[PlannedRun]:
    picked = []
    for run in runs:
        if steps_of(run) <= steps:
            picked.append(run)
            steps -= steps_of(run)
    return picked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grids", nargs="+", metavar="GRID.toml[@SEEDS[@LANGUAGES]]")
    parser.add_argument("--data")
    parser.add_argument("--tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", default="paper")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--plan", action="store_true", help="only print how many runs and steps are missing")
    chosen = parser.parse_args()
    until = time.monotonic() + chosen.seconds
    device = pick_device(chosen.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    settings = {name: value for name in ("data", "tokenizer", "device") if (value := getattr(chosen, name)) is not None}
    tasks, store = Tasks(build_task), RunStore(chosen.out)
    at = chosen.grids.index("+") if "+" in chosen.grids else len(chosen.grids)
    certain, further = (planned(specs, settings, chosen.scale, tasks) for specs in (chosen.grids[:at], chosen.grids[at + 1 :]))
    further = {key: run for key, run in further.items() if key not in certain}
    first, second = ([run for key, (run, _) in group.items() if store.read(key) is None] for group in (certain, further))
    for runs in (first, second):
        print(f"{len(runs)} runs are missing: {sum(map(steps_of, runs)):,} steps", flush=True)
    if chosen.plan:
        return
    keeper = Keeper({**further, **certain}, store)
    in_time = carry_out(first, keeper, device, until) if first else True
    second = that_fit(second, SAFETY * (until - time.monotonic()) / keeper.seconds_per_step) if in_time else []
    if second:
        carry_out(second, keeper, device, until)


if __name__ == "__main__":
    main()
