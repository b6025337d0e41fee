"""`run(rounds) -> contributions`. It knows no outer rules and no time."""

from .options import InnerOptions, learning_rate
from .own_optimizers import INNER_OPTIMIZERS, register_inner_optimizer
from .sequential import SequentialInner

__all__ = ["INNER_OPTIMIZERS", "InnerOptions", "SequentialInner", "learning_rate", "register_inner_optimizer"]
