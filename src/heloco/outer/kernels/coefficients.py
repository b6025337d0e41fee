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


def coefficients(**values: float) -> Coefficients:
    """By name; those that are not given are 0."""
    return tuple(float(values.get(name, 0.0)) for name in NAMES)


def place(name: str) -> int:
    """Where a coefficient stands."""
    return NAMES.index(name)


UNCORRECTED = {"before": 1.0, "after": 1.0, "c_ok": -math.inf, "eps": CORRECTION["eps"].default}
"""G = ρΔ."""
