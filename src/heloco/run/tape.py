"""The tape: one line per arrival with all that a later plot or replay needs.

There is no wall-clock time on it: a tape is a function of its config.

Per arrival:  arrival, verdict, time_s (virtual), start_s, outer_step, worker, round, version, staleness, weight, shard, spans,
              inner_steps, loss, last_loss, samples, units; code and reason where it was not simply applied (stale, norm, shapes,
              not-finite, buffers-not-finite), and clipped, the smallest factor of a block, where the norm guard scaled it down.
Per block:    blocks.case (one letter each: k|d|t|s for kept, damped, turned, skipped), .cosine, .confidence, .strength,
              .pseudo_gradient_norm, .momentum_norm, .movement, in the order of run.json's "blocks".
"""

import math
from typing import Any

from heloco.synchronizer import Arrival, Contribution

LETTERS = {"kept": "k", "damped": "d", "turned": "t", "skipped": "s"}


def record(
    arrival: Arrival, contribution: Contribution, *, time_s: float, start_s: float, numbers: bool = True
) -> dict[str, Any]:
    """The line of an arrival. Without `numbers` only the cases of its blocks are on it, for hundreds of runs at once."""
    line: dict[str, Any] = {
        "arrival": arrival.arrival,
        "verdict": arrival.verdict,
        "time_s": time_s,
        "start_s": start_s,
        "outer_step": arrival.outer_step,
        "worker": arrival.worker,
        "round": arrival.round,
        "version": arrival.version,
        "staleness": arrival.staleness,
        "weight": arrival.weight,
        "shard": arrival.shard,
        "spans": arrival.spans,
        "inner_steps": arrival.inner_steps,
        "loss": _number(contribution.loss),
        "last_loss": _number(contribution.last_loss),
        "samples": contribution.samples,
        "units": contribution.units,
    }
    if arrival.code:
        line |= {"code": arrival.code, "reason": arrival.reason}
    if arrival.clipped < 1:
        line["clipped"] = arrival.clipped
    outcomes = arrival.outcomes
    if outcomes:
        line["blocks"] = {"case": "".join(LETTERS[o.case] for o in outcomes)}
    if outcomes and numbers:
        line["blocks"] |= {
            "cosine": [_short(o.cosine) for o in outcomes],
            "confidence": [_short(o.confidence) for o in outcomes],
            "strength": [_short(o.strength) for o in outcomes],
            "pseudo_gradient_norm": [_short(o.pseudo_gradient_norm) for o in outcomes],
            "momentum_norm": [_short(o.momentum_norm) for o in outcomes],
            "movement": [_short(m) for m in arrival.movements],
        }
    return line


def _number(value: float | None) -> float | None:
    """JSON has no NaN: a loss that is none is null."""
    return value if value is not None and math.isfinite(value) else None


def _short(value: float | None) -> float | None:
    """Six significant digits are more than a plot needs and keep the tape small."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")
