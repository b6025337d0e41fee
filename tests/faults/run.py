"""A run of real processes with faults from a list, and the account of the run.

    python -m faults.run                                         200 faults in 4,000 arrivals over HTTPS
    python -m faults.run --engine ray                            the same with Ray: workers on two nodes, and over HTTPS
    python -m faults.run --wire int4                             contributions as codes of 4 bits
    python -m faults.run --per-hour 125 --minutes 60 --step-seconds 0.25     (`make soak`)
                                                                 by time, next to a twin that meets none: the throughput of both

To be run in the folder tests.

A synchronizer or a worker over HTTPS that dies is started again by its parent, as with `heloco serve` and `heloco join`. Parents,
and workers on Ray, are started again by the harness at once, as a service manager would: by time from nothing, as real processes
are, else forked from one that has imported everything.
With --minutes alone it goes on with new lists until the time is over.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from typing import Any

from faults.fault_list import KINDS, Fault, faults_in_time, faults_of
from faults.fault_places import place
from faults.fault_run import INNER_STEPS, LOOK_S, FaultRun


def run_once(
    faults: list[Fault],
    workers: int,
    arrivals: int,
    limit_s: float,
    kind: type[FaultRun] = FaultRun,
    step_s: float = 0.0,
    wire: str = "fp32",
) -> dict[str, Any]:
    with place(arrivals) as (folder, disk):
        run = kind(folder, faults, workers=workers, arrivals=arrivals, disk=disk, step_s=step_s, wire=wire)
        try:
            return run.go(limit_s)
        finally:
            run.end()


def run_side_by_side(
    faults: list[Fault],
    workers: int,
    seconds: float,
    step_s: float,
    kind: type[FaultRun] = FaultRun,
    *,
    fresh: bool = True,
    wire: str = "fp32",
) -> dict[str, Any]:
    """A run with faults, and at the same time on the same machine one without. Returns the contributions of each."""
    expected = int(workers * seconds / (INNER_STEPS * step_s))
    with contextlib.ExitStack() as stack:
        runs: dict[str, FaultRun] = {}
        for name, list_ in (("with faults", faults), ("without", [])):
            folder, disk = stack.enter_context(place(expected))
            runs[name] = kind(
                folder, list_, workers=workers, arrivals=10 * expected, disk=disk, step_s=step_s, fresh=fresh, wire=wire
            )
            stack.callback(runs[name].end)
            runs[name].begin(120.0)
        first, last = in_the_time(runs, seconds)
        end_states = {name: run.stop() for name, run in runs.items()}
        accounts = {name: run.account(end_states[name]) for name, run in runs.items()}
    counts = {name: last[name] - first[name] for name in runs}
    return {
        "minutes": round(seconds / 60, 2), "in the time": counts, "ratio": round(counts["with faults"] / counts["without"], 4),
        **accounts,
    }  # fmt: skip


def in_the_time(runs: dict[str, FaultRun], seconds: float) -> tuple[dict[str, int], dict[str, int]]:
    """Contributions of each run at the beginning and at the end of the same time span."""
    first = {name: run.status()["arrivals"] for name, run in runs.items()}
    began = last_shown = time.monotonic()
    while (now := time.monotonic()) < began + seconds:
        for run in runs.values():
            run.look(now - began)
        if now > last_shown + 60:
            last_shown = now
            arrivals = {name: run.status()["arrivals"] - first[name] for name, run in runs.items()}
            struck = sum(sum(run.struck.values()) for run in runs.values())
            load = f"{os.getloadavg()[0]:.1f}"
            print(f"{(now - began) / 60:.0f} min, {struck} faults, load {load}: {arrivals}", file=sys.stderr, flush=True)
        time.sleep(LOOK_S)
    return first, {name: run.status()["arrivals"] for name, run in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=["https", "ray"], default="https")
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--arrivals", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, help="4; with Ray 5")
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--per-hour", type=float, default=0.0, help="faults by time instead of --faults, beside a run without")
    parser.add_argument("--step-seconds", type=float, help="of an inner step at the least: 0, with Ray 0.1, with --per-hour 0.25")
    parser.add_argument("--wire", default="fp32", help="the format in which contributions travel: fp32, int4, …")
    flags = parser.parse_args()
    kind, kinds, workers, step_s = engine_settings(flags.engine)
    workers = flags.workers or workers
    step_s = flags.step_seconds if flags.step_seconds is not None else 0.25 if flags.per_hour else step_s
    if flags.per_hour:
        faults = faults_in_time(flags.seed, flags.per_hour, workers, 60 * flags.minutes, kinds)
        counts = run_side_by_side(faults, workers, 60 * flags.minutes, step_s, kind, wire=flags.wire)
        print(json.dumps(counts), flush=True)
        return
    until, seed = time.monotonic() + 60 * flags.minutes, flags.seed
    while True:
        faults = faults_of(seed, flags.faults, workers, flags.arrivals, kinds)
        print(json.dumps(run_once(faults, workers, flags.arrivals, 3600.0, kind, step_s, flags.wire)), flush=True)
        seed += 1
        if time.monotonic() > until:
            return


def engine_settings(name: str) -> tuple[type[FaultRun], dict[str, int], int, float]:
    """(class of the run, kinds of faults, number of workers, minimal seconds of a step). With Ray
    the steps must be slow: otherwise most arrivals would be over before a killed node is back."""
    if name == "https":
        return FaultRun, KINDS, 4, 0.0
    from faults.ray_run import RAY_KINDS, RayFaultRun

    return RayFaultRun, RAY_KINDS, 5, 0.1


if __name__ == "__main__":
    main()
