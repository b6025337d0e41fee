"""How long a machine may hold a round: by what was measured, not by what it says."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

FASTEST_OF_MEDIAN = 8.0
"""DyLU's reference is at most this many times as fast as the median machine: one that hands in rubbish at once sets no pace."""


@dataclass(frozen=True)
class RoundDeadline:
    """A round may take `patience` times what its steps usually take the machine, at least `floor_s` and at most `cap_s`.

    A machine that has not handed in anything yet is measured by the slowest of the others; where nobody has, the cap holds."""

    patience: float
    floor_s: float
    cap_s: float

    def __call__(self, steps: int, own_paces_s: Sequence[float], other_paces_s: Sequence[float]) -> float:
        """Seconds from handing out. Paces are measured seconds per inner step, transfers included."""
        paces = own_paces_s or other_paces_s
        if not paces:
            return self.cap_s
        return min(self.cap_s, max(self.floor_s, self.patience * steps * max(paces)))


def reference_pace(paces_s: Sequence[float]) -> float | None:
    """The pace that DyLU measures others by: the fastest one, within reason."""
    if not paces_s:
        return None
    return max(min(paces_s), statistics.median(paces_s) / FASTEST_OF_MEDIAN)
