"""`run(rounds) -> contributions`. It knows no outer rules and no time."""

from .options import InnerOptions, learning_rate
from .sequential import SequentialInner

__all__ = ["InnerOptions", "SequentialInner", "learning_rate"]
