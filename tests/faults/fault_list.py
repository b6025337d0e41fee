"""Faults as data: the time, the kind and the target of each. Lists come from a seed."""

import random
from dataclasses import dataclass

KINDS = {
    "kill a worker": 5, "kill a worker at a point": 5, "kill the synchronizer": 2, "stop the synchronizer": 1, "cut": 4,
    "half-open": 2, "full disk": 1, "fail an fsync": 1, "damage a file": 1, "corrupt": 2, "double": 2, "replay": 2,
    "stop a worker": 1, "kill heloco serve": 1, "kill heloco join": 1,
}  # fmt: skip
"""Kind -> relative frequency."""
POINTS = ("fetch", "in a round", "hand in", "handed in")
"""Points at which a worker can get an order: before it fetches a start, between two steps, before it hands in, and after the
synchronizer has applied its contribution but before the worker has the acknowledgement."""
LASTING = ("half-open", "stop a worker", "stop the synchronizer", "full disk")


@dataclass(frozen=True)
class Fault:
    at: float
    """Time of the fault, in arrivals (`faults_of`) or in seconds of the run (`faults_in_time`)."""
    kind: str
    worker: int = 0
    point: str = ""
    seconds: float = 0.0


def faults_of(seed: int, count: int, workers: int, arrivals: int, kinds: dict[str, int] = KINDS) -> list[Fault]:
    """A list of faults by arrivals."""
    draw = random.Random(seed)
    picked = draw.choices(list(kinds), weights=list(kinds.values()), k=count)
    times = sorted(draw.randrange(1, max(2, arrivals - 5)) for _ in range(count))
    return [_fault(draw, at, kind, workers) for at, kind in zip(times, picked, strict=True)]


def faults_in_time(
    seed: int, per_hour: float, workers: int, seconds: float, kinds: dict[str, int] = KINDS, quiet_s: float = 10.0
) -> list[Fault]:
    """A list of faults by seconds, uniformly distributed, like those of a Poisson process with a
    given number. None falls into the last `quiet_s`, so that the cost of each fault falls into the
    measured time."""
    draw = random.Random(seed)
    count = round(per_hour * seconds / 3600)
    picked = draw.choices(list(kinds), weights=list(kinds.values()), k=count)
    times = sorted(draw.uniform(0.0, max(0.0, seconds - quiet_s)) for _ in range(count))
    return [_fault(draw, at, kind, workers) for at, kind in zip(times, picked, strict=True)]


def _fault(draw: random.Random, at: float, kind: str, workers: int) -> Fault:
    seconds = draw.uniform(0.2, 1.0) if kind in LASTING else 0.0
    return Fault(at, kind, draw.randrange(workers), draw.choice(POINTS), seconds)
