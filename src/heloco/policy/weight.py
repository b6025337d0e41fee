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
    """ρ = √K/K · clip((1/K) / share of arrivals, floor, ceiling): a worker that arrives seldom counts more.

    Without ties 1 + mean staleness of a worker = 1 / its share of the arrivals, so this is the compensation ∝ 1 + mean τ of
    Rescaled ASGD and FedStaleWeight, read off the counts. A ceiling of 2 was seen to diverge at paces (1,15,15,15,15).
    """

    floor: float = 0.25
    ceiling: float = 1.5

    def __post_init__(self) -> None:
        _finite("weight_floor", self.floor)
        _finite("weight_ceiling", self.ceiling)
        if self.floor > self.ceiling:
            raise UserError(f"weight_floor {self.floor:g} is above weight_ceiling {self.ceiling:g}: swap them.")

    def __call__(self, standing: Standing) -> float:
        compensation = standing.arrivals / (standing.workers * standing.worker_arrivals)
        return min(max(compensation, self.floor), self.ceiling) / math.sqrt(standing.workers)


def _finite(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise UserError(f"{name} is {value!r}: give a finite number ≥ 0.")


WEIGHTS: dict[str, Callable[..., Weight]] = {
    "base": Base,
    "average": Average,
    "constant": Constant,
    "polynomial": Polynomial,
    "share": Share,
}


def make_weight(name: str, **options: float) -> Weight:
    if name not in WEIGHTS:
        raise UserError(f"There is no arrival weight {name!r}; {nearest(name, list(WEIGHTS))}")
    return WEIGHTS[name](**options)
