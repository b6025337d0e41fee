"""Numbers as JSON can hold them. JSON has no NaN and no infinity: null stands for both."""

import math
from collections.abc import Mapping


def finite_or_none(value: float | None) -> float | None:
    """The number, or None if it is NaN or infinite."""
    return value if value is not None and math.isfinite(value) else None


def finite_measures(measures: Mapping[str, float]) -> dict[str, float | None]:
    """The values of an evaluation's measures by name. They may be NumPy's."""
    return {name: finite_or_none(float(value)) for name, value in measures.items()}


def shorten_number(value: float | None, digits: int) -> float | None:
    """The number with this many significant digits, to keep a file small."""
    value = finite_or_none(value)
    return None if value is None else float(f"{value:.{digits}g}")
