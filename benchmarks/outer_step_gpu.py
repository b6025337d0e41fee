"""How long the outer step takes on a GPU, beside torch's fused SGD and a plain copy of memory.

    PYTHONPATH=src python benchmarks/outer_step_gpu.py [--out FILE.json]

All in float32 over the blocks of a GPT. "Device" times are those of a CUDA graph of everything that a step launches, so that no
time of the host counts; before each, outside the timing, half a gigabyte is read, so that the caches hold nothing of the model.
"Eager" times are a call of `step()` as a program makes it, host and all. Medians count. A pass is one read or one write of a
model-sized vector: HeLoCo needs 7 of them (Δ and m for the sums; θ, m and Δ read again, θ and m written), SGD 5. GB/s counts
these 7 and nothing else, and the copy's counts its read and its write.
"""

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heloco.outer import HeLoCo, kernels
from heloco.task.gpt import PRESETS, GPTConfig, TinyGPT

LR, MU = 0.7, 0.9
MODELS = {
    "14.5M": PRESETS["paper"],
    "124M": PRESETS["124m"],
    "1.3B": GPTConfig(width=2048, layers=24, heads=16, context=2048, tied=True),
}
DEVICE = "cuda"


def median_ms(work: Callable[[], object], repeats: int, before: Callable[[], object]) -> float:
    """Time on the device from the first launch of `work` to the end of its last."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in events:
        before()  # long enough for the host to be done with the launches below before the device comes to them
        start.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in events)


def graph_ms(work: Callable[[], object], repeats: int, before: Callable[[], object]) -> float:
    """`median_ms` of a CUDA graph of `work`."""
    for _ in range(3):  # compiles, allocates
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    return median_ms(graph.replay, repeats, before)


def eager_ms(work: Callable[[], object], repeats: int) -> float:
    """Time that a caller waits until everything is done."""
    times = []
    for repeat in range(repeats + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if repeat >= 3:  # the first ones warm up
            times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def copy_gb_s(repeats: int) -> float:
    source = torch.ones(1 << 28, device=DEVICE)
    target = torch.empty_like(source)
    target.copy_(source)
    ms = median_ms(lambda: target.copy_(source), repeats, lambda: target.copy_(source))
    return 2 * source.nbytes / ms / 1e6


def model(config: GPTConfig) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters with pseudo-gradients, and momenta, of the sizes that training has them in."""
    with torch.device("meta"):
        shapes = [p.shape for p in TinyGPT(config).parameters()]
    parameters: list[Tensor] = [torch.nn.Parameter(0.02 * torch.randn(shape, device=DEVICE)) for shape in shapes]
    for p in parameters:
        p.grad = 1e-3 * torch.randn_like(p)
    return parameters, [1e-3 * torch.randn_like(p) for p in parameters]


def portable(step: Callable[[], object]) -> Callable[[], object]:
    """The step in torch operations, as where there is no Triton."""

    def work() -> None:
        chosen, kernels.on_gpu = kernels.on_gpu, lambda _: False
        try:
            step()
        finally:
            kernels.on_gpu = chosen

    return work


def deviation(optimizer: HeLoCo, parameters: list[Tensor], momenta: list[Tensor]) -> float:
    """The largest difference between a step of ours and one in torch operations, relative to the largest number moved by it."""
    before = [x.detach().clone() for x in parameters + momenta]
    results = []
    for step in (optimizer.step, portable(optimizer.step)):
        for x, old in zip(parameters + momenta, before, strict=True):
            x.data.copy_(old)
        step()
        results.append([x.detach().clone() for x in parameters + momenta])
    differences = [float((x - y).abs().max() / (x - old).abs().max()) for x, y, old in zip(*results, before, strict=True)]
    return max(differences)


def measure(name: str, config: GPTConfig, repeats: int) -> dict[str, Any]:
    from heloco.outer.kernels import gpu  # needs Triton

    parameters, momenta = model(config)
    count = sum(p.numel() for p in parameters)
    heloco = HeLoCo(parameters, lr=LR, momentum=MU)
    sgd = torch.optim.SGD(parameters, LR, MU, nesterov=True, fused=True)
    for optimizer in (heloco, sgd):
        for p, m in zip(parameters, momenta, strict=True):
            optimizer.state[p]["momentum_buffer"] = m
    row: dict[str, Any] = {"name": name, "parameters": count, "blocks": len(parameters)}
    if name == "14.5M":
        row["deviation_from_portable"] = deviation(heloco, parameters, momenta)
        row["eager_portable_ms"] = eager_ms(portable(heloco.step), 5)

    elsewhere = torch.ones(1 << 27, device=DEVICE)
    passes = gpu.BlockKernels([p.detach() for p in parameters], momenta, [p.grad for p in parameters if p.grad is not None])
    group = heloco.param_groups[0]
    table = passes.table([heloco.coefficients_of(group, 1.0)], [0] * len(parameters))
    copy = copy_gb_s(repeats)
    step = graph_ms(lambda: passes.launch(table), repeats, elsewhere.sum)
    sums = graph_ms(lambda: passes.decide(table), repeats, elsewhere.sum)
    fused = graph_ms(sgd.step, repeats, elsewhere.sum)
    speed = 7 * 4 * count / step / 1e6
    return row | {
        "copy_gb_s": copy,
        "step_ms": step,
        "of_which_statistics_ms": sums,
        "gb_s_counting_7": speed,
        "share_of_copy": speed / copy,
        "sgd_fused_ms": fused,
        "ratio_to_sgd": step / fused,
        "eager_step_ms": eager_ms(heloco.step, repeats),
        "eager_sgd_ms": eager_ms(sgd.step, repeats),
        "eager_lookahead_ms": eager_ms(heloco.lookahead, repeats),
    }


COLUMNS = {
    "name": "model",
    "blocks": "blocks",
    "copy_gb_s": "copy GB/s",
    "step_ms": "step ms",
    "of_which_statistics_ms": "its sums",
    "gb_s_counting_7": "GB/s of 7",
    "share_of_copy": "share",
    "sgd_fused_ms": "SGD ms",
    "ratio_to_sgd": "× SGD",
    "eager_step_ms": "eager ms",
    "eager_sgd_ms": "eager SGD",
    "eager_lookahead_ms": "look-ahead",
    "eager_portable_ms": "portable",
}


def line(cells: list[Any]) -> str:
    return " ".join(f"{cell:.3f}".rjust(10) if isinstance(cell, float) else str(cell).rjust(10) for cell in cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, help="write the numbers here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("This measures a CUDA GPU, and torch finds none here.", file=sys.stderr)
        return 2
    if kernels.gpu_kernels(torch.cuda.current_device()) is None:
        print("The GPU kernels need Triton: it is not installed, or cannot compile for this GPU.", file=sys.stderr)
        return 2

    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, medians of {arguments.repeats}")
    print(line(list(COLUMNS.values())))
    sizes = []
    for name in arguments.models:
        sizes.append(measure(name, MODELS[name], arguments.repeats))
        print(line([sizes[-1].get(key, "") for key in COLUMNS]), flush=True)
        torch.cuda.empty_cache()
    for size in sizes:
        if "deviation_from_portable" in size:
            print(f"{size['name']}: a step differs from one in torch operations by at most {size['deviation_from_portable']:.1e}")
    if arguments.out:
        setting = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "repeats": arguments.repeats}
        command = shlex.join(["python", *sys.argv])
        arguments.out.write_text(json.dumps({**setting, "command": command, "sizes": sizes}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
