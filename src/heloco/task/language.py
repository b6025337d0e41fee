"""Next-token prediction on a prepared corpus, evaluated per source in nats per token and bits per byte."""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heloco.corpus.prepare import Corpus
from heloco.corpus.sharding import EpochOrder, Shard
from heloco.errors import UserError
from heloco.seeds import derive
from heloco.task.base import Positions, Scores, ShardInfo
from heloco.task.gpt import GPTConfig, TinyGPT
from heloco.task.head import cross_entropy, fusable
from heloco.task.hf import HFModel, logits_of
from heloco.task.hf_adapter import HFAdapter
from heloco.task.wide_head import mean_cross_entropy, split

EVAL_BATCH_TOKENS = 4096
EVAL_BATCH_LOGITS = EVAL_BATCH_TOKENS << 16  # 1 GB: fewer tokens at once where the vocabulary is very large


class Architecture(Protocol):
    """A model before it is built: TinyGPT of some size, one of Hugging Face's, or an adapter of one."""

    @property
    def context(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...

    def build(self, seed: int) -> nn.Module:
        """The model with the parameters that this seed gives, in float32. Called with tokens it returns logits, or what holds
        them as `.logits`."""


class LanguageTask:
    """Predicts the next token. The shards are parts of a prepared corpus, and the validation text is evaluated by source."""

    unit = "tokens"

    def __init__(
        self, corpus: Corpus, shards: Sequence[Shard], model: Architecture, *, context: int, seed: int, eval_windows: int = 64
    ) -> None:
        if corpus.vocab_size > model.vocab_size:
            ours = isinstance(model, GPTConfig)
            remedy = (
                f"leave --vocab-size out, or give at least {corpus.vocab_size}" if ours else "give the model's own --tokenizer"
            )
            raise UserError(
                f"The tokenizer {corpus.tokenizer_name} has {corpus.vocab_size} tokens and the model a vocabulary of "
                f"{model.vocab_size}: {remedy}."
            )
        if context > model.context:
            raise UserError(f"A context of {context} tokens does not fit the model's {model.context}: shorten --context.")
        self.corpus = corpus
        self.model_config = model
        self.context = context
        self.seed = seed
        self.shards = tuple(ShardInfo(shard.name, shard.windows) for shard in shards)
        self.digest = corpus.digest
        self.token_shards = shards
        self._orders = [EpochOrder(shard.windows, seed, i) for i, shard in enumerate(shards)]
        held_out = [self._windows(source.name, source.val, eval_windows) for source in corpus.sources]
        self._validation, self._validation_counts = torch.cat(held_out), [len(windows) for windows in held_out]

    def _windows(self, name: str, tokens: np.ndarray, at_most: int) -> Tensor:
        """Up to `at_most` windows spread evenly over the validation text."""
        count = (len(tokens) - 1) // self.context
        if count < 1:
            raise UserError(
                f"The validation text of {name!r} has {len(tokens)} tokens, too few for a context of {self.context}: "
                "give more text or a shorter --context."
            )
        window_indices = np.unique(np.linspace(0, count - 1, num=min(count, at_most)).astype(np.int64))
        return torch.from_numpy(
            np.stack([tokens[i * self.context : (i + 1) * self.context + 1] for i in window_indices]).astype(np.int64)
        )

    @property
    def model_digest(self) -> str:
        """Identifies a model that is described outside of the run's config; empty for one that is not."""
        return self.model_config.digest if isinstance(self.model_config, HFModel | HFAdapter) else ""

    def build_model(self) -> nn.Module:
        return self.model_config.build(derive(self.seed, "model"))

    def batch(self, shard: int, positions: Positions) -> Tensor:
        return torch.from_numpy(self.token_shards[shard].gather(self._orders[shard].locate(positions)))

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        inputs, targets = batch[:, :-1], batch[:, 1:].flatten()
        if (parts := split(model)) is None:
            return F.cross_entropy(logits_of(model(inputs)).flatten(0, 1), targets)
        trunk, head = parts
        return mean_cross_entropy(trunk(inputs).flatten(0, 1), head.weight, targets)

    def units(self, batch: Tensor) -> int:
        return batch.shape[0] * (batch.shape[1] - 1)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Scores:
        """All sources' windows in one go, in as few pieces as memory likes, and one transfer of the results."""
        device = next(model.parameters()).device
        if self._validation.device != device:
            self._validation = self._validation.to(device)
        training = model.training
        model.eval()
        window_losses = torch.cat([_window_losses(model, part) for part in torch.split(self._validation, self._at_once(model))])
        by_source = torch.split(window_losses, self._validation_counts)
        nats = torch.stack([losses.mean() for losses in by_source]).tolist()
        model.train(training)
        scores: Scores = {}
        for source, loss in zip(self.corpus.sources, nats, strict=True):
            tokens_per_byte = len(source.val) / source.val_bytes
            scores[source.name] = {"loss": loss, "bits_per_byte": loss * tokens_per_byte / math.log(2)}
        return scores

    def _at_once(self, model: nn.Module) -> int:
        """Windows per piece: many where the logits are never held."""
        batch_tokens = min(EVAL_BATCH_TOKENS, EVAL_BATCH_LOGITS // self.model_config.vocab_size)
        tokens = EVAL_BATCH_TOKENS * 32 if _fused_head(model) else batch_tokens
        return max(1, tokens // self.context)


def _fused_head(model: nn.Module) -> bool:
    return isinstance(model, TinyGPT) and fusable(model.head.weight[None, :1], model.head.weight[None])


def _window_losses(model: nn.Module, windows: Tensor) -> Tensor:
    """The mean loss of each window."""
    inputs, targets = windows[:, :-1], windows[:, 1:]
    if isinstance(model, TinyGPT):
        losses = cross_entropy(model.trunk(inputs).flatten(0, 1)[None], model.head.weight[None], targets.reshape(1, -1))
    else:
        losses = F.cross_entropy(logits_of(model(inputs)).flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view(targets.shape).mean(1)
