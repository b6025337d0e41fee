"""Next-token prediction on a prepared corpus, evaluated per source in nats per token and bits per byte."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heloco.errors import UserError
from heloco.seeds import derive
from heloco.task.base import Positions, Scores, ShardInfo
from heloco.task.corpus.prepare import Corpus
from heloco.task.corpus.sharding import EpochOrder, Shard
from heloco.task.gpt import GPTConfig, build

EVAL_BATCH_TOKENS = 4096


class LanguageTask:
    unit = "tokens"

    def __init__(
        self, corpus: Corpus, shards: Sequence[Shard], model: GPTConfig, *, context: int, seed: int, eval_windows: int = 64
    ) -> None:
        if corpus.vocab_size > model.vocab_size:
            raise UserError(
                f"The tokenizer {corpus.tokenizer_name} has {corpus.vocab_size} tokens and the model a vocabulary of "
                f"{model.vocab_size}: leave --vocab-size out, or give at least {corpus.vocab_size}."
            )
        if context > model.context:
            raise UserError(f"A context of {context} tokens does not fit the model's {model.context}: shorten --context.")
        self.corpus = corpus
        self.model_config = model
        self.context = context
        self.seed = seed
        self.shards = tuple(ShardInfo(shard.name, shard.windows) for shard in shards)
        self.digest = corpus.digest
        self._shards = shards
        self._orders = [EpochOrder(shard.windows, seed, i) for i, shard in enumerate(shards)]
        self._validation = {s.name: self._windows(s.name, s.val, eval_windows) for s in corpus.sources}

    def _windows(self, name: str, tokens: np.ndarray, at_most: int) -> Tensor:
        """Up to `at_most` windows spread evenly over the validation text."""
        count = (len(tokens) - 1) // self.context
        if count < 1:
            raise UserError(
                f"The validation text of {name!r} has {len(tokens)} tokens, too few for a context of {self.context}: "
                "give more text or a shorter --context."
            )
        picked = np.unique(np.linspace(0, count - 1, num=min(count, at_most)).astype(np.int64))
        return torch.from_numpy(
            np.stack([tokens[i * self.context : (i + 1) * self.context + 1] for i in picked]).astype(np.int64)
        )

    def build_model(self) -> nn.Module:
        return build(self.model_config, derive(self.seed, "model"))

    def batch(self, shard: int, positions: Positions) -> Tensor:
        return torch.from_numpy(self._shards[shard].gather(self._orders[shard].locate(positions)))

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def units(self, batch: Tensor) -> int:
        return batch.shape[0] * (batch.shape[1] - 1)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Scores:
        device = next(model.parameters()).device
        training = model.training
        model.eval()
        at_once = max(1, EVAL_BATCH_TOKENS // self.context)
        scores: Scores = {}
        for source in self.corpus.sources:
            windows = self._validation[source.name]
            parts = torch.split(windows, at_once)
            nats = sum(float(self.loss(model, part.to(device))) * len(part) for part in parts) / len(windows)
            tokens_per_byte = len(source.val) / source.val_bytes
            scores[source.name] = {"loss": nats, "bits_per_byte": nats * tokens_per_byte / math.log(2)}
        model.train(training)
        return scores
