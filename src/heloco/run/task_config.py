"""The settings of what is trained: a run's sections [input] and [model]."""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from heloco.errors import UserError
from heloco.task import BUILT_IN_TASKS
from heloco.task.gpt import GPTConfig, preset


@dataclass(frozen=True, kw_only=True)
class InputConfig:
    """What is trained, and on which data."""

    task: str = "language"
    """What is trained: a language model on text, an image classifier on shapes drawn by code, whatever machines bring
    (external), or a task of your own by its name."""
    data: str = "builtin"
    """The text: builtin (languages made by code), a folder with one file or sub-folder of text per shard, or hf:DATASET."""
    tokenizer: str = ""
    """The tokenizer: bytes, gpt2, or the path of a tokenizer.json or .tiktoken file; unset: the hf model's own, else bytes."""
    languages: list[str] = field(default_factory=list)
    """Which sources of the data to use, in this order; empty: all."""
    split: Literal["source", "iid", "dirichlet"] = "source"
    """How training data is dealt to shards: one source each (non-IID), mixed (IID), or Dirichlet(alpha)."""
    alpha: float = 0.5
    """The Dirichlet split's concentration: small is uneven, large is even."""
    field: str = "text"
    """The field of .jsonl rows, the column of .parquet files, that holds the text."""
    limit_mb: float = 20.0
    """How much text to stream per source from hf: datasets."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model of a language task."""

    preset: str = "1m"
    """The TinyGPT size: 1m, 5m, paper, 30m, 60m, 124m, 1.3b."""
    width: int = 0
    """Embedding width; 0: the preset's."""
    layers: int = 0
    """Transformer blocks; 0: the preset's."""
    heads: int = 0
    """Attention heads; 0: the preset's."""
    vocab_size: int = 0
    """The vocabulary size of a TinyGPT; 0: the tokenizer's."""
    context: int = 0
    """Tokens per sample; 0: the preset's, or of an hf model 128, at most its positions."""
    eval_windows: int = 64
    """Samples per source in an evaluation."""
    hf: str = ""
    """A folder or hub name (NAME, NAME@REVISION) of a Hugging Face causal language model to train instead of TinyGPT: from its
    weights, or from scratch where the folder has only a config.json."""
    lora: int | None = None
    """The rank of a low-rank adapter (LoRA) for the hf model, which is frozen then: the adapter alone is trained and sent. Unset:
    the model itself is trained."""
    lora_alpha: float | None = None
    """The adapter's α: its output is multiplied by α/rank. Unset: twice the rank, so that this factor is 2 for any rank and the
    learning rate need not change with it."""
    lora_targets: list[str] | None = None
    """The layers that get an adapter, by the ends of their names, e.g. q_proj,v_proj. Unset: all linear layers but the head."""


def gpt_config(model: ModelConfig) -> GPTConfig:
    """The sizes of the TinyGPT that these settings describe: the preset's, with the settings that are not 0 in their place."""
    sizes = ("width", "layers", "heads", "context", "vocab_size")
    return preset(model.preset, **{name: getattr(model, name) for name in sizes})


def resolve_model(config: ModelConfig, data: InputConfig) -> ModelConfig:
    """The effective settings of the model: checked, and with the preset's sizes filled in."""
    if data.task not in BUILT_IN_TASKS:
        return config
    if data.task == "images":
        for section, default in ((data, InputConfig(task="images", tokenizer="bytes")), (config, ModelConfig())):
            for name, value in asdict(default).items():
                if getattr(section, name) != value:
                    raise UserError(f"{name} is a setting of the language task: leave it out, or leave out --task images.")
        return config
    if config.eval_windows < 1:
        raise UserError(f"eval_windows is {config.eval_windows}: an evaluation needs at least one sample per source.")
    config = _resolve_adapter(config)
    if config.hf:
        for name in ("preset", "width", "layers", "heads", "vocab_size"):
            if getattr(config, name) not in ("", getattr(ModelConfig(), name)):
                raise UserError(f"{name} is a setting of TinyGPT, but hf is {config.hf}: leave one of them out.")
        return replace(config, preset="")
    base = preset(config.preset)
    sizes = ("width", "layers", "heads", "context")
    return replace(config, **{name: getattr(config, name) or getattr(base, name) for name in sizes})


def _resolve_adapter(config: ModelConfig) -> ModelConfig:
    if config.lora is None:
        for name in ("lora_alpha", "lora_targets"):
            if getattr(config, name) is not None:
                raise UserError(f"{name} is a setting of an adapter: give its rank with --lora, or leave {name} out.")
        return config
    if not config.hf:
        raise UserError("lora is the rank of an adapter for a Hugging Face model: give the model with --hf, or leave lora out.")
    if config.lora < 1:
        raise UserError(f"lora is {config.lora}: give the adapter's rank, a number ≥ 1.")
    alpha = 2.0 * config.lora if config.lora_alpha is None else config.lora_alpha
    if not 0 < alpha < math.inf:
        raise UserError(f"lora_alpha is {alpha}: give a finite number above 0.")
    return replace(config, lora_alpha=alpha)
