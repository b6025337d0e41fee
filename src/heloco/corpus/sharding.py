"""Which windows of the corpus each shard trains on, and in which order.

A window of a token stream is `context` inputs and, shifted by one, their targets. Windows do not overlap (but for the one
token that is a target here and an input there), so "every window in exactly one shard" is "no text is trained on twice".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from heloco.errors import UserError, nearest

from .prepare import Corpus

SplitScheme = Literal["source", "iid", "dirichlet"]
Indices = npt.NDArray[np.int64]

_DEAL, _ORDER = 1, 2  # keep the generators of the two uses apart under one seed


def windows(tokens: npt.NDArray[Any], context: int) -> int:
    """How many whole windows the tokens hold."""
    return max(0, (len(tokens) - 1) // context)


@dataclass(frozen=True, eq=False)
class Shard:
    """A numbered set of windows, possibly from several sources: `_members[s]` are the windows taken from view s."""

    name: str
    windows: int
    _views: tuple[npt.NDArray[Any], ...]
    _members: tuple[Indices, ...]
    _firsts: Indices

    def gather(self, indices: npt.NDArray[np.integer[Any]]) -> Indices:
        """The windows at `indices` (below `windows`) as rows of context + 1 token ids."""
        if indices.size and not 0 <= indices.min() <= indices.max() < self.windows:
            raise IndexError(f"shard {self.name} has windows 0 to {self.windows - 1}, not {indices.min()} to {indices.max()}")
        view_of = np.searchsorted(self._firsts, indices, side="right") - 1
        rows = np.empty((len(indices), self._views[0].shape[1]), dtype=np.int64)
        for v in np.unique(view_of):
            view_mask = view_of == v
            rows[view_mask] = self._views[v][self._members[v][indices[view_mask] - self._firsts[v]]]
        return rows


def split(
    corpus: Corpus, *, scheme: SplitScheme, shards: int | None = None, context: int, alpha: float = 0.5, seed: int = 0
) -> tuple[Shard, ...]:
    """Deals every window of every source to exactly one shard, none of them empty.

    `source`: a shard per source. `iid`: all windows shuffled and dealt evenly. `dirichlet`: each source's windows dealt in
    proportions drawn from Dirichlet(alpha): near 0 a source goes to one shard, far above 1 it goes to all alike.
    """
    if scheme not in get_args(SplitScheme):
        raise UserError(f"There is no way {scheme!r} to split a corpus: {nearest(scheme, list(get_args(SplitScheme)))}")
    if context < 1:
        raise UserError(f"A context of {context} tokens has no window: give at least 1.")
    names = [source.name for source in corpus.sources]
    shards = len(names) if shards is None else shards
    views = tuple(_cut_windows(source.train, context, source.name) for source in corpus.sources)
    sizes = [len(view) for view in views]
    if scheme == "source":
        if shards != len(names):
            raise UserError(
                f"Split by source, {len(names)} sources make {len(names)} shards, not {shards}: use iid or dirichlet."
            )
        return tuple(_shard(name, (view,), [np.arange(len(view))]) for name, view in zip(names, views, strict=True))
    if not 1 <= shards <= sum(sizes):
        raise UserError(
            f"{sum(sizes)} windows of {context} tokens cannot be dealt to {shards} shards: give 1 to {sum(sizes)} shards."
        )
    rng = np.random.default_rng([seed, _DEAL])
    windows_of_shards = _deal_evenly(sizes, shards, rng) if scheme == "iid" else _deal_unevenly(sizes, shards, alpha, rng)
    return tuple(_shard(f"{scheme}-{i}", views, members) for i, members in enumerate(windows_of_shards))


def _cut_windows(tokens: npt.NDArray[Any], context: int, name: str) -> npt.NDArray[Any]:
    """The tokens as a table with a window in each row; nothing is copied."""
    count = windows(tokens, context)
    if count < 1:
        raise UserError(
            f"The source {name!r} has {len(tokens)} training tokens, too few for one window of {context} + 1: "
            f"shorten the context or add text."
        )
    return np.lib.stride_tricks.sliding_window_view(np.asarray(tokens), context + 1)[::context]


def _shard(name: str, views: Sequence[npt.NDArray[Any]], members: Sequence[Indices]) -> Shard:
    indexed_views = [(view, np.sort(indices)) for view, indices in zip(views, members, strict=True) if len(indices)]
    counts = [len(indices) for _, indices in indexed_views]
    firsts = np.cumsum([0, *counts[:-1]])
    return Shard(
        name, sum(counts), tuple(view for view, _ in indexed_views), tuple(indices for _, indices in indexed_views), firsts
    )


def _deal_evenly(sizes: Sequence[int], shards: int, rng: np.random.Generator) -> list[list[Indices]]:
    """Shuffles all windows of all sources together and deals them. Returns the windows of each shard, by source."""
    firsts = np.cumsum([0, *sizes])
    hands = np.array_split(rng.permutation(firsts[-1]), shards)
    return [[hand[(hand >= a) & (hand < b)] - a for a, b in pairwise(firsts)] for hand in hands]


def _deal_unevenly(sizes: Sequence[int], shards: int, alpha: float, rng: np.random.Generator) -> list[list[Indices]]:
    if not (alpha > 0 and np.isfinite(alpha)):
        raise UserError(
            f"A Dirichlet split needs an alpha above 0, not {alpha}: small (0.1) for unequal shards, large (100) for equal ones."
        )
    counts = np.stack([_counts(size, shards, alpha, rng) for size in sizes])
    for empty in np.flatnonzero(counts.sum(axis=0) == 0):  # an empty shard gets one window from the shard that has most
        source, richest = divmod(int(np.argmax(np.where(counts.sum(axis=0) > 1, counts, 0))), shards)
        counts[source, richest] -= 1
        counts[source, empty] += 1
    hands = [np.split(rng.permutation(size), np.cumsum(row)[:-1]) for size, row in zip(sizes, counts, strict=True)]
    return [[hand[i] for hand in hands] for i in range(shards)]


def _counts(size: int, shards: int, alpha: float, rng: np.random.Generator) -> Indices:
    """How many of `size` windows each shard gets: Dirichlet shares, rounded where they add up."""
    shares = rng.dirichlet(np.full(shards, alpha))
    if not np.isfinite(shares).all():  # an alpha so small that the draw underflows: its limit is all to one
        shares = np.eye(shards)[rng.integers(shards)]
    ends = np.rint(np.cumsum(shares) * size).astype(np.int64)
    ends[-1] = size
    return np.diff(ends, prepend=0)


class EpochOrder:
    """The endless stream of a shard's windows: every epoch all of them once, in an order of its own."""

    def __init__(self, windows: int, seed: int, shard: int) -> None:
        self.windows, self.seed, self.shard = windows, seed, shard
        self._recent: dict[int, Indices] = {}

    def locate(self, positions: npt.NDArray[np.integer[Any]]) -> Indices:
        """The window at each position of the stream."""
        epochs, places = np.divmod(np.asarray(positions, dtype=np.int64), self.windows)
        windows = np.empty_like(places)
        for epoch in np.unique(epochs):
            epoch_mask = epochs == epoch
            windows[epoch_mask] = self._permutation(int(epoch))[places[epoch_mask]]
        return windows

    def _permutation(self, epoch: int) -> Indices:
        if epoch not in self._recent:
            rng = np.random.default_rng([self.seed, _ORDER, self.shard, epoch])
            while len(self._recent) > 1:  # a batch can straddle two epochs, and a redone round can step back by one
                self._recent.pop(min(self._recent))
            self._recent[epoch] = rng.permutation(self.windows)
        return self._recent[epoch]
