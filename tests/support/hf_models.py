"""Tiny random Hugging Face models, no network. Importing this module skips the test file if transformers is not installed."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'heloco[hf]'")

from heloco.engine.build import build_task, load_model  # noqa: E402
from heloco.run import RunFolder  # noqa: E402
from support.runs import Done, assert_refused  # noqa: E402

COMMON = ("--context", "16", "--eval-windows", "4", "--inner-steps", "2", "--batch-size", "2", "--lr", "0.003")
SHORT = (*COMMON, "--arrivals", "8", "--paces", "1,1,6,6,6")
BYTES = ("--tokenizer", "bytes")


def gpt2_config(**changes: Any) -> Any:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 257}
    return transformers.GPT2Config(**{**sizes, "bos_token_id": 256, "eos_token_id": 256, **changes})


def llama_config(**changes: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 300}
    return transformers.LlamaConfig(**{**sizes, "num_key_value_heads": 2, "max_position_embeddings": 512, **changes})


def saved(config: Any, folder: Path) -> Path:
    """A random model with this config, saved."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def warnings_in(result: Done) -> list[str]:
    """What is on stderr beside the bars of the tokenising: of transformers' warnings and bars, nothing."""
    return [line for line in result.err.splitlines() if line.strip() and not line.startswith("tokenising ")]


def model_of(run: Path) -> Any:
    """The run's own model, as `heloco eval` has it."""
    folder = RunFolder.open(run)
    task, _ = build_task(folder.config())
    return load_model(task, folder.load_model()[1], torch.device("cpu")).eval()


def same_logits(ours: Any, theirs: Any, vocab_size: int, length: int = 16) -> None:
    tokens = torch.randint(vocab_size, (3, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        a, b = (getattr(output, "logits", output) for output in (ours(tokens), theirs(tokens)))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def reloaded(folder: Path) -> Any:
    """What transformers makes of the folder, complaining of nothing."""
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loaded.values()), loaded
    return model.eval()


def write_words(path: Path) -> None:
    """A tokenizer.json of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[UNK]", "der", "die", "das", "und", "ist", "nicht", "the", "of", "and", "to", "in", "</s>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(path))


def refused(around: Path, *arguments: str | Path, says: str) -> None:
    assert_refused(around, *arguments, says=says, cwd=around)
