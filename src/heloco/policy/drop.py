"""Dropping contributions that are too stale."""

from dataclasses import dataclass
from typing import Literal

from heloco.errors import UserError, nearest

Decision = Literal["apply", "zero", "skip"]


@dataclass(frozen=True)
class Drop:
    """What happens to a contribution whose staleness is above `above`.

    zero   the paper's dropping: Δ is set to 0, so the momentum still decays and still moves θ, and the outer step counts;
    skip   m and θ stay as they are and no outer step is taken;
    never  everything is applied.
    """

    how: Literal["never", "zero", "skip"] = "never"
    above: int = 0

    def __post_init__(self) -> None:
        if self.how not in ("never", "zero", "skip"):
            raise UserError(f"There is no way of dropping called {self.how!r}; {nearest(self.how, ('never', 'zero', 'skip'))}")
        if self.above < 0:
            raise UserError(f"drop_above is {self.above}: staleness is never negative, so give a number ≥ 0.")

    def __call__(self, staleness: int) -> Decision:
        return self.how if self.how != "never" and staleness > self.above else "apply"
