"""What is trained: models, data, tokenizers, sharding, evaluation. It knows no outer rules."""

from .base import Scores, ShardInfo, Task, mean_scores, to_device

__all__ = ["Scores", "ShardInfo", "Task", "mean_scores", "to_device"]
