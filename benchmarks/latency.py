"""Whether slow work delays quick requests to a served run, over HTTPS on loopback.

    python benchmarks/latency.py [--model 124m] [--acknowledgements 100] [--viewers 0 10 50] [--out FILE.json]

Part 1: evaluations and checkpoints. The synchronizer runs in a process of its own. Two machines, which do not train, hand in the
same pseudo-gradient again and again with random pauses. Two, because one alone never commits while a checkpoint that its last
commit made due is still being copied. Another process asks for the status every 20 ms.
All phases are of one run and alternate, so what else the computer does meets each of them. A thread looks at the run's folder
every 10 ms and notes the slow work that is under way:
- an evaluation, from the copy of the model to the scores: there is a file in RUN/evaluating;
- a checkpoint: there is a hidden folder in RUN/checkpoints, or there was one within the last 0.5 s, because the journal is
  pruned after a checkpoint.
A request is "during" such work if it overlaps with it at all, and idle if it overlaps with neither kind. The part ends when each
of the three phases has enough acknowledgements. Goal: a p99 of at most 1.5 times the idle one.

A status that takes longer than 20 ms counts again for each further 20 ms: someone who had asked then would have waited for the
rest of that time. An acknowledgement is the request that commits an upload; "hand in" is the upload and the commit.

Part 2: viewers of the live page (`viewers.py`). Arrivals per second of a tiny model with each number of viewers, as a ratio to
those with the first number, and the bytes that a viewer receives per arrival.
"""

import argparse
import contextlib
import json
import math
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import many_machines
from heloco.cluster.gateway.https_link import HttpsLink
from heloco.cluster.protocol.refusals import Refused
from heloco.run import RunConfig, resolve, with_fields
from heloco.wire.layout import Layout
from viewers import child, compare_viewers, serve

LOADS: dict[str, tuple[float, dict[str, int]]] = {
    "1m": (0.1, {"vocab_size": 257, "eval_windows": 256, "eval_every": 80, "checkpoint_every": 30}),
    "paper": (0.5, {"vocab_size": 50257, "eval_windows": 80, "eval_every": 40, "checkpoint_every": 8}),
    "124m": (2.0, {"vocab_size": 50257, "eval_windows": 5, "eval_every": 25, "checkpoint_every": 4}),
}
"""Model -> the mean pause between contributions in seconds, and settings of the run. On two cores, evaluations take about a
third of the time and checkpoints a fifth."""
STATUS_EVERY_S, LOOK_EVERY_S, SETTLE_S, GOAL = 0.02, 0.01, 0.5, 1.5
WARM_UP, MACHINES = 3, 2
PHASES, KINDS = ("idle", "evaluation", "checkpoint", "both"), ("status", "acknowledgement", "hand in")
Span = tuple[float, float]
"""When a request began and ended."""


# ---- part 1: evaluations and checkpoints


def ask_status(address: str, token: str, parent: Any) -> None:
    """Asks until the parent has sent something, then answers with the spans of all requests."""
    link, spans, next_s = HttpsLink(address, token), list[Span](), 0.0
    while not parent.poll(max(0.0, next_s - time.monotonic())):
        begin_s = time.monotonic()
        with contextlib.suppress(Refused):  # after seconds, because the synchronizer was busy: they count
            link.status()
        end_s = time.monotonic()
        spans += [(begin_s + i * STATUS_EVERY_S, end_s) for i in range(math.ceil((end_s - begin_s) / STATUS_EVERY_S))]
        next_s = begin_s + STATUS_EVERY_S
    parent.send(spans)
    link.close()


class PhaseWatch(threading.Thread):
    """Looks at the run's folder, and notes when an evaluation and when a checkpoint was under way."""

    def __init__(self, run: Path) -> None:
        super().__init__(daemon=True)
        self._folders = {"evaluation": (run / "evaluating", "*"), "checkpoint": (run / "checkpoints", ".arrival-*")}
        self.spans: dict[str, list[Span]] = {name: [] for name in self._folders}
        self.is_over = threading.Event()
        self.start()

    def run(self) -> None:
        was_under_way = dict.fromkeys(self._folders, False)
        while not self.is_over.wait(LOOK_EVERY_S):
            for name, (folder, pattern) in self._folders.items():
                now_s, is_under_way, spans = time.monotonic(), any(folder.glob(pattern)), self.spans[name]
                if is_under_way:
                    end_s = now_s + (SETTLE_S if name == "checkpoint" else LOOK_EVERY_S)
                    spans[-1:] = [(spans[-1][0], end_s)] if was_under_way[name] else [*spans[-1:], (now_s, end_s)]
                was_under_way[name] = is_under_way

    def phase(self, request: Span) -> str:
        names = [name for name, spans in self.spans.items() if any(a < request[1] and request[0] < b for a, b in list(spans))]
        return "both" if len(names) > 1 else names[0] if names else "idle"


class TimedLink(HttpsLink):
    """Notes when each commit began, which is when all tensors were sent, and when it was acknowledged."""

    def __init__(self, address: str, token: str, commits: list[Span]) -> None:
        super().__init__(address, token)
        self._commits, self._sent_s = commits, 0.0

    def send_tensors(self, *arguments: Any, **options: Any) -> str:
        digest = super().send_tensors(*arguments, **options)
        self._sent_s = time.monotonic()
        return digest

    def hand_in(self, *arguments: Any, **options: Any) -> Any:
        self._sent_s = time.monotonic()
        acknowledgement = super().hand_in(*arguments, **options)
        self._commits.append((self._sent_s, time.monotonic()))
        return acknowledgement


