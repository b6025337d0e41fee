"""The evaluations of a run: one line each."""

from msgspec import Struct

Measures = dict[str, float | None]
"""Name -> value: loss, bits_per_byte, accuracy. None if it is not finite."""


class EvaluationRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The scores of the run's model, and where the run was then; or of a machine's own model (`own_steps`)."""

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
    own_steps: int = 0
    """Inner steps that the machine had made since this arrival, if it evaluated its own model; 0 for the run's model."""

    @property
    def is_of_run(self) -> bool:
        """Whether the run's own parameters were evaluated, and not those of one machine within its round."""
        return not self.own_steps
