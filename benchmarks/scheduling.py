"""1,000 workers, 1,000,000 arrivals: how long the virtual clock and the synchronizer's books take, and that memory stays flat.

python benchmarks/scheduling.py [--workers 1000] [--arrivals 1000000]
"""

import argparse
import random
import time
import tracemalloc

from heloco.engine.schedule import schedule, summarize


def run(workers: int, arrivals: int) -> float:
    draw = random.Random(0)
    paces = [draw.uniform(1, 20) for _ in range(workers)]
    steps = [80] * workers
    began = time.perf_counter()
    summarize(schedule(paces_s=paces, inner_steps=steps, arrivals=arrivals), steps)
    return time.perf_counter() - began


def peak_bytes(workers: int, arrivals: int) -> int:
    tracemalloc.start()
    run(workers, arrivals)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--arrivals", type=int, default=1_000_000)
    arguments = parser.parse_args()
    seconds = min(run(arguments.workers, arguments.arrivals) for _ in range(3))
    print(f"{arguments.workers:,} workers, {arguments.arrivals:,} arrivals: {seconds:.2f} s (best of 3), goal < 10 s")
    few, many = (peak_bytes(arguments.workers, n) for n in (arguments.arrivals // 100, arguments.arrivals // 10))
    print(
        f"peak Python memory: {few / 1e6:.2f} MB for {arguments.arrivals // 100:,}, "
        f"{many / 1e6:.2f} MB for {arguments.arrivals // 10:,}"
    )


if __name__ == "__main__":
    main()
