"""Hugging Face's Trainer on a tiny GPT-2 with random weights. The callback is heloco's; without HELOCO_ADDRESS it does nothing.

python examples/hf_trainer.py
HELOCO_ADDRESS=https://head:8443 HELOCO_TOKEN=… python examples/hf_trainer.py        # on each machine
"""

import tempfile
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import heloco

SENTENCE = b"The quick brown fox jumps over the lazy dog, and the dog sleeps on. "
CONTEXT = 32


def dataset() -> list[dict[str, torch.Tensor]]:
    text = torch.tensor(list(SENTENCE * 20))
    windows = [text[at : at + CONTEXT] for at in range(0, len(text) - CONTEXT, 7)]
    return [{"input_ids": window, "labels": window} for window in windows]


def train(address: Any = None, *, steps: int = 60, seed: int = 0) -> Trainer:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=128, n_positions=CONTEXT, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=8, learning_rate=1e-2, logging_steps=1, seed=seed,
            save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, lr_scheduler_type="cosine",
            dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=dataset(), callbacks=[heloco.HeLoCoCallback(address)])
        trainer.train()
    return trainer


if __name__ == "__main__":
    losses = [entry["loss"] for entry in train().state.log_history if "loss" in entry]
    print(f"{len(losses)} steps, the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
