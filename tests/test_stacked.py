"""A round in a stack gives what it gives alone: the stacked inner loop against the sequential one, in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from heloco.inner import InnerOptions, SequentialInner
from heloco.inner.stack import Stack
from heloco.inner.stacked import Job, StackedInner
from heloco.inner.stacked_loss import GPTLoss, VmapLoss, stacked_loss
from heloco.synchronizer import Contribution, Round
from heloco.task import Task
from heloco.task.corpus import prepare, split
from heloco.task.datasets import DatasetTask
from heloco.task.gpt import preset
from heloco.task.images import ImagesTask
from heloco.task.language import LanguageTask

# A larger ε than usual: some gradients are zero but for rounding (a key's bias, a bias before BatchNorm), and AdamW would blow
# the rounding up to whole steps.
OPTIONS = InnerOptions(batch_size=2, lr=3e-3, lr_min=1e-4, schedule_steps=40, weight_decay=0.1, adam_eps=1e-4)


class DoubleLanguage(LanguageTask):
    def build_model(self) -> nn.Module:
        return super().build_model().double()


class DoubleImages(ImagesTask):
    def build_model(self) -> nn.Module:
        return super().build_model().double()

    def batch(self, shard: int, positions: Any) -> Any:
        images, labels = super().batch(shard, positions)
        return images.double(), labels


def language(seed: int = 0, tied: bool = False) -> LanguageTask:
    corpus = prepare("builtin", languages=["auren", "thelis", "vesnar"])
    model = preset("1m", width=16, layers=2, heads=2, context=8, vocab_size=257, tied=tied)
    shards = split(corpus, how="source", context=8, seed=seed)
    return DoubleLanguage(corpus, shards, model, context=8, seed=seed, eval_windows=2)


def images(seed: int = 0) -> ImagesTask:
    return DoubleImages(seed=seed, images=40, val_images=4)


def own(seed: int = 0) -> DatasetTask:
    draw = torch.Generator().manual_seed(seed)
    data = [{"x": torch.randn(3, generator=draw).double(), "y": torch.randn(1, generator=draw).double()} for _ in range(30)]
    torch.default_generator.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean()

    return DatasetTask(model, loss, {"a": data[:10], "b": data[10:20], "c": data[20:]}, seed=seed)


def jobs_of(task: Task, options: InnerOptions, steps: list[int], start: int = 0) -> list[Job]:
    """One round per entry of `steps`, from different parameters, on different shards, at different places of the schedule."""
    jobs = []
    for i, inner_steps in enumerate(steps):
        model = task.build_model()
        draw = torch.Generator().manual_seed(start + i)
        parameters = [p.detach() + 0.01 * torch.randn(p.shape, generator=draw, dtype=p.dtype) for p in model.parameters()]
        count = inner_steps * options.windows_per_step
        spans = ((7 * i, 1), (7 * i + 3, count - 1)) if count > 1 else ((7 * i, count),)
        handed = Round(i, 0, 0, i % len(task.shards), spans, inner_steps, 5 * i, 3.0 * i, parameters, list(model.buffers()))
        jobs.append(Job(handed, task, options))
    return jobs


def alone(job: Job) -> Contribution:
    return SequentialInner(job.task, job.options, seed=0).run([job.round])[0]


def assert_same(stacked: Contribution, sequential: Contribution) -> None:
    assert (stacked.worker, stacked.index, stacked.version) == (sequential.worker, sequential.index, sequential.version)
    assert (stacked.samples, stacked.units) == (sequential.samples, sequential.units)
    assert stacked.loss == pytest.approx(sequential.loss, rel=1e-6)  # the sequential loop sums its losses in float32
    assert stacked.last_loss == pytest.approx(sequential.last_loss, rel=1e-6)
    for ours, theirs in zip(stacked.pseudo_gradient, sequential.pseudo_gradient, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-12)
    for ours, theirs in zip(stacked.buffers, sequential.buffers, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [language, images, own])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clip": 0.05},
        {"accumulate": 3},
        {"warmup": 4, "lr_position": "run"},
        {"beta1": 0.5, "beta2": 0.9, "weight_decay": 0.0},
    ],
    ids=str,
)
def test_a_round_in_a_stack_gives_what_it_gives_alone(make: Callable[[], Task], changes: dict[str, Any]) -> None:
    task = make()
    options = InnerOptions(**{**vars(OPTIONS), **changes})
    jobs = jobs_of(task, options, [3, 3, 3])
    for stacked, job in zip(StackedInner(task).run(jobs), jobs, strict=True):
        assert_same(stacked, alone(job))


def test_rounds_of_different_length_learning_rate_and_run_share_a_stack() -> None:
    slow = InnerOptions(**{**vars(OPTIONS), "lr": 1e-4, "schedule_steps": 9})
    jobs = [*jobs_of(language(0), OPTIONS, [4, 1, 2]), *jobs_of(language(1), slow, [3, 4], start=9)]
    assert len({job.kind for job in jobs}) == 1
    for stacked, job in zip(StackedInner(jobs[0].task).run(jobs), jobs, strict=True):
        assert_same(stacked, alone(job))


def test_rounds_that_cannot_share_a_stack_are_run_apart_and_come_back_in_order() -> None:
    large = InnerOptions(**{**vars(OPTIONS), "batch_size": 3})
    task = language()
    jobs = [job for pair in zip(jobs_of(task, OPTIONS, [2, 1]), jobs_of(task, large, [2, 1]), strict=True) for job in pair]
    for stacked, job in zip(StackedInner(task).run(jobs), jobs, strict=True):
        assert_same(stacked, alone(job))


def test_a_narrow_stack_gives_the_same() -> None:
    task = language()
    jobs = jobs_of(task, OPTIONS, [2, 3, 1, 3, 2])
    for narrow, wide in zip(StackedInner(task, width=2).run(jobs), StackedInner(task).run(jobs), strict=True):
        assert_same(narrow, wide)


def test_a_stack_is_used_again_for_other_rounds() -> None:
    task, inner = language(), StackedInner(language())
    for start in (0, 50):
        jobs = jobs_of(task, OPTIONS, [2, 2], start=start)
        for stacked, job in zip(inner.run(jobs), jobs, strict=True):
            assert_same(stacked, alone(job))


def test_the_optimizers_state_stays_with_the_worker() -> None:
    task, options = own(), InnerOptions(**{**vars(OPTIONS), "keep_state": True})
    jobs = jobs_of(task, options, [3, 2])
    first = StackedInner(task).run(jobs)
    sequential = [alone(job) for job in jobs]
    for ours, theirs in zip(first, sequential, strict=True):
        assert ours.memory is not None and theirs.memory is not None and ours.memory.keys() == theirs.memory.keys()
    again = jobs_of(task, options, [2, 2], start=4)
    for job, ours, theirs in zip(again, first, sequential, strict=True):
        job.round.memory = theirs.memory
        expected = alone(job)
        job.round.memory = ours.memory
        assert_same(StackedInner(task).run([job])[0], expected)


@pytest.mark.parametrize("tied", [False, True])
def test_the_generic_and_the_tuned_path_agree(tied: bool) -> None:
    task = language(tied=tied)
    model = task.build_model()
    tuned, generic = stacked_loss(task, model), VmapLoss(task, model)
    assert isinstance(tuned, GPTLoss)
    jobs = jobs_of(task, OPTIONS, [1, 1, 1])
    parameters = [torch.stack(of_block).requires_grad_() for of_block in zip(*(j.round.parameters for j in jobs), strict=True)]
    batch = torch.stack([job.batches() for job in jobs])
    found = []
    for loss in (tuned, generic):
        losses = loss(parameters, [], batch)
        found.append([losses, *torch.autograd.grad(losses.sum(), parameters)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)


def test_with_the_usual_epsilon_too() -> None:
    task, options = own(), InnerOptions(**{**vars(OPTIONS), "adam_eps": 1e-8})
    jobs = jobs_of(task, options, [3, 3])
    for stacked, job in zip(StackedInner(task).run(jobs), jobs, strict=True):
        assert_same(stacked, alone(job))


def test_a_stack_never_writes_to_what_a_round_was_handed() -> None:
    task = language()
    jobs = jobs_of(task, OPTIONS, [2])
    before = [p.clone() for p in jobs[0].round.parameters]
    StackedInner(task).run(jobs)
    assert all(map(torch.equal, before, jobs[0].round.parameters))


def test_too_little_memory_halves_the_stack_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    task = language()
    jobs = jobs_of(task, OPTIONS, [2, 3, 1, 3, 2])
    sizes = []

    def allocate(self: Stack, *settings: Any) -> None:
        sizes.append(settings[3])
        if settings[3] > 2:
            raise torch.OutOfMemoryError("the device is full")
        whole(self, *settings)

    whole = Stack.__init__
    monkeypatch.setattr(Stack, "__init__", allocate)
    inner = StackedInner(task, width=8)
    for stacked, job in zip(inner.run(jobs), jobs, strict=True):
        assert_same(stacked, alone(job))
    assert inner.width == 2 and sizes == [5, 2, 1]
    monkeypatch.setattr(Stack, "__init__", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
    with pytest.raises(torch.OutOfMemoryError):
        StackedInner(task).run(jobs)


def test_only_the_rows_that_a_round_reads_ride_in_the_stack() -> None:
    task = language()
    jobs = jobs_of(task, OPTIONS, [1, 2])
    inner = StackedInner(task)
    for stacked, job in zip(inner.run(jobs), jobs, strict=True):
        assert_same(stacked, alone(job))
        read = torch.zeros(257, dtype=torch.bool)
        read[job.batches()[:, :-1].unique()] = True
        start, moved = job.round.parameters[0], stacked.pseudo_gradient[0]
        decay = 1.0
        for lr in job.learning_rates():
            decay *= 1 - lr * OPTIONS.weight_decay
        torch.testing.assert_close(moved[~read], (start * (1 - decay))[~read], rtol=1e-12, atol=0)
        assert read.any() and not read.all()
