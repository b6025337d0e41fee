"""How long the outer step takes on the CPU, beside torch's own SGD at its best, and the largest temporary it makes.

    python benchmarks/outer_step.py [--models 14.5M 124M] [--repeats 15] [--json FILE]

All contenders work in turn on the same parameters, momenta and pseudo-gradients, so that noise on the machine meets all of them
alike; medians count. Before every step, outside the timing, each block's pseudo-gradient is made anew with a drawn cosine to the
momentum, so that kept, damped and turned blocks all occur. A pass is one read or one write of a model-sized vector: SGD needs 5
(θ, m and Δ read, θ and m written), HeLoCo 7 (Δ and m once more, for the sums), and GB/s = passes × 4 bytes × parameters / time.
"× best SGD" compares medians; "× within rounds" is the median of the rounds' own ratios, which a busy machine disturbs less.
"""

import argparse
import json
import os
import statistics
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim import SGD

from heloco.outer import MLA, HeLoCo
from heloco.outer.heloco import heloco_step
from heloco.outer.kernels import native

LR, MU = 0.7, 0.9
Shapes = list[tuple[int, ...]]


def gpt_shapes(width: int, layers: int, vocabulary: int, context: int, *, tied: bool) -> Shapes:
    """The blocks of a GPT with biases and fused qkv, in the order of its parameters."""
    norm: Shapes = [(width,), (width,)]
    attention: Shapes = [(3 * width, width), (3 * width,), (width, width), (width,)]
    mlp: Shapes = [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    head: Shapes = [] if tied else [(vocabulary, width)]
    return [(vocabulary, width), (context, width), *(norm + attention + norm + mlp) * layers, *norm, *head]


MODELS = {
    "14.5M": gpt_shapes(128, 8, 50257, 128, tied=False),
    "124M": gpt_shapes(768, 12, 50257, 1024, tied=True),
}


def plain_step(parameters: list[Tensor], momenta: list[Tensor]) -> None:
    """The equations as they stand, block by block with temporaries."""
    with torch.no_grad():
        for p, m in zip(parameters, momenta, strict=True):
            assert p.grad is not None
            theta, momentum = heloco_step(p, m, p.grad, 1.0, lr=LR, momentum=MU)
            p.copy_(theta)
            m.copy_(momentum)


class Contender(NamedTuple):
    name: str
    passes: int | None
    step: Callable[[], object]


def sharing(optimizer: torch.optim.Optimizer, parameters: list[Tensor], momenta: list[Tensor]) -> Callable[[], object]:
    """The optimizer's step over the momenta that all contenders share."""
    for p, m in zip(parameters, momenta, strict=True):
        optimizer.state[p]["momentum_buffer"] = m
    return optimizer.step


def contenders(parameters: list[Tensor], momenta: list[Tensor]) -> tuple[list[Contender], HeLoCo]:
    heloco = HeLoCo(parameters, lr=LR, momentum=MU)
    ways: dict[str, dict[str, Any]] = {"fused": {"fused": True}, "foreach": {"foreach": True}, "single": {"foreach": False}}
    rivals = [
        Contender(f"SGD {way}", 5, sharing(SGD(parameters, LR, MU, nesterov=True, **kw), parameters, momenta))
        for way, kw in ways.items()
    ]
    rivals.append(Contender("MLA", 7, sharing(MLA(parameters, lr=LR, momentum=MU), parameters, momenta)))
    rivals.append(Contender("HeLoCo", 7, sharing(heloco, parameters, momenta)))
    rivals.append(Contender("HeLoCo, plain version", None, lambda: plain_step(parameters, momenta)))
    return rivals, heloco


class Arrivals:
    """Fresh pseudo-gradients: each block at a drawn cosine in [−0.4, 0.6] and a drawn length relative to its momentum."""

    def __init__(self, parameters: list[Tensor], momenta: list[Tensor], seed: int) -> None:
        self.parameters, self.momenta = parameters, momenta
        self.generator = torch.Generator().manual_seed(seed)
        self.noise = torch.randn(max(m.numel() for m in momenta) + (1 << 20), generator=self.generator)
        for p, m in zip(parameters, momenta, strict=True):
            p.data.normal_(0, 0.02, generator=self.generator)
            m.normal_(0, 1e-3, generator=self.generator)
            p.grad = torch.zeros_like(p)

    def draw(self) -> None:
        """Each block's noise is cut from one long strip at a drawn place, so that the momentum knows nothing of it."""
        draws = torch.rand(len(self.momenta), 3, generator=self.generator).tolist()
        for p, m, (x, y, z) in zip(self.parameters, self.momenta, draws, strict=True):
            m.mul_(1e-3 * m.numel() ** 0.5 / float(m.norm()))  # as long as ever, whichever contender went before
            c, ratio = x - 0.4, 10 ** (2 * y - 1)
            noise = self.noise[(start := int(z * (1 << 20))) : start + m.numel()].view_as(m)
            assert p.grad is not None
            torch.mul(m, c * ratio, out=p.grad).add_(noise, alpha=(1 - c * c) ** 0.5 * ratio * 1e-3)


@contextmanager
def silenced() -> Iterator[None]:
    """Standard error thrown away, also what C++ writes there: torch's profiler announces itself."""
    stderr_copy, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)
        os.close(nowhere)


