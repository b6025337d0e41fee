"""Many simulations over one stack: each gives what it gives alone, whatever else runs beside it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from heloco.corpus import prepare, split
from heloco.engine.fleet import WAVES, Fleet, PlannedRun, run_fleet
from heloco.engine.local import Collector, LocalRun, StopRequested
from heloco.engine.schedule import chains, schedule
from heloco.errors import UserError
from heloco.inner.stacked import Job, StackedInner
from heloco.run import RunConfig, resolve, with_fields
from heloco.task import Task
from heloco.task.gpt import preset
from heloco.task.images import ImagesTask
from heloco.task.language import LanguageTask

CPU = torch.device("cpu")


class DoubleLanguage(LanguageTask):
    def build_model(self) -> nn.Module:
        return super().build_model().double()


def language(seed: int = 0) -> LanguageTask:
    corpus = prepare("builtin", languages=["auren", "thelis", "vesnar"])
    model = preset("1m", width=16, layers=1, heads=2, context=8, vocab_size=257)
    return DoubleLanguage(
        corpus, split(corpus, scheme="source", context=8, seed=seed), model, context=8, seed=seed, eval_windows=4
    )


def config(**settings: Any) -> RunConfig:
    # a larger ε than usual: gradients that are zero but for rounding (a key's bias) would become whole steps
    usual = {"paces": [1, 2, 5], "inner_steps": 3, "arrivals": 12, "eval_every": 4, "batch_size": 2, "adam_eps": 1e-4}
    return resolve(with_fields(RunConfig(), usual | settings))


@dataclass
class RecordingWatcher:
    collectors: dict[str, Collector] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    progress: list[tuple[int, int]] = field(default_factory=list)

    def on_progress(self, steps_done: int, steps_total: int) -> None:
        self.progress.append((steps_done, steps_total))

    def on_finish(self, key: str, collector: Collector) -> None:
        self.collectors[key] = collector

    def on_divergence(self, key: str, reason: str, collector: Collector) -> None:  # noqa: ARG002
        self.lost[key] = reason


def alone(task: Task, settings: RunConfig) -> Collector:
    collector = Collector()
    LocalRun(task, settings, observers=[collector]).run()
    return collector


def assert_same(fleet: Collector, single: Collector) -> None:
    books = [
        "arrival",
        "outer_step",
        "worker",
        "round",
        "version",
        "staleness",
        "weight",
        "shard",
        "spans",
        "inner_steps",
        "time_s",
    ]
    for ours, theirs in zip(fleet.tape, single.tape, strict=True):
        assert [getattr(ours, name) for name in books] == [getattr(theirs, name) for name in books]
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5)
        assert (ours.blocks and ours.blocks.case) == (theirs.blocks and theirs.blocks.case)
    for ours, theirs in zip(fleet.evals, single.evals, strict=True):
        assert (ours.arrival, ours.time_s, ours.units) == (theirs.arrival, theirs.time_s, theirs.units)
        assert ours.mean["loss"] == pytest.approx(theirs.mean["loss"], rel=1e-6)


def test_a_setting_that_a_stack_cannot_honour_is_refused() -> None:
    planned = [PlannedRun("fine", language(0), config()), PlannedRun("compiled", language(0), config(compile=True))]
    with pytest.raises(UserError, match=r"^compile is set, but a study computes .*: leave it out\.$"):
        run_fleet(planned, RecordingWatcher(), device=CPU)


def test_each_run_of_a_fleet_gives_what_it_gives_alone() -> None:
    first, second, pictures = language(0), language(1), ImagesTask(seed=0, images=30, val_images=4)
    planned = [
        PlannedRun("heloco", first, config(method="heloco-ramp")),
        PlannedRun("mla of another seed", second, config(method="mla", seed=1)),
        PlannedRun("flexible", first, config(method="heloco", assign="flexible")),
        PlannedRun("sync", first, config(method="sync-nesterov")),
        PlannedRun("DyLU", second, config(method="async-nesterov", steps="dylu", inner_steps=5, seed=1)),
        PlannedRun("clipped: another stack", first, config(method="mla", clip=0.1)),
        PlannedRun("zeroed", first, config(method="heloco-ramp", drop="zero", drop_above=1)),
        PlannedRun("skipped", first, config(method="heloco-ramp", drop="skip", drop_above=1)),
        PlannedRun("images: another model", pictures, config(method="mla", task="images", arrivals=4, paces=[1, 2, 2, 3, 4])),
    ]
    watcher = RecordingWatcher()
    run_fleet(planned, watcher, device=CPU)
    assert watcher.collectors.keys() == {each.key for each in planned} and not watcher.lost
    for each in planned[:-1]:
        assert_same(watcher.collectors[each.key], alone(each.task, each.config))
    assert [line.arrival for line in watcher.collectors[planned[-1].key].tape] == [1, 2, 3, 4]


@pytest.fixture(params=[1, 2], autouse=True)
def waves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One wave under way at a time, as on a CPU, or two, as on a GPU."""
    monkeypatch.setitem(WAVES, "cpu", request.param)


