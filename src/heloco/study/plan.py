"""From what was asked for to the runs that are missing, and through them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from heloco.engine.build import build_task as build_task_of
from heloco.engine.build import provenance_of
from heloco.engine.fleet import PlannedRun, run_fleet
from heloco.engine.local import Collector
from heloco.errors import UserError
from heloco.run import RunConfig
from heloco.study.grid import Place, digest, grid
from heloco.study.kept_runs import RunRecord, RunStore, make_record
from heloco.study.results import Results
from heloco.study.spec import Study
from heloco.task import Task

BuildTask = Callable[[RunConfig], tuple[Task, RunConfig]]
"""A function like `engine.build.build_task`, which returns the task, and the config with what only the data could tell."""


@dataclass(frozen=True)
class Plan:
    """The runs that a study needs, and the places of its grid that each of them fills."""

    study: Study
    scale: str
    places: list[Place]
    digests: list[str]
    """The digest of each place's run. Places with one digest share the run."""
    runs: dict[str, PlannedRun]
    """The runs by their digests. Those of the first seed come first."""

    @property
    def data(self) -> str:
        """The digest of the data (of the first seed's, where it differs)."""
        return next(iter(self.runs.values())).task.digest

    def places_of(self, name: str) -> list[Place]:
        """The places of the grid that the run with this digest fills."""
        return [place for place, digest in zip(self.places, self.digests, strict=True) if digest == name]

    def find_missing(self, store: RunStore) -> list[PlannedRun]:
        """The runs that `store` does not have yet, in the order of the plan."""
        return [run for name, run in self.runs.items() if store.read(name) is None]

    def results(self, store: RunStore) -> Results:
        """The filled grid; every run must be there."""
        records = {name: store.read(name) for name in self.runs}
        records_of_places = [(place, records[name]) for place, name in zip(self.places, self.digests, strict=True)]
        return Results(self.study, self.scale, [(place, record) for place, record in records_of_places if record is not None])


def make_plan(
    study: Study,
    *,
    scale: str = "paper",
    seeds: int | None = None,
    rows: Sequence[str] = (),
    methods: Sequence[str] = (),
    settings: Mapping[str, object] | None = None,
    build_task: BuildTask = build_task_of,
) -> Plan:
    """The study's grid, or the part of it with these rows and methods, over `settings` such as data and tokenizer."""
    tasks = Tasks(build_task)
    places, digests, runs = [], [], dict[str, PlannedRun]()
    for place in grid(study, scale=scale, seeds=seeds, rows=rows, methods=methods, settings=settings):
        task, config = tasks.build_once(place.config)
        _check_sources(study, place, task)
        name = digest(config, task.digest)
        places.append(replace(place, config=config))
        digests.append(name)
        runs.setdefault(name, PlannedRun(name, task, config))
    return Plan(study, scale, places, digests, runs)


class Tasks:
    """Builds each task once: runs with the same data, model and seed share it."""

    def __init__(self, build: BuildTask) -> None:
        self._build = build
        self._tasks: dict[str, tuple[Task, RunConfig]] = {}

    def build_once(self, config: RunConfig) -> tuple[Task, RunConfig]:
        """The task, and the config with what only the data could tell."""
        shards = None if config.input.split == "source" else len(config.rounds.paces)  # how many shards are dealt
        key = repr((config.input, config.model, config.run.seed, shards))
        if key not in self._tasks:
            self._tasks[key] = self._build(config)
        task, effective = self._tasks[key]
        return task, replace(config, input=effective.input, model=effective.model)


def _check_sources(study: Study, place: Place, task: Task) -> None:
    """Where a source is a shard, the row needs one per pace it names: fewer leave a worker none, more leave some unread."""
    names = [shard.name for shard in task.shards]
    if place.config.input.split != "source" or place.sources == len(names):
        return
    remedy = f"pick {place.sources} with --languages" if place.sources < len(names) else "add what is missing to --data"
    raise UserError(
        f"{study.name} needs {place.sources} sources (languages), a worker's each, but the data has {len(names)} "
        f"({', '.join(names)}): {remedy}."
    )


class Display(Protocol):
    """What shows how far a study is: a progress bar, for one."""

    def on_progress(self, steps_done: int, steps_total: int) -> None: ...
    def show_run(self, places: Sequence[Place], record: RunRecord) -> None: ...


@dataclass
class Silent:
    """A display that shows nothing."""

    def on_progress(self, steps_done: int, steps_total: int) -> None:
        pass

    def show_run(self, places: Sequence[Place], record: RunRecord) -> None:
        pass


@dataclass
class _Keeper:
    """The fleet's watcher: keeps each run the moment it ends, and passes on how far the whole study is."""

    plan: Plan
    store: RunStore
    display: Display
    device: torch.device

    def on_progress(self, steps_done: int, steps_total: int) -> None:
        self.display.on_progress(steps_done, steps_total)

    def on_finish(self, key: str, collector: Collector) -> None:
        self._keep(key, collector, None)

    def on_divergence(self, key: str, reason: str, collector: Collector) -> None:
        self._keep(key, collector, reason or "for no stated reason")

    def _keep(self, key: str, collector: Collector, reason: str | None) -> None:
        run = self.plan.runs[key]
        computed = provenance_of(self.device, run.config.inner)
        record = make_record(run.config, run.task.digest, computed, collector, reason)
        assert record.digest == key
        self.store.write(record)
        self.display.show_run(self.plan.places_of(key), record)


def carry_out(
    plan: Plan,
    store: RunStore,
    *,
    device: torch.device,
    display: Display | None = None,
    is_stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Makes the missing runs. They are made seed by seed: a person who stops early has whole tables of fewer seeds."""
    missing_runs = plan.find_missing(store)
    if missing_runs:
        keeper = _Keeper(plan, store, display or Silent(), device)
        run_fleet(missing_runs, keeper, device=device, is_stopping=is_stopping)
