"""A round in a stack gives what it gives alone: the stacked inner loop against the sequential one, in float64."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from heloco.corpus import prepare, split
from heloco.errors import UserError
from heloco.inner import InnerOptions
from heloco.inner.adamw import CHUNK, AdamW, adamw_factors, settings_of, without_gradient
from heloco.inner.stack import Stack
from heloco.inner.stacked import Job, StackedInner
from heloco.inner.stacked_loss import GPTLoss, VmapLoss, stacked_loss
from heloco.synchronizer import Contribution
from heloco.task import Task
from heloco.task.datasets import DatasetTask
from heloco.task.gpt import preset
from heloco.task.images import ImagesTask
from heloco.task.language import LanguageTask
from support.stacked_rounds import OPTIONS, alone, jobs_of, kernel_sized


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
    shards = split(corpus, scheme="source", context=8, seed=seed)
    return DoubleLanguage(corpus, shards, model, context=8, seed=seed, eval_windows=2)


def images(seed: int = 0) -> ImagesTask:
    return DoubleImages(seed=seed, images=40, val_images=4)


def dataset_task(seed: int = 0) -> DatasetTask:
    draw = torch.Generator().manual_seed(seed)
    data = [{"x": torch.randn(3, generator=draw).double(), "y": torch.randn(1, generator=draw).double()} for _ in range(30)]
    torch.default_generator.manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean()

    return DatasetTask(model, loss, {"a": data[:10], "b": data[10:20], "c": data[20:]}, seed=seed)


def assert_same(stacked: Contribution, sequential: Contribution) -> None:
    assert (stacked.worker, stacked.index, stacked.version) == (sequential.worker, sequential.index, sequential.version)
    assert (stacked.samples, stacked.units) == (sequential.samples, sequential.units)
    assert stacked.loss == pytest.approx(sequential.loss, rel=1e-6)  # the sequential loop sums its losses in float32
    assert stacked.last_loss == pytest.approx(sequential.last_loss, rel=1e-6)
    for ours, theirs in zip(stacked.pseudo_gradient, sequential.pseudo_gradient, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-12)
    for ours, theirs in zip(stacked.buffers, sequential.buffers, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [language, images, dataset_task])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clip": 0.05},
        {"accumulate": 3},
        {"warmup": 4, "lr_position": "run"},
        {"beta1": 0.5, "beta2": 0.9, "weight_decay": 0.0},
        {"inner_optimizer": "sgd"},
        {"inner_optimizer": "sgd", "inner_momentum": 0.0, "clip": 0.05},
        {"inner_optimizer": "muon"},
        {"inner_optimizer": "muon", "inner_momentum": 0.5, "warmup": 4},
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


@pytest.mark.parametrize("accumulate", [1, 2])
def test_buffers_of_a_shorter_round_stand_still_when_it_is_over(accumulate: int) -> None:
    task, options = images(), replace(OPTIONS, accumulate=accumulate)
    jobs = jobs_of(task, options, [4, 1, 2])
    contributions = StackedInner(task).run(jobs)
    for stacked, job in zip(contributions, jobs, strict=True):
        assert_same(stacked, alone(job))
    counts = [int(b) for c in contributions for b in c.buffers if not b.is_floating_point()]  # of batches, by BatchNorm
    assert counts == [accumulate * job.round.inner_steps for job in jobs for _ in range(2)]


def test_rounds_with_other_settings_of_adamw_share_a_stack() -> None:
    others = [{}, {"beta1": 0.5, "beta2": 0.9}, {"adam_eps": 1e-2, "weight_decay": 0.0}]
    every = [InnerOptions(**{**vars(OPTIONS), "keep_state": True, **changes}) for changes in others]
    task = language()
    jobs = [replace(job, options=options) for job, options in zip(jobs_of(task, every[0], [2, 3, 2]), every, strict=True)]
    assert len({job.kind for job in jobs}) == 1
    for _ in range(2):
        contributions = StackedInner(task).run(jobs)
        for stacked, job in zip(contributions, jobs, strict=True):
            expected = alone(job)
            assert_same(stacked, expected)
            job.round.memory = expected.memory


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


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "sgd"])
@pytest.mark.parametrize("make", [dataset_task, language])
def test_the_optimizers_state_stays_with_the_worker(make: Callable[[], Task], optimizer: str) -> None:
    momentum = 0.95 if optimizer == "muon" else None
    changes = {"keep_state": True, "inner_optimizer": optimizer, "inner_momentum": momentum}
    task, options = make(), InnerOptions(**{**vars(OPTIONS), **changes})
    jobs = jobs_of(task, options, [3, 2])
    first = StackedInner(task).run(jobs)
    sequential = [alone(job) for job in jobs]
    for ours, theirs in zip(first, sequential, strict=True):
        assert ours.memory is not None and theirs.memory is not None and ours.memory.keys() == theirs.memory.keys()
    later_jobs = jobs_of(task, options, [2, 2], start=4)
    for job, ours, theirs in zip(later_jobs, first, sequential, strict=True):
        job.round.memory = theirs.memory
        expected = alone(job)
        job.round.memory = ours.memory
        contribution = StackedInner(task).run([job])[0]
        assert_same(contribution, expected)
        assert contribution.memory is not None and expected.memory is not None
        for name, tensor in expected.memory.items():
            torch.testing.assert_close(contribution.memory[name].to(tensor.dtype), tensor, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("tied", [False, True])
def test_the_generic_and_the_tuned_path_agree(tied: bool) -> None:
    task = language(tied=tied)
    model = task.build_model()
    tuned, generic = stacked_loss(task, model), VmapLoss(task, model)
    assert isinstance(tuned, GPTLoss)
    jobs = jobs_of(task, OPTIONS, [1, 1, 1])
    parameters = [
        torch.stack(block_starts).requires_grad_() for block_starts in zip(*(j.round.parameters for j in jobs), strict=True)
    ]
    batch = torch.stack([job.batches() for job in jobs])
    results = []
    for loss in (tuned, generic):
        losses = loss(parameters, [], batch)
        results.append([losses, *torch.autograd.grad(losses.sum(), parameters)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)


def test_with_the_usual_epsilon_too() -> None:
    task, options = dataset_task(), InnerOptions(**{**vars(OPTIONS), "adam_eps": 1e-8})
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


def test_with_rounded_products_a_stack_stays_close(fused: None) -> None:  # noqa: ARG001
    """The kernels of head and attention, on a GPU where there is one: 11 bits in each product, a few steps, so about 1 %."""
    task, options = kernel_sized(), InnerOptions(batch_size=2, lr=3e-3, schedule_steps=40, adam_eps=1e-4)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    jobs = jobs_of(task, options, [3, 1, 2])
    exact = [Job(replace(j.round, parameters=[p.double() for p in j.round.parameters]), in_float64(task), options) for j in jobs]
    for job in jobs:
        job.round.parameters = [p.to(device) for p in job.round.parameters]
    inner = StackedInner(task, device=device, width=4)
    for _ in range(2 if device == "cuda" else 1):  # a second time from a graph that was recorded before
        for stacked, job in zip(inner.run(jobs), exact, strict=True):
            single = alone(job)
            assert stacked.loss == pytest.approx(single.loss, rel=1e-3)
            for ours, theirs in zip(stacked.pseudo_gradient, single.pseudo_gradient, strict=True):
                off = (ours.cpu().double() - theirs).norm() / theirs.norm()
                assert off < 2e-2


def in_float64(task: LanguageTask) -> LanguageTask:
    return DoubleLanguage(task.corpus, task.token_shards, task.model_config, context=task.context, seed=0, eval_windows=2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("changes", [{}, {"keep_state": True, "clip": 0.05, "accumulate": 2}], ids=str)
def test_on_a_gpu_in_float64(changes: dict[str, Any]) -> None:
    task, options = language(), InnerOptions(**{**vars(OPTIONS), **changes})
    inner = StackedInner(task, device="cuda", width=4)
    for start, steps in ((0, [3, 1, 2]), (9, [2, 3, 3, 1])):
        jobs = jobs_of(task, options, steps, start=start)
        expected = [alone(job) for job in jobs]
        for job in jobs:
            job.round.parameters = [p.cuda() for p in job.round.parameters]
        for stacked, single in zip(inner.run(jobs), expected, strict=True):
            stacked.pseudo_gradient = [t.cpu() for t in stacked.pseudo_gradient]
            assert_same(stacked, single)


@pytest.mark.parametrize("width", [16, 15], ids=["multiples of four", "odd sizes"])
def test_adamw_in_one_launch(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = torch.Generator().manual_seed(0)
    shapes = [(3, width), (3, 5, width), (3, CHUNK + width), (3, 4)]
    blocks = [[torch.randn(shape, generator=draw) for shape in shapes] for _ in range(4)]
    blocks[2] = [v.square() for v in blocks[2]]
    exact = [[x.double() for x in group] for group in blocks]
    steps, lr, active = (
        torch.tensor([3.0, 7, 1]).double(),
        torch.tensor([1e-2, 3e-3, 1]).double(),
        torch.tensor([1.0, 1, 0]).double(),
    )
    settings = torch.tensor([settings_of(OPTIONS), [0.5, 0.9, 1e-3, 0.0], settings_of(OPTIONS)]).double().T
    factors = adamw_factors(steps, lr, active, settings)
    AdamW(*exact[:3]).move(exact[3], factors)
    monkeypatch.setattr("heloco.inner.adamw.serves", lambda _: True)
    ours = [[x.to(device) for x in group] for group in blocks]
    AdamW(*ours[:3]).move(ours[3], factors.to(device))
    for group, before, theirs in zip(ours[:3], blocks, exact, strict=False):
        for x, start, y in zip(group, before, theirs, strict=True):
            torch.testing.assert_close(x.cpu().double(), y, rtol=3e-6, atol=1e-6)
            assert torch.equal(x[2].cpu(), start[2])  # not active: it stays as it is


def test_rows_without_a_gradient_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = torch.Generator().manual_seed(0)
    p, m, v = (torch.randn(3, CHUNK - 5, generator=draw) for _ in range(3))
    v[1:] = v[1:].square()
    m[0], v[0] = 0, 0
    steps = torch.arange(1.0, 8).double()
    settings = torch.tensor(settings_of(OPTIONS)).double()[:, None].expand(-1, 7)
    factors = adamw_factors(steps, steps / 100, torch.ones(7).double(), settings)
    exact = without_gradient(p.double(), m.double(), v.double(), factors)
    monkeypatch.setattr("heloco.inner.adamw.serves", lambda _: True)
    kernel_results = without_gradient(p.to(device), m.to(device), v.to(device), factors.to(device))
    for ours, theirs in zip(kernel_results, exact, strict=True):
        torch.testing.assert_close(ours.cpu().double(), theirs, rtol=3e-6, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_a_full_gpu_halves_the_stack_and_goes_on() -> None:
    task, options = kernel_sized(), InnerOptions(batch_size=2, lr=3e-3, schedule_steps=40, adam_eps=1e-4)
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + 300_000_000
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    try:
        inner = StackedInner(task, device="cuda", width=1024)
        jobs = jobs_of(task, options, [2, 1])
        for job in jobs:
            job.round.parameters = [p.cuda() for p in job.round.parameters]
        narrow = inner.run(jobs)
        assert inner.width < 1024
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for ours, theirs in zip(narrow, StackedInner(task, device="cuda", width=2).run(jobs), strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-3)


def test_a_setting_that_a_stack_cannot_honour_is_refused() -> None:
    task = images()
    with pytest.raises(UserError, match="compile is set"):
        StackedInner(task).run(jobs_of(task, InnerOptions(compile=True), [1]))
