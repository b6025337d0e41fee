"""Rounds for a stack, the same rounds alone, and a language task of sizes that the GPU's kernels are written for."""

import torch

from heloco.corpus import prepare, split
from heloco.inner import InnerOptions, SequentialInner
from heloco.inner.stacked import Job
from heloco.synchronizer import Contribution, Round
from heloco.task import Task
from heloco.task.gpt import preset
from heloco.task.language import LanguageTask

# A larger ε than usual: some gradients are zero but for rounding (a key's bias, a bias before BatchNorm), and AdamW would blow
# the rounding up to whole steps.
OPTIONS = InnerOptions(batch_size=2, lr=3e-3, lr_min=1e-4, schedule_steps=40, weight_decay=0.1, adam_eps=1e-4)


def jobs_of(task: Task, options: InnerOptions, steps: list[int], start: int = 0) -> list[Job]:
    """One round per entry of `steps`, from different parameters, on different shards, at different places of the schedule."""
    jobs = []
    for i, inner_steps in enumerate(steps):
        model = task.build_model()
        draw = torch.Generator().manual_seed(start + i)
        parameters = [p.detach() + 0.01 * torch.randn(p.shape, generator=draw, dtype=p.dtype) for p in model.parameters()]
        count = inner_steps * options.windows_per_step
        spans = ((7 * i, 1), (7 * i + 3, count - 1)) if count > 1 else ((7 * i, count),)
        worker_round = Round(i, 0, 0, i % len(task.shards), spans, inner_steps, 5 * i, 3.0 * i, parameters, list(model.buffers()))
        jobs.append(Job(worker_round, task, options))
    return jobs


def alone(job: Job) -> Contribution:
    return SequentialInner(job.task, job.options, seed=0).run([job.round])[0]


def kernel_sized() -> LanguageTask:
    """In float32, of sizes that the GPU's kernels are written for."""
    corpus = prepare("builtin", languages=["auren", "thelis", "vesnar"])
    model = preset("1m", width=32, layers=2, heads=2, context=16, vocab_size=257)
    return LanguageTask(corpus, split(corpus, scheme="source", context=16), model, context=16, seed=0, eval_windows=2)
