"""Which shard a worker's next round takes its data from."""

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from heloco.errors import UserError
from heloco.registry import Registry
from heloco.seeds import derive


class ShardView(Protocol):
    """What a choice may look at; the synchronizer's ledger keeps it."""

    @property
    def windows(self) -> int: ...  # the shard's size
    @property
    def visits(self) -> int: ...  # rounds handed out from it
    @property
    def windows_taken(self) -> int: ...  # windows handed out from it


Choose = Callable[[int, int, Sequence[ShardView]], int]
"""(worker, round, shards) -> shard"""


class Fixed:
    """Shard i belongs to worker i. With more shards than workers a worker alternates between i, i+K, i+2K, …"""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    def __call__(self, worker: int, round_index: int, shards: Sequence[ShardView]) -> int:  # noqa: ARG002
        if len(shards) == self.workers:
            return worker
        return min(range(worker, len(shards), self.workers), key=lambda s: shards[s].visits)


class LeastVisited:
    """The paper's flexible assignment: the shard with the fewest rounds so far, ties at random."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, worker: int, round_index: int, shards: Sequence[ShardView]) -> int:
        fewest = min(shard.visits for shard in shards)
        tied = [i for i, shard in enumerate(shards) if shard.visits == fewest]
        return tied[0] if len(tied) == 1 else random.Random(derive(self.seed, "shard", worker, round_index)).choice(tied)


class Liu:
    """Liu et al.: at random with p_i ∝ max(|D_i|/Σ|D| − n_i/Σn, 0), n_i the data of shard i handed out so far."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def probabilities(self, shards: Sequence[ShardView]) -> list[float]:
        size, total_taken = sum(s.windows for s in shards), sum(s.windows_taken for s in shards)
        lag = [max(s.windows / size - (s.windows_taken / total_taken if total_taken else 0.0), 0.0) for s in shards]
        total = sum(lag)  # 0 only when all shards are exactly on par: then by size
        return [x / total for x in lag] if total > 0 else [s.windows / size for s in shards]

    def __call__(self, worker: int, round_index: int, shards: Sequence[ShardView]) -> int:
        draw = random.Random(derive(self.seed, "shard", worker, round_index))
        return draw.choices(range(len(shards)), weights=self.probabilities(shards))[0]


def _make_fixed(workers: int, shards: int, **_: int) -> Choose:
    if shards < workers:
        raise UserError(
            f"{workers} workers but only {shards} shards: give as many shards as workers, fewer paces, or --assign flexible."
        )
    return Fixed(workers)


class _OwnPolicy:
    """Makes a policy that was registered, and checks what it chooses."""

    def __init__(self, name: str, policy: Any) -> None:
        if not callable(policy):
            raise UserError(f"The shard policy {name!r} is {policy!r}: give a function (worker, round, shards) -> shard.")
        self.name, self.policy = name, policy

    def __call__(self, **run: int) -> Choose:
        choose = self.policy(**run) if isinstance(self.policy, type) else self.policy

        def checked(worker: int, round_index: int, shards: Sequence[ShardView]) -> int:
            shard = choose(worker, round_index, shards)
            if not isinstance(shard, int) or not 0 <= shard < len(shards):
                raise UserError(
                    f"The shard policy {self.name!r} chose {shard!r}: shards are numbered from 0 to {len(shards) - 1}."
                )
            return shard

        return checked


SHARD_POLICIES: Registry[Callable[..., Choose]] = Registry(
    "shard policy",
    "heloco.shards",
    _OwnPolicy,
    {"fixed": _make_fixed, "flexible": lambda seed, **_: LeastVisited(seed), "liu": lambda seed, **_: Liu(seed)},
)


def register_shards(name: str, policy: Any) -> None:
    """Adds a shard policy of your own to this process: a function (worker, round, shards) -> number of the shard, or a class
    whose objects are such functions, made with the keywords workers, shards (how many there are) and seed.

        heloco.register_shards("rotating", lambda worker, round, shards: (worker + round) % len(shards))

    `shards` are `heloco.policy.ShardView`s. A choice must follow from what it is called with (and the seed) alone, or a run could
    not be replayed. Installed packages: entry point group `heloco.shards`. See docs/extend.md.
    """
    SHARD_POLICIES.register(name, policy)


def make_choice(name: str, *, workers: int, shards: int, seed: int) -> Choose:
    """The shard policy of this name for a run: a function (worker, round, shards) -> number of the shard. Raises UserError for
    an unknown name, and if the policy does not suit the numbers of workers and shards."""
    return SHARD_POLICIES.find(name)(workers=workers, shards=shards, seed=seed)