def largest_temporary(step: Callable[[], object]) -> int:
    """Bytes of the largest tensor that torch allocates in a step, or of all that Python and numpy do if that is more."""
    with silenced(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    largest = max((event.nbytes() for event in events if event.name() == "[memory]"), default=0)
    tracemalloc.start()
    step()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return int(max(largest, peak))


def timed(rivals: list[Contender], draw: Callable[[], None], repeats: int) -> Iterator[tuple[str, float]]:
    for repeat in range(repeats + 1):
        turn = repeat % len(rivals)
        for contender in rivals[turn:] + rivals[:turn]:
            draw()
            start = time.perf_counter()
            contender.step()
            elapsed = time.perf_counter() - start
            if repeat:  # the first round warms up
                yield contender.name, elapsed


def measure(shapes: Shapes, repeats: int, seed: int) -> dict[str, Any]:
    parameters: list[Tensor] = [torch.nn.Parameter(torch.empty(shape)) for shape in shapes]
    momenta = [torch.empty(shape) for shape in shapes]
    arrivals = Arrivals(parameters, momenta, seed)
    rivals, heloco = contenders(parameters, momenta)
    times: dict[str, list[float]] = {contender.name: [] for contender in rivals}
    cases: Counter[str] = Counter()
    for name, elapsed in timed(rivals, arrivals.draw, repeats):
        times[name].append(elapsed)
        if name == "HeLoCo":
            cases.update(outcome.case for outcome in heloco.outcomes)

    count = sum(p.numel() for p in parameters)
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min((name for name in medians if name.startswith("SGD")), key=medians.__getitem__)
    rows = [
        {
            "name": c.name,
            "ms": 1e3 * medians[c.name],
            "quickest_ms": 1e3 * min(times[c.name]),
            "ratio": medians[c.name] / medians[best],
            "ratio_within_rounds": statistics.median(x / y for x, y in zip(times[c.name], times[best], strict=True)),
            "gigabytes_per_s": None if c.passes is None else c.passes * 4e-9 * count / medians[c.name],
            "largest_temporary_bytes": largest_temporary(c.step),
        }
        for c in rivals
    ]
    largest = max(p.numel() * p.element_size() for p in parameters)
    return {"parameters": count, "blocks": len(shapes), "largest_block_bytes": largest, "cases": dict(cases), "rows": rows}


def table(name: str, result: dict[str, Any]) -> Table:
    cases = ", ".join(f"{count} {case}" for case, count in sorted(result["cases"].items()))
    title = f"{name}: {result['parameters']:,} parameters in {result['blocks']} blocks ({cases})"
    out = Table("rule", title=title, title_justify="left")
    for heading in ("median ms", "quickest ms", "× best SGD", "× within rounds", "GB/s", "largest temporary, MB"):
        out.add_column(heading, justify="right")
    for row in result["rows"]:
        speed = "" if row["gigabytes_per_s"] is None else f"{row['gigabytes_per_s']:.1f}"
        ratios = f"{row['ratio']:.2f}", f"{row['ratio_within_rounds']:.2f}"
        temporary = f"{row['largest_temporary_bytes'] / 1e6:.2f}"
        out.add_row(row["name"], f"{row['ms']:.1f}", f"{row['quickest_ms']:.1f}", *ratios, speed, temporary)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, help="torch's own choice unless given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)

    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, compiled kernels: {native.available}")
    results = {}
    for name in arguments.models:
        results[name] = measure(MODELS[name], arguments.repeats, arguments.seed)
        console.print(table(name, results[name]))
    if arguments.json:
        setting = {"torch": torch.__version__, "threads": torch.get_num_threads(), "compiled": native.available}
        arguments.json.write_text(json.dumps({**setting, "repeats": arguments.repeats, "models": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
