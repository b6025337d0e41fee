"""What is decided about an arrival or a round without looking at a tensor."""

from .drop import Decision, Drop
from .norms import Judgement, NormGuard, NormHistory, make_guard
from .shards import CHOICES, Choose, ShardView, make_choice
from .steps import STEPS, inner_steps
from .weight import WEIGHTS, Standing, Weight, make_weight

__all__ = [
    "CHOICES",
    "STEPS",
    "WEIGHTS",
    "Choose",
    "Decision",
    "Drop",
    "Judgement",
    "NormGuard",
    "NormHistory",
    "ShardView",
    "Standing",
    "Weight",
    "inner_steps",
    "make_choice",
    "make_guard",
    "make_weight",
]
