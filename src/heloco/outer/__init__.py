"""The outer rules, one a file: its equation as a pure function, and a `torch.optim.Optimizer` around the kernels."""

from .correction import CASES, Case, Outcome, correct, examine
from .delayed_nesterov import DelayedNesterov
from .function_rule import FunctionRule, RuleFunction, make_rule
from .heloco import HeLoCo
from .mla import MLA
from .nesterov import Nesterov
from .optimizer import NotFinite, OuterOptimizer, ScaleBlocks

__all__ = [
    "CASES",
    "MLA",
    "Case",
    "DelayedNesterov",
    "FunctionRule",
    "HeLoCo",
    "Nesterov",
    "NotFinite",
    "Outcome",
    "OuterOptimizer",
    "RuleFunction",
    "ScaleBlocks",
    "correct",
    "examine",
    "make_rule",
]