def hand_in_often(link: HttpsLink, number: int, pause_s: float, is_enough: Callable[[], bool]) -> list[Span]:
    """Returns when each contribution began and ended."""
    joined, spans, pauses = link.join(f"bench-{number}", returning=None, layout=None), list[Span](), random.Random(number)
    layout, numbers = Layout.from_json(joined.contribution_layout), torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=numbers) * 1e-3 for name, _, shape in layout.entries}
    while not is_enough():
        time.sleep(pause_s * pauses.uniform(0.5, 1.5))  # random, so that it is not in step with the synchronizer's own clock
        key = link.next_round(joined.ticket, 5.0).key
        begin_s = time.monotonic()
        link.hand_in(joined.ticket, key, layout, tensors, many_machines.REPORT)
        spans.append((begin_s, time.monotonic()))
    link.leave(joined.ticket, "over")
    link.close()
    return spans


def measure_phases(model: str, goal: int, limit_s: float, disk: Path | None) -> dict[str, Any]:
    pause_s, settings = LOADS[model]
    values = {"preset": model, "languages": ["auren", "thelis"], "paces": [1.0] * MACHINES, "arrivals": 1_000_000, **settings}
    config = resolve(with_fields(RunConfig(), {**values, "device": "cpu", "beat_s": 30.0, "journal_gb": 0.0}))
    commits = list[Span]()
    with tempfile.TemporaryDirectory(dir=disk) as folder, child(serve, config, f"{folder}/run") as server:
        address, worker_token, viewer_token = server.recv()
        watch, until_s = PhaseWatch(Path(folder) / "run"), time.monotonic() + limit_s

        def is_enough() -> bool:
            phases = [watch.phase(span) for span in commits[WARM_UP:]]
            return time.monotonic() > until_s or min(phases.count(phase) for phase in PHASES[:3]) >= goal

        def work(number: int) -> list[Span]:
            return hand_in_often(TimedLink(address, worker_token, commits), number, MACHINES * pause_s, is_enough)

        with child(ask_status, address, viewer_token) as asker, ThreadPoolExecutor(MACHINES) as threads:
            hand_ins = [span for spans in threads.map(work, range(MACHINES)) for span in spans]
            asker.send("over")
            requests = dict(zip(KINDS, (asker.recv(), commits, hand_ins), strict=True))
        watch.is_over.set()
        watch.join()
    begin_s = commits[WARM_UP - 1][1]
    times = {kind: by_phase([span for span in spans if span[0] > begin_s], watch) for kind, spans in requests.items()}
    slow_work = {name: [end_s - begin_s for begin_s, end_s in spans] for name, spans in watch.spans.items()}
    return {"model": model, "times": times, "slow_work_s": slow_work}


def by_phase(requests: list[Span], watch: PhaseWatch) -> dict[str, dict[str, float]]:
    """Numbers of each phase that has any requests."""
    phases: dict[str, list[float]] = {}
    for begin_s, end_s in requests:
        phases.setdefault(watch.phase((begin_s, end_s)), []).append(end_s - begin_s)
    idle_s = percentile(phases["idle"], 0.99) if "idle" in phases else math.inf
    return {
        phase: {"count": len(s), "p50_s": percentile(s, 0.5), "p99_s": percentile(s, 0.99), "ratio": percentile(s, 0.99) / idle_s}
        for phase, s in phases.items()
    }


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


def show_cell(cell: dict[str, float] | None) -> str:
    if cell is None:
        return f"{'none':>7}{'':28}"
    times = f"{cell['p50_s'] * 1e3:>8.1f}ms{cell['p99_s'] * 1e3:>8.1f}ms"
    return f"{cell['count']:>7}{times}{cell['ratio']:>7.2f}{'!' if cell['ratio'] > GOAL else ' '}"


def show_phases(result: dict[str, Any]) -> None:
    for name, times in result["slow_work_s"].items():
        print(f"{len(times)} × {name}" + (f", median {statistics.median(times):.1f} s" if times else ""))
    print(f"{result['model']:<11}" + "".join(f"{kind:^35}" for kind in KINDS))
    print(" " * 11 + f"{'count':>7}{'p50':>10}{'p99':>10}{'× idle':>8}" * len(KINDS))
    for phase in PHASES:
        cells = [result["times"][kind].get(phase) for kind in KINDS]
        print(f"{phase:<11}" + "".join(map(show_cell, cells)))
    print(f"!: the p99 is more than {GOAL} times the idle one", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=tuple(LOADS), default="124m")
    parser.add_argument("--acknowledgements", type=int, default=100, help="in each phase, at least; 0: no part 1")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds after which part 1 ends in any case")
    parser.add_argument("--viewers", nargs="*", type=int, default=[0, 10, 50], help="none: no part 2")
    parser.add_argument("--rounds", type=int, default=3, help="of part 2")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement in part 2")
    parser.add_argument("--folder", type=Path, help="on the disk to measure")
    parser.add_argument("--out", type=Path, help="write the numbers here")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"python": sys.version.split()[0], "torch": torch.__version__, "viewers": []}
    if arguments.acknowledgements:
        results["phases"] = measure_phases(arguments.model, arguments.acknowledgements, arguments.limit, arguments.folder)
        show_phases(results["phases"])
    if arguments.viewers:
        results["viewers"] = compare_viewers(arguments.viewers, arguments.rounds, arguments.seconds, arguments.folder)
    for row in results["viewers"]:
        rate = f"{row['viewers']:>4} viewers {row['arrivals_per_s']:8.1f} arrivals/s, ratio {row['ratio']:.2f}"
        print(f"{rate}, {row['bytes_per_viewer_and_arrival']:8.0f} bytes per viewer and arrival")
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
