"""The options of `heloco.join`, as its loop keeps them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from heloco.cluster.client.loop_evaluation import LoopScores

ModelScorer = Callable[[nn.Module], LoopScores]
"""Scores a model."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `heloco.join`, which describes them."""

    token: str | None = None
    name: str | None = None
    reset_optimizer: bool = False
    stop_at_end: bool = True
    patience_s: float = 3600.0
    evaluate: ModelScorer | None = None
    tell: Callable[[str], Any] = print
