"""The outer rules, one paper formula a file: `torch.optim.Optimizer` shells over pure functions."""

from .correction import CASES, Case, Correction, Outcome, correct, examine
from .delayed_nesterov import DelayedNesterov
from .heloco import HeLoCo
from .mla import MLA
from .nesterov import Nesterov
from .optimizer import NotFinite, OuterOptimizer, ScaleBlocks

__all__ = [
    "CASES",
    "MLA",
    "Case",
    "Correction",
    "DelayedNesterov",
    "HeLoCo",
    "Nesterov",
    "NotFinite",
    "Outcome",
    "OuterOptimizer",
    "ScaleBlocks",
    "correct",
    "examine",
]
