"""Time per arrival of a real run on loopback: receive + journal + correct + step + reply, beside what the bytes alone cost.

    python benchmarks/arrival.py [--models 15m 124m] [--links https ray] [--arrivals 15] [--out FILE.json]

The synchronizer runs in a process of its own. A machine hands a pseudo-gradient in, has it acknowledged, and gets the next round
with the model it starts from; no training in between. Beside it, in the same run: a copy of the same bytes in memory both ways,
the same outer step, and the same bytes written to the same disk with fsync. Medians.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heloco.methods import METHODS
from heloco.run import RunConfig, resolve, with_fields
from heloco.run.disk import write_all
from heloco.run.tensors import Layout, pieces
from heloco.task.gpt import TinyGPT, preset

MODELS = {"1m": "1m", "15m": "paper", "124m": "124m", "1b": "124m"}


def blocks_of(name: str) -> dict[str, Tensor]:
    size = {"width": 1792, "layers": 24, "heads": 28} if name == "1b" else {}
    with torch.device("meta"):
        model = TinyGPT(preset(MODELS[name], **size))
    if name == "1b":  # zeros that nobody touches take no memory here
        return {f"parameter.{i}": torch.zeros(p.shape) for i, p in enumerate(model.parameters())}
    numbers = torch.Generator().manual_seed(0)
    return {f"parameter.{i}": torch.randn(p.shape, generator=numbers) * 0.02 for i, p in enumerate(model.parameters())}


def config(workers: int) -> RunConfig:
    values = {
        "task": "external",
        "paces": [1.0] * workers,
        "arrivals": 1_000_000,
        "checkpoint_every": 0,
        "device": "cpu",
        "beat_s": 5.0,
    }
    return resolve(with_fields(RunConfig(), {**values, "journal_gb": 0.0}))


def median(work: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


# ---- what the bytes alone cost


def floor(blocks: dict[str, Tensor], folder: Path, repeats: int) -> dict[str, float]:
    parameters = [torch.nn.Parameter(t.clone()) for t in blocks.values()]
    outer = METHODS["heloco-ramp"].build(parameters, workers=2)
    delta = [torch.randn_like(p) * 1e-3 for p in parameters]
    whole = torch.cat([d.view(-1) for d in delta])
    target = torch.empty_like(whole)
    numbers = itertools.count()

    def written() -> None:  # to a new file each time, as a journal does
        with (folder / f"floor-{next(numbers)}").open("wb", buffering=0) as file:
            write_all(file, memoryview(whole.numpy()).cast("B"))
            os.fsync(file.fileno())

    found = {
        "copies_s": 2 * median(lambda: target.copy_(whole), repeats),
        "outer_step_s": median(lambda: outer.step(weight=0.5, pseudo_gradients=delta), repeats),
        "write_and_fsync_s": median(written, repeats),
    }
    for path in folder.glob("floor-*"):
        path.unlink()
    return {**found, "sum_s": sum(found.values())}


# ---- the real thing


def serve(folder: str, workers: int, told: Any) -> None:
    from heloco.engine.cluster.host import Door, Host, recipe_of

    host = Host(recipe_of(config(workers), Path(folder), door=Door("127.0.0.1", 0)))
    told.send((host.address, host.token, os.getpid()))
    told.recv()
    host.close()


Measure = Callable[[Callable[[], Any], int], dict[str, Any]]
"""(a new link, the synchronizer's process) -> numbers"""


def over_https(folder: Path, measure: Measure, workers: int = 2) -> dict[str, Any]:
    from heloco.engine.cluster.gateway.client import HttpsLink

    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(str(folder / "run"), workers, theirs))
    process.start()
    address, token, pid = ours.recv()
    try:
        return measure(lambda: HttpsLink(address, token), pid)
    finally:
        ours.send("over")
        process.join()


