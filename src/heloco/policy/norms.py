"""What happens to a contribution whose norm is far outside the recent ones."""

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from heloco.errors import UserError, nearest

RECENT, ENOUGH = 32, 8


@dataclass
class NormGuard:
    """Compares ‖Δ‖ with the median of the last 32 that were taken; the first 8 are only looked at.

    refuse  above `limit` × the median the contribution is refused, and its data goes back to the ledger;
    clip    it is scaled down to `limit` × the median, and that is what is remembered of it.
    """

    limit: float = math.inf
    how: Literal["refuse", "clip"] = "refuse"
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def __post_init__(self) -> None:
        if not self.limit > 1:
            raise UserError(f"norm_limit is {self.limit}: give a number above 1, so many times the usual norm, or leave it out.")
        if self.how not in ("refuse", "clip"):
            raise UserError(f"There is no norm_policy {self.how!r}; {nearest(self.how, ('refuse', 'clip'))}")

    @property
    def on(self) -> bool:
        return self.limit < math.inf

    @property
    def clips(self) -> bool:
        """A contribution that is clipped is copied."""
        return self.on and self.how == "clip"

    def scale(self, norm: float) -> float:
        """1: as it is; 0: refuse it; else the factor to scale it with."""
        if len(self.recent) >= ENOUGH and norm > (most := self.limit * statistics.median(self.recent)):
            if self.how == "refuse":
                return 0.0
            self.recent.append(most)
            return most / norm
        self.recent.append(norm)
        return 1.0

    def remember(self, norms: Iterable[float]) -> None:
        self.recent = deque(norms, maxlen=RECENT)
