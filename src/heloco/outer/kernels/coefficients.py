"""What decides a block's step once its sums Δ·Δ, m·m and Δ·m are known: numbers alone, in a fixed order that the kernels read.

lr, mu, gain             m = μm + gain·G, θ −= lr(G + μm)
weight, before, after    ρ, and the part of it that Δ is multiplied with before and after the correction
the correction's         every number that `CorrectionKnobs` declares. c_ok = −∞ keeps every block as it is.
ramp                     1 if reorient is "ramp"
"""

import math

from ..constants import CORRECTION

CONSTANTS = tuple(name for name, knob in CORRECTION.items() if knob.kind is float)
NAMES = ("lr", "mu", "gain", "weight", "before", "after", *CONSTANTS, "ramp")
Coefficients = tuple[float, ...]
"""One number for each of NAMES."""
_KEEP_ALL = {"c_ok": -math.inf, "eps": CORRECTION["eps"].default}
UNCORRECTED: Coefficients = (*(_KEEP_ALL.get(name, 0.0) for name in CONSTANTS), 0.0)
"""The last of them, from c_ok on, for G = ρΔ."""


def coefficients(
    step: Coefficients = (0.0, 0.0, 0.0), *, weight: float = 1.0, is_weighed_before: bool = False,
    correction: Coefficients = UNCORRECTED,
) -> Coefficients:  # fmt: skip
    """One number for each of NAMES. `step` is (lr, mu, gain), and `correction` has the numbers from c_ok on."""
    before, after = (weight, 1.0) if is_weighed_before else (1.0, weight)
    return (*step, weight, before, after, *correction)


def place(name: str) -> int:
    """The index of a coefficient in the table."""
    return NAMES.index(name)
