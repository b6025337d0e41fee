"""The evaluations of a run: one line each."""

from msgspec import Struct

Measures = dict[str, float | None]
"""Name -> value: loss, bits_per_byte, accuracy. None if it is not finite."""


class EvaluationRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The scores of the outer model, and where the run was then."""

    arrival: int
    outer_step: int
    time_s: float
    inner_steps: int
    """Inner steps of all accepted contributions."""
    units: int
    """Tokens or samples of all accepted contributions, as run.json says."""
    mean: Measures
    """The mean of each measure over the sources."""
    scores: dict[str, Measures]
    """The measures of each source, by its name."""
    machine: str = ""
    """The machine that evaluated; empty if the synchronizer did."""