def over_ray(folder: Path, measure: Measure, workers: int = 2) -> dict[str, Any]:
    from heloco.engine.cluster.host import recipe_of
    from heloco.engine.cluster.on_ray import RayEngine, RayLink

    engine = RayEngine(recipe_of(config(workers), folder / "run"), workers=0)
    try:
        return measure(lambda: RayLink(name=engine.name), engine.pid)
    finally:
        engine.close()


LINKS = {"https": over_https, "ray": over_ray}


def measured(link: Any, pid: int, blocks: dict[str, Tensor], arrivals: int) -> dict[str, Any]:
    layout = Layout.of(blocks)
    answer = link.join("bench", returning=None, pace_s=1.0, layout=layout)
    machine = answer["machine"]
    link.send_model(machine, layout, blocks, [f"block {i}" for i in range(len(blocks))])
    answer = link.join("bench", returning=machine, pace_s=1.0, layout=layout)
    contribution = Layout.from_json(answer["contribution"])
    small = len(blocks) < 200
    delta = {
        name.replace("parameter", "pseudo_gradient"): torch.randn_like(t) * 1e-3 if small else torch.zeros_like(t)
        for name, t in blocks.items()
    }
    handed = link.next_round(machine, 5.0)
    times: dict[str, list[float]] = {"hand_in_s": [], "next_round_s": [], "fetch_s": [], "arrival_s": []}
    for _ in range(arrivals):
        link.beat(machine, 0, 1.0)
        key = (handed["worker"], handed["round"], handed["version"])
        report = {"loss": 1.0, "last_loss": 1.0, "samples": 1, "units": 1}
        marks = [time.perf_counter()]
        link.hand_in(machine, key, contribution, delta, report)
        marks.append(time.perf_counter())
        handed = link.next_round(machine, 5.0)
        marks.append(time.perf_counter())
        link.fetch(machine, (handed["worker"], handed["round"], handed["version"]), layout)
        marks.append(time.perf_counter())
        for name, a, b in zip(times, marks, marks[1:], strict=False):
            times[name].append(b - a)
        times["arrival_s"].append(marks[-1] - marks[0])
    peak = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    link.leave(machine, "over")
    link.close()
    size = sum(len(piece) for piece in pieces(layout, blocks))
    return {
        **{name: statistics.median(found) for name, found in times.items()},
        "peak_x_model": int(peak.split()[1]) * 1024 / size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["15m", "124m"])
    parser.add_argument("--links", nargs="+", choices=tuple(LINKS), default=list(LINKS))
    parser.add_argument("--arrivals", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--out", type=Path, help="write the numbers here")
    given = parser.parse_args()
    results: list[dict[str, Any]] = []
    print("model   link   hand in     round     fetch   arrival     floor  ratio   memory")
    for name in given.models:
        blocks = blocks_of(name)
        for kind in given.links:
            folder = Path(tempfile.mkdtemp(dir=given.folder))
            try:
                least = floor(blocks, folder, given.arrivals) if name != "1b" else {"sum_s": math.nan}
                found = LINKS[kind](folder, lambda new, pid, b=blocks: measured(new(), pid, b, given.arrivals))  # type: ignore[misc]
                least_again = floor(blocks, folder, given.arrivals) if name != "1b" else least
            finally:
                shutil.rmtree(folder)
            bottom = statistics.mean((least["sum_s"], least_again["sum_s"]))
            ratio = found["arrival_s"] / bottom
            results.append({"model": name, "link": kind, **found, "floor": least, "ratio": ratio})
            shown = " ".join(f"{found[n] * 1e3:7.1f}ms" for n in ("hand_in_s", "next_round_s", "fetch_s", "arrival_s"))
            print(f"{name:>6} {kind:>6} {shown} {bottom * 1e3:7.1f}ms {ratio:6.2f} {found['peak_x_model']:6.2f} ×", flush=True)
    if given.out:
        given.out.write_text(
            json.dumps({"results": results, "python": sys.version.split()[0], "torch": torch.__version__}, indent=1)
        )


if __name__ == "__main__":
    main()
