"""Runs that differ in the seed alone, where a model cannot be computed as a stack, or one of them diverges."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from heloco.engine.fleet import PlannedRun
from heloco.engine.local import Collector, LocalRun, StopRequested, describe
from heloco.engine.seed_runs import SeedRuns
from heloco.records.run_files import seed_folder
from heloco.run import RunConfig, RunFolder, resolve, with_fields
from heloco.task import Task
from support.inner_rounds import mlp, seeded, task_of, with_dropout

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
USUAL = {
    "assign": "flexible",
    "paces": [1, 1, 2, 5],
    "inner_steps": 3,
    "arrivals": 8,
    "eval_every": 4,
    "batch_size": 2,
    "lr": 3e-3,
    "device": "cpu",
}


class DataDecides(nn.Module):
    """Which way its data goes depends on the data: no stack can compute it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


def config(**settings: Any) -> RunConfig:
    return resolve(with_fields(RunConfig(), {**USUAL, **settings}))


def planned_runs(parent: Path, task: Task, *configs: RunConfig) -> list[PlannedRun]:
    """Runs with folders and a collector each, of the seeds 0, 1, …"""
    plans = []
    for seed, each in enumerate(configs):
        effective = replace(each, run=replace(each.run, seed=seed))
        folder = RunFolder.create(parent / seed_folder(seed), effective, describe(task, effective, task.build_model()))
        folder.start_writing()
        plans.append(PlannedRun(folder.path.name, task, effective, folder, [Collector()]))
    return plans


def close(plans: list[PlannedRun]) -> None:
    for each in plans:
        assert each.folder is not None
        each.folder.close()


def records(plan: PlannedRun) -> Collector:
    [collector] = plan.observers
    assert isinstance(collector, Collector)
    return collector


def alone(task: Task, settings: RunConfig) -> Collector:
    collector = Collector()
    LocalRun(task, settings, observers=[collector]).run()
    return collector


def test_seeds_of_a_model_that_no_stack_can_compute_go_on_one_after_the_other(tmp_path, capsys):
    task = task_of(seeded(DataDecides), torch.float64)
    plans = planned_runs(tmp_path, task, *[config()] * 3)
    runs = SeedRuns(plans, "stacked", CPU)
    runs.run()
    close(plans)
    assert runs.ends == {"seed-0": "", "seed-1": "", "seed-2": ""}
    for plan in plans:
        assert plan.folder is not None and plan.folder.facts().execution == "sequential"
        single = alone(task, plan.config)
        assert (records(plan).tape, records(plan).evals) == (single.tape, single.evals)
    assert capsys.readouterr().err.startswith("heloco: the seeds cannot be computed together (")


def test_a_run_that_diverges_does_not_hold_up_the_others(tmp_path):
    wild = config(lr=1e30, weight_decay=1e30, max_refusals=3)
    for execution in ("stacked", "sequential"):
        plans = planned_runs(tmp_path / execution, task_of(mlp()), config(), wild, config())
        runs = SeedRuns(plans, execution, CPU)
        runs.run()
        close(plans)
        assert (runs.ends["seed-0"], runs.ends["seed-2"]) == ("", "") and "diverges" in runs.ends["seed-1"]
        assert [len(records(plan).tape) for plan in (plans[0], plans[2])] == [8, 8]


def test_what_a_model_draws_follows_from_the_seed(tmp_path):
    tapes = []
    for attempt in ("first", "second"):
        plans = planned_runs(tmp_path / attempt, task_of(with_dropout()), config(), config())
        torch.rand(3)
        SeedRuns(plans, "stacked", CPU).run()
        close(plans)
        tapes.append([records(plan).tape for plan in plans])
    assert tapes[0] == tapes[1] and tapes[0][0] != tapes[0][1]


def test_a_stop_is_heeded_before_the_next_run_begins(tmp_path):
    plans = planned_runs(tmp_path, task_of(mlp()), config(), config())

    class StopsAtTheEnd:
        def on_arrival(self, record: Any) -> None:
            if record.arrival == 8:
                runs.request_stop()

        def on_evaluation(self, record: Any) -> None:
            pass

    plans[0] = replace(plans[0], observers=[*plans[0].observers, StopsAtTheEnd()])
    runs = SeedRuns(plans, "sequential", CPU)
    with pytest.raises(StopRequested):
        runs.run()
    close(plans)
    assert runs.ends == {"seed-0": ""} and not records(plans[1]).tape
