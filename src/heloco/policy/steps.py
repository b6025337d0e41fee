"""How many inner steps a round has."""

from collections.abc import Sequence

from heloco.errors import UserError, nearest

STEPS = ("constant", "dylu")


def inner_steps(name: str, steps: int, paces_s: Sequence[float]) -> list[int]:
    """Steps per worker: H for all, or with DyLU (dynamic local updates) max(1, round(H · fastest pace / own pace))."""
    if name not in STEPS:
        raise UserError(f"There is no inner-step policy {name!r}; {nearest(name, STEPS)}")
    if steps < 1:
        raise UserError(f"inner_steps is {steps}: a round needs at least one step.")
    if name == "constant":
        return [steps] * len(paces_s)
    fastest = min(paces_s)
    return [max(1, round(steps * fastest / pace)) for pace in paces_s]
