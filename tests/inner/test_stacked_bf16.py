"""`precision = "bf16"` in a stack: as close to float32 as a round alone under autocast."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from heloco.inner.stacked import StackedInner
from heloco.inner.stacked_loss import VmapLoss
from heloco.synchronizer import Contribution
from heloco.task import Task
from heloco.task.attention import FusedAttention
from heloco.task.head import FusedCrossEntropy
from heloco.task.images import ImagesTask
from heloco.task.language import LanguageTask
from support.inner_rounds import mlp, task_of, with_norm
from support.stacked_rounds import OPTIONS, alone, jobs_of, kernel_sized


def kernel_sized_and_tied() -> LanguageTask:
    task = kernel_sized()
    model = replace(task.model_config, tied=True)
    return LanguageTask(task.corpus, task.token_shards, model, context=16, seed=0, eval_windows=2)


def shapes() -> ImagesTask:
    return ImagesTask(seed=0, images=40, val_images=4)


def distance(ours: Contribution, theirs: Contribution) -> float:
    """Between two pseudo-gradients, compared with the norm of the second."""
    pairs = list(zip(ours.pseudo_gradient, theirs.pseudo_gradient, strict=True))
    return float((sum((a - b).square().sum() for a, b in pairs) / sum(b.square().sum() for _, b in pairs)).sqrt())


@pytest.mark.parametrize(
    "make", [kernel_sized, kernel_sized_and_tied, shapes, lambda: task_of(mlp()), lambda: task_of(with_norm())]
)
@pytest.mark.parametrize(
    "changes",
    [{}, {"inner_optimizer": "muon", "keep_state": True, "accumulate": 2, "clip": 0.5}, {"inner_optimizer": "sgd"}],
    ids=str,
)
@pytest.mark.parametrize("is_tuned", [True, False], ids=["tuned", "generic"])
def test_bf16_in_a_stack_is_as_close_to_fp32_as_alone(
    make: Callable[[], Task], changes: dict[str, Any], is_tuned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both round what goes into a product to 8 bits, but not always the same sums: their errors are of one size, not equal."""
    if not is_tuned:
        monkeypatch.setattr("heloco.inner.stacked.stacked_loss", VmapLoss)
    task, options = make(), replace(OPTIONS, **changes)
    jobs = jobs_of(task, replace(options, precision="bf16"), [3, 1, 2])
    for stacked, job in zip(StackedInner(task).run(jobs), jobs, strict=True):
        single, exact = alone(job), alone(replace(job, options=options))
        assert stacked.loss == pytest.approx(single.loss, rel=2**-7) and stacked.loss != exact.loss
        assert 0 < distance(stacked, exact) < 4 * distance(single, exact)
        assert all(d.dtype is torch.float32 and d.isfinite().all() for d in stacked.pseudo_gradient)
        assert [b.dtype for b in stacked.buffers] == [b.dtype for b in single.buffers]
        assert {m.dtype for m in (stacked.memory or {}).values()} <= {torch.float32, torch.float64}


def test_bf16_in_a_stack_with_the_kernels(fused: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    served: list[str] = []
    for kernel in (FusedAttention, FusedCrossEntropy):
        monkeypatch.setattr(kernel, "forward", staticmethod(noting(kernel.forward, served, kernel.__name__)))
    torch.set_float32_matmul_precision("highest")  # of float32 alone
    task = kernel_sized()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    jobs = jobs_of(task, replace(OPTIONS, precision="bf16"), [2, 1])
    exact = [alone(replace(job, options=OPTIONS)) for job in jobs]
    for job in jobs:
        job.round.parameters = [p.to(device) for p in job.round.parameters]
    for stacked, single in zip(StackedInner(task, device=device, width=2).run(jobs), exact, strict=True):
        stacked.pseudo_gradient = [d.cpu() for d in stacked.pseudo_gradient]
        assert stacked.loss == pytest.approx(single.loss, rel=2**-7)
        assert 0 < distance(stacked, single) < 0.03
    assert set(served) == {"FusedAttention", "FusedCrossEntropy"}


def noting(function: Callable[..., Any], names: list[str], name: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        names.append(name)
        return function(*arguments)

    return call


def test_the_kernels_leave_the_generic_path_alone(fused: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    monkeypatch.setattr("heloco.inner.stacked.stacked_loss", VmapLoss)
    task, options = kernel_sized(), OPTIONS
    jobs = jobs_of(task, options, [2, 1])
    for stacked in StackedInner(task).run(jobs):
        assert all(d.isfinite().all() for d in stacked.pseudo_gradient)
