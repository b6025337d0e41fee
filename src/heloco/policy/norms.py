"""A guard against contributions whose norm is far above the usual one: a machine that went wrong must not spoil the run.

What is usual is learnt from the last contributions. A worker's usual norm is the median of its last KEPT ones, and the run's is
the (lower) median of these over the workers, so that neither a frequent worker nor a single liar among three owns it. Norms are
divided by √H before they are compared, because rounds may differ in their number H of inner steps. A contribution may be

    ‖Δ‖ ≤ limit · max(usual, min(own, limit · usual))

What is above this bound is refused, or scaled down to the bound without its first `limit`, so that it counts as much as a usual
one. `own` is the worker's own usual norm: one that has larger contributions for good (its learning rate decays later, its data
differs) is not cut down to the others', up to limit times theirs. Each block has the same bound with its own usual norms, where
`usual` is at least what the block would have if all elements of the model moved alike: a block that hardly moves, such as a bias
without a gradient, says nothing by moving a little more.

What is remembered of an outlier is the bound that it broke. So if all norms change for good, by a factor of up to
limit · (1 + limit) / 2, the bound has followed after two contributions of each worker; a factor of limit³ takes six. Zeros say
nothing about the scale and are not remembered.

A model's buffers are guarded too, each by its own history: what counts is the largest distance from ours to the worker's, and
the bound is limit · usual. (With `own` in it, a liar would move our buffers ten times as far as the others bring them back, and
so make large distances usual.) An outlier moves the buffer by as much as is usual, or not at all if its Δ is one.

At first nothing is usual yet. Until ENOUGH norms of at least QUORUM workers are known, or of all workers if fewer take part, the
bound is ‖Δ‖ ≤ limit · ‖θ‖: a round that moves the model by ten times the model's own length is no training. (If θ = 0, √n stands
for ‖θ‖. A worker that is alone in the run has no more than KEPT norms, and they are enough.)
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from heloco.errors import UserError, nearest

KEPT, ENOUGH, QUORUM = 4, 8, 3
POLICIES = ("clip", "refuse")


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is to become of a contribution."""

    scales: Sequence[float] = ()
    """The factor of each block; empty: all are 1."""
    sentence: str = ""
    """For people: which norm is how far above its bound."""

    @property
    def is_outlier(self) -> bool:
        """Whether a norm is above its bound."""
        return self.smallest_scale < 1

    @property
    def smallest_scale(self) -> float:
        """The factor of the block that is scaled down most; 1 if none is."""
        return min(self.scales, default=1.0)


@dataclass(frozen=True, slots=True)
class NormGuard:
    """Judges contributions by their norms. With the policy `clip` an outlier is scaled down to the usual norm, and with `refuse`
    it is refused. An infinite `limit` means that there is no guard."""

    limit: float = math.inf
    policy: Literal["clip", "refuse"] = "clip"

    def __post_init__(self) -> None:
        if not self.limit > 1:
            raise UserError(f"norm_limit is {self.limit}: give a number above 1, or off.")
        if self.policy not in POLICIES:
            raise UserError(f"There is no norm_policy {self.policy!r}; {nearest(self.policy, POLICIES)}")

    @property
    def is_on(self) -> bool:
        """Whether there is a limit at all."""
        return self.limit < math.inf

    def judge(
        self,
        history: "NormHistory",
        worker: int,
        squares: Sequence[float],
        *,
        inner_steps: int,
        participants: int,
        model_norm: Callable[[], float],
    ) -> Judgement:
        """`squares` are the finite sums Δ·Δ of each block. `participants` is how many workers were handed a round so far.

        The norms, or the bounds that they break, enter the history.
        """
        norms = [math.sqrt(square) for square in squares]
        if not any(norms):
            return Judgement()
        usual = history.usual(participants)
        if usual is None:
            bounds = [self.limit * (model_norm() or math.sqrt(sum(history.sizes))), *[math.inf] * len(norms)]
            shrink = min(1.0, bounds[0] / _root_of_sum_of_squares(norms))
            capped_norms, reference = [norm * shrink for norm in norms], "the model's own norm"
        else:
            bounds = [bound * math.sqrt(inner_steps) for bound in self._bounds(history, worker, usual)]
            capped_norms, reference = list(map(min, norms, bounds[1:])), "the usual one"
        total = min(_root_of_sum_of_squares(capped_norms), bounds[0])
        history.remember(worker, [norm / math.sqrt(inner_steps) for norm in (total, *capped_norms)])
        scales = self._scales(norms, bounds)
        return Judgement() if min(scales) == 1 else Judgement(scales, self._sentence(norms, bounds, scales, reference))

    def judge_buffers(
        self, history: "NormHistory", worker: int, distances: Sequence[float], *, participants: int, at_first: Sequence[float]
    ) -> Judgement:
        """The judgement of a contribution's buffers. `distances` says how far each of them is from ours, and `at_first` what is
        usual as long as nothing is known."""
        if not any(distances):
            return Judgement()
        usual = (history.usual(participants) or [0.0] * (1 + len(distances)))[1:]
        least_distances = [distance or first for distance, first in zip(usual, at_first, strict=True)]
        bounds = [self.limit * x for x in least_distances]
        history.remember(worker, [1.0, *map(min, distances, bounds)])
        scales = [1.0 if d <= bound else bound / self.limit / d for d, bound in zip(distances, bounds, strict=True)]
        if min(scales) == 1:
            return Judgement()
        worst = scales.index(min(scales))
        times = distances[worst] / bounds[worst] * self.limit
        return Judgement(scales, f"its buffer {worst} moves by {distances[worst]:.4g}, {times:.4g} × the usual")

    def _scales(self, norms: list[float], bounds: list[float]) -> list[float]:
        """Blocks above their bounds are brought down to what is usual, and so is the whole, if it is still above its own."""
        scales = [1.0 if norm <= bound else bound / self.limit / norm for norm, bound in zip(norms, bounds[1:], strict=True)]
        total = _root_of_sum_of_squares([scale * norm for scale, norm in zip(scales, norms, strict=True)])
        whole = 1.0 if total <= bounds[0] else bounds[0] / self.limit / total
        return [scale * whole for scale in scales]

    def _sentence(self, norms: list[float], bounds: list[float], scales: list[float], reference: str) -> str:
        """About the worst block if others are as they were, else about the whole contribution."""
        if max(scales) == 1:
            worst = scales.index(min(scales))
            name, norm, bound = f"the norm of its block {worst}", norms[worst], bounds[1 + worst]
        else:
            name, norm, bound = "its norm", _root_of_sum_of_squares(norms), bounds[0]
        return f"{name}, {norm:.4g}, is {norm / bound * self.limit:.4g} × {reference}"

    def _bounds(self, history: "NormHistory", worker: int, usual: list[float]) -> list[float]:
        """Of the whole contribution, then of each block."""
        elements = max(1, sum(history.sizes))
        even_norms = [usual[0], *(usual[0] * math.sqrt(size / elements) for size in history.sizes)]
        least_norms = [max(pair) for pair in zip(usual, even_norms, strict=True)]
        worker_usual = history.medians_of(worker)
        return [self.limit * max(x, min(y, self.limit * x)) for x, y in zip(least_norms, worker_usual, strict=True)]


