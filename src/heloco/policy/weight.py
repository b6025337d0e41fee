"""The arrival weight ρ: how much one contribution counts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from heloco.errors import UserError, nearest


class Standing(NamedTuple):
    """What a weight may depend on: the arriving worker's staleness τ and its part in the run so far, this arrival included."""

    staleness: int
    worker_arrivals: int
    arrivals: int
    workers: int


class Weight(Protocol):
    def __call__(self, standing: Standing) -> float: ...


@dataclass(frozen=True)
class Base:
    """ρ = √K/K, as in Liu et al. and the paper's asynchronous runs."""

    def __call__(self, standing: Standing) -> float:
        return 1 / math.sqrt(standing.workers)


@dataclass(frozen=True)
class Average:
    """ρ = 1/K: the plain mean of synchronous DiLoCo."""

    def __call__(self, standing: Standing) -> float:
        return 1 / standing.workers


@dataclass(frozen=True)
class Constant:
    """ρ = value."""

    value: float = 1.0

    def __post_init__(self) -> None:
        _finite("weight_value", self.value)

    def __call__(self, standing: Standing) -> float:  # noqa: ARG002
        return self.value


@dataclass(frozen=True)
class Polynomial:
    """ρ = √K/K · (1+τ)^−exponent: Liu's discount of stale contributions (exponent ½)."""

    exponent: float = 0.5

    def __post_init__(self) -> None:
        _finite("weight_exponent", self.exponent)

    def __call__(self, standing: Standing) -> float:
        return math.pow(1 + standing.staleness, -self.exponent) / math.sqrt(standing.workers)


@dataclass(frozen=True)
class Share:
    """ρ = √K/K · clip(((1/K) / share of arrivals)^exponent, floor, ceiling): a worker that arrives seldom counts more.

    Without ties 1 + mean staleness of a worker = 1 / its share of the arrivals, so this is the compensation ∝ 1 + mean τ of
    Rescaled ASGD and FedStaleWeight, read off the counts. A ceiling of 2 was seen to diverge at paces (1,15,15,15,15).
    """

    floor: float = 0.25
    ceiling: float = 1.5
    exponent: float = 1.0

    def __post_init__(self) -> None:
        _finite("weight_exponent", self.exponent)
        _finite("weight_floor", self.floor)
        _finite("weight_ceiling", self.ceiling)
        if self.floor > self.ceiling:
            raise UserError(f"weight_floor {self.floor:g} is above weight_ceiling {self.ceiling:g}: swap them.")

    def __call__(self, standing: Standing) -> float:
        compensation = (standing.arrivals / (standing.workers * standing.worker_arrivals)) ** self.exponent
        return min(max(compensation, self.floor), self.ceiling) / math.sqrt(standing.workers)


@dataclass(frozen=True)
class Bounded:
    """ρ = 1/√(K·√(1 + (K/B²)²)): √K/K for few workers, B/K for many. The sum of ρ over all workers never exceeds B.

    Why √K/K: contributions of K workers that have little in common add up to a step of one contribution's length.
    Why not for many: each contribution is applied after the K − 1 others that were under way with it. On a direction that one
    round contracts by a fraction a, a delay of K arrivals is stable only while K·ρ·η(1+μ)·a < π/2. So the sum K·ρ must stop
    growing, whatever K is.
    """

    bound: float = 4.5

    def __post_init__(self) -> None:
        if not 0 < self.bound < math.inf:
            raise UserError(f"weight_bound is {self.bound!r}: give a finite number above 0.")

    def __call__(self, standing: Standing) -> float:
        return 1 / math.sqrt(standing.workers * math.hypot(1, standing.workers / self.bound**2))


@dataclass(frozen=True)
class Annealed:
    """ρ = 1/√(n(1 + (n−1)c)), c = correlation · ½(1 + cos π·progress): from 1/n, the mean, to 1/√n at the run's end.

    n contributions with a mean cosine c between them, each weighed by ρ, add up to a step of one contribution's length. Early in
    a run, while the learning rate is high, workers mostly agree, and 1/√n would overshoot.
    """

    length: int
    correlation: float = 1.0

    def __call__(self, standing: Standing) -> float:
        n = self.concurrent(standing)
        return 1 / math.sqrt(n * (1 + (n - 1) * self.c(standing)))

    def c(self, standing: Standing) -> float:
        return self.correlation * 0.5 * (1 + math.cos(math.pi * min(1.0, standing.arrivals / self.length)))

    def concurrent(self, standing: Standing) -> float:
        return standing.workers


@dataclass(frozen=True)
class Concurrent(Annealed):
    """The same with n = min(K, 1 / share of arrivals): how many contributions arrive in the time of one of this worker's rounds."""

    def concurrent(self, standing: Standing) -> float:
        return min(standing.workers, (standing.arrivals + standing.workers) / (standing.worker_arrivals + 1))


@dataclass(frozen=True)
class Paced(Annealed):
    """1/ρ² = n + (K² − n)c: from 1/K at the start to 1/√n at the end, n = 1 / the worker's share of arrivals.

    n is how many contributions arrive in the time of one of its rounds: few for a fast worker, many for a slow one.
    """

    def __call__(self, standing: Standing) -> float:
        n, k, c = self.concurrent(standing), standing.workers, self.c(standing)
        return 1 / math.sqrt(n + (k * k - n) * c)

    def concurrent(self, standing: Standing) -> float:
        return (standing.arrivals + standing.workers) / (standing.worker_arrivals + 1)


@dataclass(frozen=True)
class Discounted(Paced):
    """As `Paced` for n ≤ K; a worker so slow that n > K counts K/n times what it would with n = K."""

    def __call__(self, standing: Standing) -> float:
        n, k, c = self.concurrent(standing), standing.workers, self.c(standing)
        return min(1.0, k / n) / math.sqrt(min(n, k) + (k * k - min(n, k)) * c)


@dataclass(frozen=True)
class Balanced(Paced):
    """ρ = (n/K)^exponent / √(K(1 + (K−1)c)): annealed, and a worker that arrives seldom counts more."""

    exponent: float = 0.25

    def __call__(self, standing: Standing) -> float:
        n, k, c = self.concurrent(standing), standing.workers, self.c(standing)
        return math.pow(n / k, self.exponent) / math.sqrt(k * (1 + (k - 1) * c))


def _finite(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise UserError(f"{name} is {value!r}: give a finite number ≥ 0.")


WEIGHTS: dict[str, Callable[..., Weight]] = {
    "base": Base,
    "average": Average,
    "constant": Constant,
    "polynomial": Polynomial,
    "share": Share,
    "bounded": Bounded,
    "annealed": Annealed,
    "concurrent": Concurrent,
    "paced": Paced,
    "discounted": Discounted,
    "balanced": Balanced,
}


def make_weight(name: str, **options: float) -> Weight:
    if name not in WEIGHTS:
        raise UserError(f"There is no arrival weight {name!r}; {nearest(name, list(WEIGHTS))}")
    return WEIGHTS[name](**options)
