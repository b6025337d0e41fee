"""Time per arrival of a real run on loopback: receive + journal + correct + step + reply, beside what the bytes alone cost.

    python benchmarks/arrival.py [--models 15m 124m] [--links https ray] [--arrivals 15] [--out FILE.json]

The synchronizer runs in a process of its own. A machine hands a pseudo-gradient in, has it acknowledged, and gets the next round
with the model it starts from; no training in between. Beside it, in the same run: a copy of the same bytes in memory both ways,
the same outer step, and the same bytes written to the same disk with fsync ("floor"); and the same with what the link alone takes
for these bytes instead of the copies: TLS between two plain sockets, or Ray's store ("link"). Medians.
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
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import transport
from heloco.cluster.protocol.messages import ContributionReport
from heloco.disk import write_all
from heloco.methods import METHODS
from heloco.run import RunConfig, resolve, with_fields
from heloco.task.gpt import TinyGPT, preset
from heloco.wire.blocks import PARAMETER, PSEUDO_GRADIENT, name_blocks
from heloco.wire.layout import Layout, pieces

ARRIVALS_WATCHED = 6
MODELS = {"1m": "1m", "15m": "paper", "124m": "124m", "1b": "124m"}


def blocks_of(name: str) -> dict[str, Tensor]:
    size = {"width": 1792, "layers": 24, "heads": 28} if name == "1b" else {}
    with torch.device("meta"):
        model = TinyGPT(preset(MODELS[name], **size))
    if name == "1b":  # zeros that nobody touches take no memory here
        return name_blocks(PARAMETER, [torch.zeros(p.shape) for p in model.parameters()])
    numbers = torch.Generator().manual_seed(0)
    return name_blocks(PARAMETER, [torch.randn(p.shape, generator=numbers) * 0.02 for p in model.parameters()])


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

    def write_file() -> None:  # to a new file each time, as a journal does
        with (folder / f"floor-{next(numbers)}").open("wb", buffering=0) as file:
            write_all(file, memoryview(whole.numpy()).cast("B"))
            os.fsync(file.fileno())

    times = {
        "copies_s": 2 * median(lambda: target.copy_(whole), repeats),
        "outer_step_s": median(lambda: outer.step(weight=0.5, pseudo_gradients=delta), repeats),
        "write_and_fsync_s": median(write_file, repeats),
    }
    for path in folder.glob("floor-*"):
        path.unlink()
    return {**times, "sum_s": sum(times.values())}


NO_FLOOR = dict.fromkeys(("copies_s", "outer_step_s", "write_and_fsync_s", "sum_s"), math.nan)


# ---- the real thing


def serve(folder: str, workers: int, pipe: Any) -> None:
    from heloco.cluster.server.process import ListenConfig, RunHost, spec_of

    host = RunHost.open(spec_of(config(workers), Path(folder), listen=ListenConfig("127.0.0.1", 0)))
    pipe.send((host.address, host.token("worker"), os.getpid()))
    pipe.recv()
    host.close()


Measure = Callable[[Callable[[], Any], int], dict[str, Any]]
"""(a new link, the synchronizer's process) -> numbers"""


def over_https(folder: Path, measure: Measure, workers: int = 2) -> dict[str, Any]:
    from heloco.cluster.gateway.https_link import HttpsLink

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
    from heloco.cluster.ray.ray_link import RayLink
    from heloco.cluster.ray.supervisor import RaySupervisor
    from heloco.cluster.server.process import ListenConfig, spec_of

    spec = spec_of(config(workers), folder / "run", listen=ListenConfig("127.0.0.1", 0))
    with RaySupervisor(spec, workers=0) as supervisor:
        return measure(lambda: RayLink(name=supervisor.name), supervisor.pid)


LINKS = {"https": over_https, "ray": over_ray}
TRANSPORTS = {"https": transport.over_tls, "ray": transport.over_ray}


def read_memory(pid: int) -> dict[str, int]:
    """Memory of a process in bytes: its peak, and now its own memory, mapped files, and Ray's shared memory."""
    names = {"VmHWM": "peak", "RssAnon": "own", "RssFile": "files", "RssShmem": "shared"}
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = {line.partition(":")[0]: line.split() for line in lines}
    return {name: int(fields[field][1]) * 1024 for field, name in names.items()}


class Memory(threading.Thread):
    """What a process holds at most, looked at again and again: all of it as the kernel has it, what is its own, mapped files, and
    memory that it shares with others (Ray's object store). The parts' peaks need not be of the same moment."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.over = pid, threading.Event()
        self.peaks: dict[str, int] = {}
        self.start()

    def run(self) -> None:
        while not self.over.wait(0.002):
            self.look()

    def look(self) -> None:
        sizes = read_memory(self.pid)
        for what, size in (sizes | {"own_and_files": sizes["own"] + sizes["files"]}).items():
            self.peaks[what] = max(size, self.peaks.get(what, 0))

    def end(self) -> dict[str, int]:
        self.over.set()
        self.join()
        self.look()
        return self.peaks


def measured(link: Any, pid: int, blocks: dict[str, Tensor], arrivals: int) -> dict[str, Any]:
    layout = Layout.from_tensors(blocks)
    ticket = link.join("bench", returning=None, layout=layout).ticket
    link.send_model(ticket, layout, blocks, [f"block {i}" for i in range(len(blocks))])
    joined = link.join("bench", returning=ticket, layout=layout)
    ticket = joined.ticket
    contribution = Layout.from_json(joined.contribution_layout)
    small = len(blocks) < 200
    delta = {
        name.replace(PARAMETER, PSEUDO_GRADIENT): torch.randn_like(t) * 1e-3 if small else torch.zeros_like(t)
        for name, t in blocks.items()
    }
    answer = link.next_round(ticket, 5.0)
    times: dict[str, list[float]] = {"hand_in_s": [], "next_round_s": [], "fetch_s": [], "arrival_s": []}
    for number in range(arrivals + ARRIVALS_WATCHED):
        if number == arrivals:  # looking at the memory takes processor time: these arrivals are not timed
            memory = Memory(pid)
        link.beat(ticket, 0)
        marks = [time.perf_counter()]
        link.hand_in(ticket, answer.key, contribution, delta, ContributionReport(loss=1.0, last_loss=1.0, samples=1, units=1))
        marks.append(time.perf_counter())
        answer = link.next_round(ticket, 5.0)
        marks.append(time.perf_counter())
        link.fetch(ticket, answer.key, layout, answer.start_digest)
        marks.append(time.perf_counter())
        if number < arrivals:
            for name, a, b in zip(times, marks, marks[1:], strict=False):
                times[name].append(b - a)
            times["arrival_s"].append(marks[-1] - marks[0])
    peaks = memory.end()
    link.leave(ticket, "over")
    link.close()
    size = sum(len(piece) for piece in pieces(layout, blocks))
    return {
        **{name: statistics.median(seconds) for name, seconds in times.items()},
        **{f"{what}_x_model": peak / size for what, peak in peaks.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["15m", "124m"])
    parser.add_argument("--links", nargs="+", choices=tuple(LINKS), default=list(LINKS))
    parser.add_argument("--arrivals", type=int, default=15)
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--out", type=Path, help="write the numbers here")
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    columns = ("hand in", "round", "fetch", "arrival", "floor", "ratio", "link", "ratio")
    print(" " * 13 + "".join(f"{c:>7}" if c == "ratio" else f"{c:>9}" for c in columns) + "  memory × model")
    for name in arguments.models:
        blocks = blocks_of(name)
        for kind in arguments.links:
            results.append(row(name, kind, blocks, arguments.arrivals, arguments.folder))
            print(row_text(results[-1]), flush=True)
    if arguments.out:
        arguments.out.write_text(
            json.dumps({"results": results, "python": sys.version.split()[0], "torch": torch.__version__}, indent=1)
        )


def row(name: str, kind: str, blocks: dict[str, Tensor], arrivals: int, disk: Path | None) -> dict[str, Any]:
    """The floors are measured before and after: the disk has its moods."""
    size = 4 * sum(t.numel() for t in blocks.values())
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") > 12 * size

    def both(new: Callable[[], Any], pid: int) -> dict[str, Any]:
        numbers = measured(new(), pid, blocks, arrivals)
        return numbers | {"transport": TRANSPORTS[kind](size, arrivals)}

    folder = Path(tempfile.mkdtemp(dir=disk))
    try:
        before = floor(blocks, folder, arrivals) if room else NO_FLOOR
        measurement = LINKS[kind](folder, both)
        after = floor(blocks, folder, arrivals) if room else NO_FLOOR
    finally:
        shutil.rmtree(folder)
    least = {part: statistics.mean((before[part], after[part])) for part in before}
    with_link = sum(measurement["transport"].values()) + least["outer_step_s"] + least["write_and_fsync_s"]
    ratios = {"ratio": measurement["arrival_s"] / least["sum_s"], "ratio_with_link": measurement["arrival_s"] / with_link}
    return {"model": name, "link": kind, **measurement, "floor": least, "floor_with_link_s": with_link, **ratios}


def row_text(row: dict[str, Any]) -> str:
    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:7.1f}ms"

    memory = " ".join(f"{what} {row[f'{what}_x_model']:.2f}" for what in ("peak", "own", "files", "shared"))
    times = "".join(ms(row[what]) for what in ("hand_in_s", "next_round_s", "fetch_s", "arrival_s"))
    floors = f"{ms(row['floor']['sum_s'])}{row['ratio']:7.2f}{ms(row['floor_with_link_s'])}{row['ratio_with_link']:7.2f}"
    return f"{row['model']:>6} {row['link']:>6}{times}{floors}  {memory}"


if __name__ == "__main__":
    main()
