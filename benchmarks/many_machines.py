"""Arrivals per second of a tiny model with 4 and with 64 machines over HTTPS on loopback, and the synchronizer's memory.

    python benchmarks/many_machines.py [--machines 4 64] [--seconds 10] [--link https] [--out FILE.json]

The synchronizer runs in a process of its own; the machines are threads of this one, and hand in at once what they took: all the
time is the synchronizer's, the link's and theirs. Goal: with 64 at least 80 % of the arrivals that 4 make, in the same memory.
"""

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from arrival import over_https, over_ray
from heloco.cluster.client.run_client import RunClient
from heloco.cluster.protocol.messages import ContributionReport
from heloco.wire.blocks import PARAMETER, PSEUDO_GRADIENT, name_blocks
from heloco.wire.layout import Layout

BLOCKS = name_blocks(PARAMETER, [torch.zeros(shape) for shape in [(256, 64), (64, 64), (64,)]])
DELTA = name_blocks(PSEUDO_GRADIENT, [torch.full_like(t, 1e-3) for t in BLOCKS.values()])
REPORT = ContributionReport(loss=1.0, last_loss=1.0, samples=1, units=1)


def machine(link: Any, name: str, over: threading.Event, arrivals: list[int]) -> None:
    client = RunClient(link, name, layout=Layout.from_tensors(BLOCKS), tell=lambda _: None)
    if client.join().needs_model:
        client.send_model(Layout.from_tensors(BLOCKS), BLOCKS, [f"block {i}" for i in range(len(BLOCKS))])
    while (answer := client.take(over.is_set)) is not None:
        client.hand_in(answer.key, DELTA, REPORT)
        arrivals.append(1)
    client.leave()


def measured(new_link: Any, pid: int, machines: int, seconds: float) -> dict[str, Any]:
    over, arrivals = threading.Event(), list[int]()
    threads = [threading.Thread(target=machine, args=(new_link(), f"m{i}", over, arrivals)) for i in range(machines)]
    for thread in threads:
        thread.start()
    while len(arrivals) < 2 * machines:
        time.sleep(0.05)
    before, began = len(arrivals), time.perf_counter()
    time.sleep(seconds)
    count, took = len(arrivals) - before, time.perf_counter() - began
    over.set()
    for thread in threads:
        thread.join()
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    peak = int(next(line for line in status if line.startswith("VmHWM")).split()[1]) * 1024
    return {"machines": machines, "arrivals_per_s": count / took, "peak_mb": peak / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machines", nargs="+", type=int, default=[4, 64])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--link", choices=("https", "ray"), default="https")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = []
    for count in arguments.machines:
        with tempfile.TemporaryDirectory() as folder:
            run = over_https if arguments.link == "https" else over_ray
            work = lambda new, pid, count=count: measured(new, pid, count, arguments.seconds)  # noqa: E731
            results.append(run(Path(folder), work, workers=count))
        print(
            f"{count:>4} machines  {results[-1]['arrivals_per_s']:8.1f} arrivals/s  {results[-1]['peak_mb']:8.0f} MB at most",
            flush=True,
        )
    first, last = results[0], results[-1]
    print(f"{last['arrivals_per_s'] / first['arrivals_per_s']:.0%} of the arrivals of {first['machines']} machines")
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
