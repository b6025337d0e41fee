"""Dropping contributions that are too stale."""

from dataclasses import dataclass
from typing import Literal

from heloco.errors import UserError, nearest

Decision = Literal["apply", "zero", "skip"]


@dataclass(frozen=True)
class Drop:
    """What happens to a contribution whose staleness is above `max_staleness`.

    zero   the paper's dropping: Δ is set to 0, so the momentum still decays and still moves θ, and the outer step counts;
    skip   m and θ stay as they are and no outer step is taken;
    never  everything is applied.
    """

    action: Literal["never", "zero", "skip"] = "never"
    max_staleness: int = 0

    def __post_init__(self) -> None:
        if self.action not in ("never", "zero", "skip"):
            raise UserError(
                f"There is no way of dropping called {self.action!r}; {nearest(self.action, ('never', 'zero', 'skip'))}"
            )
        if self.max_staleness < 0:
            raise UserError(f"drop_above is {self.max_staleness}: staleness is never negative, so give a number ≥ 0.")

    def __call__(self, staleness: int) -> Decision:
        return self.action if self.action != "never" and staleness > self.max_staleness else "apply"
