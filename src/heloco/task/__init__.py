"""What is trained: models, data, tokenizers, sharding, evaluation. It knows no outer rules."""

from .base import BUILT_IN_TASKS, TASKS, Scores, ShardInfo, Task, batch_size, check_scores, mean_scores, register_task, to_device

__all__ = [
    "BUILT_IN_TASKS", "TASKS", "Scores", "ShardInfo", "Task", "batch_size", "check_scores", "mean_scores", "register_task",
    "to_device",
]  # fmt: skip
