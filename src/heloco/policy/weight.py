"""The arrival weight ρ: how much one contribution counts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol

from heloco.errors import UserError
from heloco.knobs import Knob, knobs_of_signature
from heloco.registry import Registry


class ArrivalCounts(NamedTuple):
    """What a weight may depend on: the arriving worker's staleness τ and its part in the run so far, this arrival included."""

    staleness: int
    worker_arrivals: int
    arrivals: int
    workers: int
    step_share: float = 0.0
    """The worker's part of all inner steps, counted as if each worker had handed in one more round. 0: not known, all
    rounds are of one length."""
    shards: int = 0
    """How many shards the data has; 0: not known."""
    progress: float = 1.0
    """The part of the run's arrivals that are in, from 0 to 1; 1 if the length of the run is not known."""


class Weight(Protocol):
    """A function from the counts of an arrival to ρ, its weight."""

    def __call__(self, counts: ArrivalCounts) -> float: ...


@dataclass(frozen=True)
class Base:
    """ρ = √K/K, as in Liu et al. and the paper's asynchronous runs."""

    def __call__(self, counts: ArrivalCounts) -> float:
        return 1 / math.sqrt(counts.workers)


@dataclass(frozen=True)
class Average:
    """ρ = 1/K: the plain mean of synchronous DiLoCo."""

    def __call__(self, counts: ArrivalCounts) -> float:
        return 1 / counts.workers


@dataclass(frozen=True)
class Constant:
    """ρ = value."""

    value: Annotated[float, Knob(about="ρ of the constant weight.")] = 1.0

    def __post_init__(self) -> None:
        _finite("weight_value", self.value)

    def __call__(self, counts: ArrivalCounts) -> float:  # noqa: ARG002
        return self.value


@dataclass(frozen=True)
class Polynomial:
    """ρ = √K/K · (1+τ)^−exponent: Liu's discount of stale contributions (exponent ½)."""

    exponent: Annotated[float, Knob(about="The polynomial weight's exponent.")] = 0.5

    def __post_init__(self) -> None:
        _finite("weight_exponent", self.exponent)

    def __call__(self, counts: ArrivalCounts) -> float:
        return math.pow(1 + counts.staleness, -self.exponent) / math.sqrt(counts.workers)


@dataclass(frozen=True)
class Share:
    """ρ = √K/K · clip((1/K) / share of arrivals, floor, ceiling): a worker that arrives seldom counts more.

    Without ties 1 + mean staleness of a worker = 1 / its share of the arrivals, so this is the compensation ∝ 1 + mean τ of
    Rescaled ASGD and FedStaleWeight, read off the counts. A ceiling of 2 was seen to diverge at paces (1,15,15,15,15).
    """

    floor: Annotated[float, Knob(about="The share weight's lower clip.")] = 0.25
    ceiling: Annotated[float, Knob(about="The share weight's upper clip.")] = 1.5

    def __post_init__(self) -> None:
        _finite("weight_floor", self.floor)
        _finite("weight_ceiling", self.ceiling)
        if self.floor > self.ceiling:
            raise UserError(f"weight_floor {self.floor:g} is above weight_ceiling {self.ceiling:g}: swap them.")

    def __call__(self, counts: ArrivalCounts) -> float:
        compensation = counts.arrivals / (counts.workers * counts.worker_arrivals)
        return min(max(compensation, self.floor), self.ceiling) / math.sqrt(counts.workers)