def make_guard(limit: "float | Literal['off']", policy: Literal["clip", "refuse"]) -> NormGuard:
    """The guard of a run with these settings norm_limit and norm_policy. Raises UserError if the limit is infinite: say off."""
    if limit == math.inf:
        raise UserError("norm_limit is inf: give a finite number above 1, or off.")
    return NormGuard(math.inf if limit == "off" else limit, policy)


class NormHistory:
    """The last norms of each worker: rows of the norm of all blocks together, then of each block; 0 where it says nothing."""

    def __init__(self, workers: int, sizes: Sequence[int]) -> None:
        """`sizes`: the number of elements of each block."""
        self.sizes = tuple(sizes)
        self._rows: list[deque[list[float]]] = [deque(maxlen=KEPT) for _ in range(workers)]
        self._medians = [[0.0] * (1 + len(self.sizes)) for _ in range(workers)]

    def usual(self, participants: int) -> list[float] | None:
        """The run's usual norms; None as long as too little is known."""
        medians = [median for median, rows in zip(self._medians, self._rows, strict=True) if rows]
        enough = min(ENOUGH, KEPT * participants)
        if sum(map(len, self._rows)) < enough or len(medians) < min(QUORUM, participants):
            return None
        return [_median_of_positive(column, statistics.median_low) for column in zip(*medians, strict=True)]

    def medians_of(self, worker: int) -> list[float]:
        """The medians of a worker's last norms, as `remember` got them; 0 where nothing is known."""
        return self._medians[worker]

    def remember(self, worker: int, norms: list[float]) -> None:
        """Adds the norms of a worker's contribution, of all blocks together and then of each, and forgets the oldest beyond
        `KEPT`."""
        rows = self._rows[worker]
        rows.append(norms)
        self._medians[worker] = [_median_of_positive(column, statistics.median) for column in zip(*rows, strict=True)]

    def rows(self) -> list[list[list[float]]]:
        """All norms that are remembered, by worker and the oldest first, for a checkpoint."""
        return [list(rows) for rows in self._rows]

    def load(self, rows: Sequence[Sequence[Sequence[float]]]) -> None:
        """Takes over the `rows` of another history. This one must be new."""
        for worker, worker_rows in enumerate(rows):
            for norms in worker_rows:
                self.remember(worker, list(norms))


def _median_of_positive(values: Sequence[float], median: Callable[[list[float]], float]) -> float:
    positive = [value for value in values if value > 0]
    return median(positive) if positive else 0.0


def _root_of_sum_of_squares(values: Sequence[float]) -> float:
    """The result is the same to the bit on every machine, because `fsum` rounds only once."""
    try:
        return math.sqrt(math.fsum(value * value for value in values))
    except OverflowError:
        return math.inf
