"""Hugging Face's Trainer with a tiny model, for tests of runs that it takes part in."""

from pathlib import Path
from typing import Any

import torch

WINDOWS = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 8
BACKWARDS = [{"input_ids": torch.arange(16).flip(0), "labels": torch.arange(16).flip(0)}] * 4


def trainer(folder: Path, callback: Any, eval_dataset: Any = WINDOWS, **arguments: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    settings = {"max_steps": 1000, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1}
    quiet = {"save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False}
    return transformers.Trainer(
        transformers.GPT2LMHeadModel(config),
        transformers.TrainingArguments(output_dir=str(folder), **{**settings, **quiet, **arguments}),
        train_dataset=WINDOWS,
        eval_dataset=eval_dataset,
        callbacks=[callback],
    )