def test_progress_counts_every_step_once() -> None:
    watcher = RecordingWatcher()
    task = language()
    run_fleet([PlannedRun(m, task, config(method=m)) for m in ("mla", "heloco")], watcher, device=CPU)
    step_counts = [steps for steps, _ in watcher.progress]
    assert {total for _, total in watcher.progress} == {2 * 12 * 3}
    assert step_counts == sorted(step_counts) and step_counts[-1] == 2 * 12 * 3


@pytest.fixture
def begun_jobs(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """All jobs that stacks begin, in their order."""
    jobs_begun: list[Job] = []
    original = StackedInner.begin

    def begin(self: StackedInner, jobs: Sequence[Job]) -> Any:
        jobs_begun.extend(jobs)
        return original(self, jobs)

    monkeypatch.setattr(StackedInner, "begin", begin)
    return jobs_begun


def test_no_round_is_run_that_arrives_after_the_end(begun_jobs: list[Job]) -> None:
    run_fleet([PlannedRun("one", language(), config(paces=[1, 1, 9]))], RecordingWatcher(), device=CPU)
    assert sum(job.round.inner_steps for job in begun_jobs) == 12 * 3


def test_runs_that_cannot_share_a_stack_follow_each_other(begun_jobs: list[Job]) -> None:
    task, watcher = language(), RecordingWatcher()
    planned = [PlannedRun(f"run {i}", task, config(method="mla", seed=i, clip=[0.1, 1.0][i % 2])) for i in range(4)]
    run_fleet(planned, watcher, device=CPU)
    kinds = [job.kind.clip for job in begun_jobs]
    assert kinds == sorted(kinds) and set(kinds) == {0.1, 1.0}
    assert watcher.collectors.keys() == {each.key for each in planned}


def test_a_run_that_diverges_does_not_hold_up_the_others() -> None:
    task = language()
    wild = config(method="mla", lr=1e30, weight_decay=1e30, max_refusals=3)
    planned = [PlannedRun("wild", task, wild), PlannedRun("tame", task, config(method="mla"))]
    watcher = RecordingWatcher()
    run_fleet(planned, watcher, device=CPU)
    assert list(watcher.collectors) == ["tame"] and "diverges" in watcher.lost["wild"]
    assert_same(watcher.collectors["tame"], alone(task, planned[1].config))


def test_a_stop_keeps_what_was_finished() -> None:
    watcher = RecordingWatcher()
    task = language()
    planned = [PlannedRun(f"run {i}", task, config(method="mla", arrivals=6)) for i in range(12)]
    with pytest.raises(StopRequested):
        run_fleet(planned, watcher, device=CPU, is_stopping=lambda: len(watcher.collectors) >= 2)
    assert 2 <= len(watcher.collectors) < 12


def test_runs_that_do_not_fit_the_memory_wait_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("heloco.engine.fleet.free_memory", lambda _: 1.0)
    task, watcher = language(), RecordingWatcher()
    planned = [PlannedRun(f"run {i}", task, config(method="mla", arrivals=6, seed=0)) for i in range(3)]
    counts: list[int] = []

    def look() -> bool:
        counts.append(len(fleet.running))
        return False

    fleet = Fleet(planned, watcher, CPU, is_stopping=look)
    fleet.run()
    assert list(watcher.collectors) == ["run 0", "run 1", "run 2"] and max(counts) == 1
    for each in planned:
        assert_same(watcher.collectors[each.key], alone(task, each.config))


def brute_force_chains(paces: list[float], steps: list[int], arrivals: int, barrier: bool) -> dict[tuple[int, int], int]:
    """The same from the times alone: a round starts when it can, and waits for every arrival up to then."""
    events = list(schedule(paces_s=paces, inner_steps=steps, arrivals=arrivals, barrier=barrier))
    starts = {(a.worker, a.round): time - a.inner_steps * paces[a.worker] for time, a in events}
    lengths: dict[tuple[int, int], int] = {}
    for time, a in reversed(events):
        later = [lengths[(b.worker, b.round)] for _, b in events if starts[(b.worker, b.round)] >= time - 1e-9]
        lengths[(a.worker, a.round)] = a.inner_steps + max(later, default=0)
    return lengths


@pytest.mark.parametrize("barrier", [False, True])
def test_chains(barrier: bool) -> None:
    draw = random.Random(3)
    for _ in range(20):
        workers = draw.randint(1, 5)
        paces = [float(draw.choice([1, 1, 2, 3, 6, 15])) for _ in range(workers)]
        steps = [draw.choice([2, 4])] * workers if barrier else [draw.randint(1, 4) for _ in range(workers)]
        arrivals = workers * draw.randint(1, 6)
        events = schedule(paces_s=paces, inner_steps=steps, arrivals=arrivals, barrier=barrier)
        assert chains(events) == brute_force_chains(paces, steps, arrivals, barrier)
