"""Fewer points that look the same: long curves keep the lowest and the highest of each bucket."""

import math
from collections.abc import Sequence

POINTS = 2000
"""The most points of a line that are drawn; a page of many runs has fewer of each."""


def budget(runs: int) -> int:
    return max(200, min(POINTS, 4 * POINTS // max(1, runs)))


def thinned(y: Sequence[float], limit: int) -> list[int]:
    """The places of at most `limit` values that keep the outline: the first, the last, the lowest and highest of each bucket."""
    if len(y) <= limit:
        return list(range(len(y)))
    buckets = max(1, (limit - 2) // 2)
    places = {0, len(y) - 1}
    for i in range(buckets):
        bucket = [j for j in range(i * len(y) // buckets, (i + 1) * len(y) // buckets) if math.isfinite(y[j])]
        if bucket:
            places |= {min(bucket, key=y.__getitem__), max(bucket, key=y.__getitem__)}
    return sorted(places)


def note(longest: int, limit: int) -> list[str]:
    """The sentence under a chart whose lines were thinned."""
    if longest <= limit:
        return []
    return [
        f"Thinned: lines of up to {longest:,} points are drawn with the lowest and the highest of {(limit - 2) // 2:,} buckets."
    ]
