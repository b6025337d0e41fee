"""What is decided about an arrival or a round without looking at a tensor."""

from .drop import Decision, Drop
from .norms import Judgement, NormGuard, NormHistory, make_guard
from .shards import SHARD_POLICIES, Choose, ShardView, make_choice, register_shards
from .steps import STEPS, inner_steps
from .weight import WEIGHTS, ArrivalCounts, Weight, make_weight, register_weight, weight_knobs

__all__ = [
    "SHARD_POLICIES",
    "STEPS",
    "WEIGHTS",
    "ArrivalCounts",
    "Choose",
    "Decision",
    "Drop",
    "Judgement",
    "NormGuard",
    "NormHistory",
    "ShardView",
    "Weight",
    "inner_steps",
    "make_choice",
    "make_guard",
    "make_weight",
    "register_shards",
    "register_weight",
    "weight_knobs",
]