@dataclass(frozen=True)
class Annealed:
    """ρ = 1/√(K(1 + (K−1)c)), c = correlation · ½(1 + cos π·progress): from 1/K at the start of a run to 1/√K at its end.

    K contributions with a mean cosine c between them, each weighed by ρ, add up to a step of one contribution's length. Early in
    a run, while the inner learning rate is high, workers make the same large moves, so a sum above their mean overshoots.
    Later they have little in common, and the mean would be too short. c follows the cosine of the inner learning rate.
    correlation = 0 is the base weight 1/√K. Otherwise K is the number of shards where there are more of them than workers: it
    takes that many rounds to see all of the data.
    """

    correlation: Annotated[float, Knob(about="The annealed and discounted weights' c at the start of the run.")] = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.correlation <= 1:
            raise UserError(f"weight_correlation is {self.correlation!r}: give a number from 0 to 1.")

    def __call__(self, counts: ArrivalCounts) -> float:
        k = self.rounds_to_see_all(counts)
        return 1 / math.sqrt(k * (1 + (k - 1) * self.cosine(counts.progress)))

    def rounds_to_see_all(self, counts: ArrivalCounts) -> int:
        return max(counts.workers, counts.shards) if self.correlation else counts.workers

    def cosine(self, progress: float) -> float:
        """c at this part of the run."""
        return self.correlation * 0.5 * (1 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Discounted(Annealed):
    """ρ = min(1, K/n) / √(w + (K² − w)c), w = min(K, 1 / the worker's share of inner steps), n = 1 / its share of arrivals.

    n is how many contributions arrive during one of the worker's rounds, its own included, and w is how many rounds like its own
    they amount to: with rounds of one length w = min(n, K). For equal workers both are K and ρ is the annealed weight. A fast
    worker's ρ rises to 1/√w, because few others work while it does. A contribution that is n/K cycles old counts K/n: the
    others have made the same moves in the meantime. Under DyLU all arrive equally often, so nothing is discounted. For
    flexible shards: with fixed shards the data of slow workers would be neglected.
    """

    def __call__(self, counts: ArrivalCounts) -> float:
        workers, k = counts.workers, self.rounds_to_see_all(counts)
        # as if each had arrived once before: no jumps at first
        n = (counts.arrivals + workers) / (counts.worker_arrivals + 1)
        w = min((1 / counts.step_share if counts.step_share else n) * (k / workers), k)
        return min(1.0, workers / n) / math.sqrt(w + (k * k - w) * self.cosine(counts.progress))


def _finite(name: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise UserError(f"{name} is {value!r}: give a finite number ≥ 0.")


_BUILT_IN: dict[str, Callable[..., Weight]] = {
    "base": Base,
    "average": Average,
    "constant": Constant,
    "polynomial": Polynomial,
    "share": Share,
    "annealed": Annealed,
    "discounted": Discounted,
}


class _OwnWeight:
    """Makes a weight that was registered, and checks what it gives."""

    def __init__(self, name: str, weight: Any) -> None:
        if not callable(weight):
            raise UserError(f"The arrival weight {name!r} is {weight!r}: give a function (counts) -> ρ.")
        self.name, self.weight = name, weight

    def __call__(self, **options: Any) -> Weight:
        weight = self.weight(**options) if isinstance(self.weight, type) else self.weight

        def checked(counts: ArrivalCounts) -> float:
            rho = weight(counts)
            if not isinstance(rho, int | float) or not 0 <= rho < math.inf:
                raise UserError(f"The arrival weight {self.name!r} gave {rho!r}: it must give a finite number ≥ 0.")
            return float(rho)

        return checked


WEIGHTS: Registry[Callable[..., Weight]] = Registry("arrival weight", "heloco.weights", _OwnWeight, _BUILT_IN)


def register_weight(name: str, weight: Any) -> None:
    """Adds an arrival weight of your own to this process: a function (counts) -> ρ, or a class of such functions.

        heloco.register_weight("halved", lambda counts: 0.5 / counts.workers)

    `counts` is a `heloco.policy.ArrivalCounts`. The options of a class, its parameters with defaults, are settings and flags:
    `weight_NAME`. Installed packages: entry point group `heloco.weights`. See docs/extend.md.
    """
    WEIGHTS.register(name, weight)


def weight_knobs(name: str) -> dict[str, Knob]:
    """The options of a weight by their own names."""
    factory: Any = WEIGHTS.find(name)
    weight = factory.weight if isinstance(factory, _OwnWeight) else factory
    return knobs_of_signature(weight) if isinstance(weight, type) else {}


def make_weight(name: str, **options: object) -> Weight:
    """The arrival weight of this name: a function (counts) -> ρ. `options` are the parameters that the weight has. Raises
    UserError for an unknown name or a value out of range."""
    return WEIGHTS.find(name)(**options)
