"""The round that a joined loop does next, as all its ranks must know it."""

from dataclasses import dataclass

from heloco.cluster.protocol.messages import Ended, RoundKey

NO_ROUND = RoundKey(0, 0, 0)
"""Stands for the round before the first one has begun."""


@dataclass(frozen=True)
class RoundPlan:
    """What every rank must know about the round that begins, or about the run's end."""

    key: RoundKey = NO_ROUND
    inner_steps: int = 0
    seat: int | None = None
    seats: int = 1
    progress: float = 0.0
    """How much of the run is done as the round begins, from 0 to 1."""
    planned_arrivals: int = 0
    """How many contributions the whole run will take in."""
    ended: Ended | None = None
    """How the run ended; None while it goes on."""
    clear_optimizer: bool = False
    """Whether the optimizer's state must be cleared."""
