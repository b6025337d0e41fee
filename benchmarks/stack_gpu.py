"""One inner step of the paper's model, ms per model step, on a GPU: the stack beside the best plain loop for one model.

    PYTHONPATH=src python benchmarks/stack_gpu.py [--width 48] [--optimizer muon] [--keep-state] [--out FILE.json]

Plain loop: the model's own forward and loss compiled, fused AdamW, the whole step recorded as one CUDA graph. Stack: what
`heloco study` runs. Both in this process, TF32, 2 × 128 tokens a step, tokens drawn by Zipf's law (about as many
different ones in a round as text has). Also: the time of an evaluation, and where the time of a step goes.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heloco.corpus.prepare import Corpus, Source
from heloco.corpus.sharding import split
from heloco.inner import InnerOptions
from heloco.inner.stacked import Job, StackedInner
from heloco.synchronizer import Round
from heloco.task.gpt import preset
from heloco.task.language import LanguageTask

STEPS = 80


def zipf_task(sources: int = 5, tokens: int = 1_000_000) -> LanguageTask:
    model = preset("paper")
    draw = np.random.default_rng(0)
    weights = 1 / np.arange(1, model.vocab_size + 1)

    def text(count: int) -> Any:
        return draw.choice(model.vocab_size, count, p=weights / weights.sum()).astype(np.uint16)

    zipf_sources = tuple(Source(f"zipf-{i}", text(tokens), text(20_000), tokens, 80_000, 1, 1) for i in range(sources))
    corpus = Corpus(zipf_sources, "none", model.vocab_size, 0, "zipf")
    shards = split(corpus, scheme="source", context=model.context)
    return LanguageTask(corpus, shards, model, context=model.context, seed=0, eval_windows=128)


def jobs_of(task: LanguageTask, options: InnerOptions, count: int) -> list[Job]:
    start = [p.detach().cuda() for p in task.build_model().parameters()]
    windows = STEPS * options.windows_per_step
    spans = [((i * windows, windows),) for i in range(count)]
    return [Job(Round(i, 0, 0, i % 5, spans[i], STEPS, 0, 0.0, start), task, options) for i in range(count)]


def milliseconds(work: Callable[[], object], repeats: int = 5) -> float:
    """Median time of device work, by events."""
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def measure_stack(task: LanguageTask, options: InnerOptions, width: int) -> tuple[dict[str, Any], StackedInner]:
    inner, jobs = StackedInner(task, device="cuda", width=width), jobs_of(task, options, width)
    began = time.perf_counter()
    inner.run(jobs)
    torch.cuda.synchronize()
    first_s = time.perf_counter() - began
    torch.cuda.reset_peak_memory_stats()
    [stack] = inner.stacks
    data = [job.batches() for job in jobs]

    def steps() -> None:
        stack.at.zero_()
        stack.begin(STEPS)
        stack.wait()

    stack.load(jobs, data)
    in_graph = milliseconds(steps) / STEPS / width

    def whole() -> None:
        inner.run(jobs)

    with_loading = milliseconds(whole) / STEPS / width
    numbers = {
        "width": width,
        "ms_per_model_step": in_graph,
        "ms_per_model_step_with_loading": with_loading,
        "first_run_s": first_s,
        "memory_gb": torch.cuda.max_memory_allocated() / 1e9,
    }
    return numbers, inner


def measure_plain(task: LanguageTask, options: InnerOptions) -> float:
    """One model alone: compiled forward and backward, fused AdamW, one CUDA graph."""
    model = task.build_model().cuda()
    loss_of = torch.compile(lambda batch: task.loss(model, batch))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(2e-4, device="cuda"), weight_decay=0.01, fused=True,
                                  capturable=True)  # fmt: skip
    data = jobs_of(task, options, 1)[0].batches().view(STEPS, 2, -1).cuda()
    at = torch.zeros(1, dtype=torch.int64, device="cuda")

    def step() -> None:
        loss = loss_of(data.index_select(0, at)[0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        at.add_(1).remainder_(STEPS)

    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def steps() -> None:
        for _ in range(STEPS):
            graph.replay()

    steps()
    return milliseconds(steps) / STEPS


def profile(inner: StackedInner, steps: int = 10) -> list[dict[str, Any]]:
    """Kernels by time, ms per model step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    [stack] = inner.stacks
    stack.at.zero_()
    with watch(activities=[ProfilerActivity.CUDA]) as watched:
        stack.begin(steps)
        torch.cuda.synchronize()
    rows = sorted(watched.key_averages(), key=lambda row: -row.device_time_total)
    each = 1 / 1000 / steps / stack.size
    return [{"kernel": r.key[:70], "calls": r.count // steps, "ms": r.device_time_total * each} for r in rows[:20]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--keep-state", action="store_true")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("This benchmark measures a GPU, and there is none here.", file=sys.stderr)
        return 2
    torch.set_float32_matmul_precision("high")
    task = zipf_task()
    options = InnerOptions(batch_size=2, schedule_steps=4800, inner_optimizer=chosen.optimizer, keep_state=chosen.keep_state)
    numbers, inner = measure_stack(task, options, chosen.width)
    print(json.dumps(numbers), flush=True)
    for row in profile(inner):
        print(f"{row['ms']:.4f} ms  {row['calls']:4d} ×  {row['kernel']}")
    numbers["profile"] = profile(inner)
    model = task.build_model().cuda()
    task.evaluate(model)
    numbers["evaluation_ms"] = milliseconds(lambda: task.evaluate(model))
    numbers["plain_loop_ms_per_step"] = measure_plain(task, options)
    numbers["stack_beats_plain_loop_by"] = numbers["plain_loop_ms_per_step"] / numbers["ms_per_model_step"]
    numbers |= {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "command": " ".join(sys.argv)}
    print(json.dumps({k: v for k, v in numbers.items() if k != "profile"}, indent=1))
    if chosen.out:
        chosen.out.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
