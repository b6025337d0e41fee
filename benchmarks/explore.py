"""Runs several study files as one fleet, with seeds and languages of one's choice: a stack stays full only if it has many runs.

    PYTHONPATH=src python benchmarks/explore.py GRID.toml[@SEEDS[@LANGUAGES]] … [+ GRID.toml …] --data CORPUS --tokenizer FILE --out RUNS

SEEDS are numbers with commas between them (0 where left out), LANGUAGES an order of the sources. RUNS is a folder of kept runs
like results/runs: runs that are there already are not made again, and every run is kept when it ends. With `--seconds`, grids
after a `+` are begun only as far as the time suffices, to judge by those before; at the end of the time, the evaluations of
unfinished runs are kept in RUNS-unfinished.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import torch

from heloco.engine.build import build_task, pick_device
from heloco.engine.fleet import Fleet, Planned, _ahead_of_the_stacks, _member
from heloco.engine.local import Collector, StopRequested
from heloco.study.grid import Place, digest, grid
from heloco.study.plan import _Tasks
from heloco.study.records import RunStore, make_record
from heloco.study.spec import load_study


class Keeper:
    """Keeps each run when it ends, and prints its loss."""

    def __init__(self, runs: dict[str, tuple[Planned, Place]], store: RunStore) -> None:
        self.runs, self.store = runs, store
        self.began = self.told = time.monotonic()
        self._before = (self.began, 0)
        self._rates: list[float] = []

    def progressed(self, steps_done: int, steps_total: int) -> None:
        now = time.monotonic()
        if now - self.told > 20:
            self.told = now
            then, steps = self._before
            if steps_done > steps:
                self._rates.append((now - then) / (steps_done - steps))
            self._before = (now, steps_done)
            rate = self._rates[-1] if self._rates else 0.0
            left = rate * (steps_total - steps_done)
            print(f"{now - self.began:.0f} s: {steps_done / steps_total:.1%}, {1e3 * rate:.3f} ms a step, {left:.0f} s left", flush=True)

    @property
    def seconds_per_step(self) -> float:
        return median(self._rates) if self._rates else 1e-3

    def finished(self, key: str, collected: Collector, reason: str = "") -> None:
        run, place = self.runs[key]
        record = make_record(run.config, run.task.digest, collected, reason)
        self.store.write(record)
        name = f"{place.row}  {place.config.workers.assign}  {place.method}  seed {place.config.run.seed}"
        print(f"{time.monotonic() - self.began:.0f} s  {name}  {record.evals.loss[-1]}", flush=True)

    def unfinished(self, key: str, collected: Collector) -> None:
        run, _ = self.runs[key]
        record = make_record(run.config, run.task.digest, collected)
        folder = self.store.folder.with_name(self.store.folder.name + "-unfinished")
        folder.mkdir(exist_ok=True)
        (folder / f"{key}.json").write_text(json.dumps({**asdict(record), "verdict": "unfinished"}))

    def diverged(self, key: str, reason: str, collected: Collector) -> None:
        self.finished(key, collected, reason or "for no stated reason")


def places_of(spec: str, settings: dict[str, object], scale: str) -> list[Place]:
    name, seeds, languages = ([*spec.split("@"), "", ""])[:3]
    given = settings | ({"languages": languages} if languages else {})
    places = grid(load_study(name), scale=scale, seeds=1, settings=given)
    chosen = [int(seed) for seed in seeds.split(",")] if seeds else [0]
    return [replace(p, seed=s, config=replace(p.config, run=replace(p.config.run, seed=s))) for s in chosen for p in places]


def planned(specs: Sequence[str], settings: dict[str, object], scale: str, tasks: _Tasks) -> dict[str, tuple[Planned, Place]]:
    found = dict[str, tuple[Planned, Place]]()
    for spec in specs:
        for place in places_of(spec, settings, scale):
            task, config = tasks.of(place.config)
            key = digest(config, task.digest)
            found.setdefault(key, (Planned(key, task, config), replace(place, config=config)))
    return found


def steps_of(run: Planned) -> int:
    return run.config.run.arrivals * run.config.workers.inner_steps


def carry_out(runs: Sequence[Planned], keeper: Keeper, device: torch.device, until: float) -> bool:
    """Whether all were finished by then."""
    # long chains of rounds first: they decide when all ends
    runs = sorted(runs, key=lambda run: -max(_member(0, run).chains.values()))
    with _ahead_of_the_stacks(device):
        fleet = Fleet(runs, keeper, device, lambda: time.monotonic() > until)
        print(f"{len(runs)} runs, {sum(map(steps_of, runs)):,} steps, two stacks {fleet._wanted_width} wide", flush=True)
        try:
            fleet.run()
        except StopRequested:
            for member in fleet.running:
                keeper.unfinished(member.planned.key, member.collected)
            print(f"stopped: {len(fleet.running) + len(fleet.waiting)} runs are unfinished", flush=True)
            return False
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grids", nargs="+", metavar="GRID.toml[@SEEDS[@LANGUAGES]]")
    parser.add_argument("--data")
    parser.add_argument("--tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", default="paper")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--plan", action="store_true", help="only say how many runs and steps are missing")
    chosen = parser.parse_args(arguments)
    began = time.monotonic()
    device = pick_device(chosen.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    settings = {name: getattr(chosen, name) for name in ("data", "tokenizer", "device") if getattr(chosen, name) is not None}
    tasks, store = _Tasks(build_task), RunStore(chosen.out)
    specs = [*chosen.grids, *["+"] * (1 - chosen.grids.count("+"))]
    at = specs.index("+")
    certain, further = (planned(some, settings, chosen.scale, tasks) for some in (specs[:at], specs[at + 1 :]))
    keeper = Keeper({**further, **certain}, store)
    first, then = ([run for key, (run, _) in some.items() if store.read(key) is None] for some in (certain, further))
    then = [run for run in then if run.key not in certain]
    for runs in (first, then):
        print(f"{len(runs)} runs are missing: {sum(map(steps_of, runs)):,} steps; {time.monotonic() - began:.0f} s so far")
    if chosen.plan:
        return
    until = began + chosen.seconds
    if carry_out(first, keeper, device, until) and then:
        left = 0.9 * (until - time.monotonic()) / keeper.seconds_per_step if first else float("inf")
        picked = []
        for run in then:
            if steps_of(run) <= left:
                picked.append(run)
                left -= steps_of(run)
        if picked:
            carry_out(picked, keeper, device, until)
    if device.type == "cuda":
        print(f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB at most")
    print(f"{time.monotonic() - began:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
