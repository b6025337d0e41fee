"""TinyGPT: a decoder-only transformer, pre-LayerNorm, fused qkv, exact GELU, biases, no dropout, PyTorch's initialisation."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heloco.errors import UserError, nearest
from heloco.task.attention import attend


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """The sizes of a TinyGPT."""

    width: int
    layers: int
    heads: int
    context: int
    vocab_size: int = 50257
    tied: bool = False
    """Whether the head shares the token embedding's weights."""

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "context", "vocab_size"):
            if getattr(self, name) < 1:
                raise UserError(f"The model's {name} is {getattr(self, name)}: give a number ≥ 1.")
        if self.width % self.heads:
            raise UserError(f"The model's width {self.width} is not a multiple of its {self.heads} heads: change one of them.")

    def build(self, seed: int) -> "TinyGPT":
        return build(self, seed)


TIED_STD = 0.02
"""GPT-2's, of both embeddings where the head shares the words'."""

PRESETS: dict[str, GPTConfig] = {
    "1m": GPTConfig(width=128, layers=5, heads=4, context=64, vocab_size=257),
    "5m": GPTConfig(width=256, layers=6, heads=8, context=256, vocab_size=257),
    "paper": GPTConfig(width=128, layers=8, heads=4, context=128),
    "30m": GPTConfig(width=384, layers=6, heads=6, context=256, tied=True),
    "60m": GPTConfig(width=512, layers=10, heads=8, context=512, tied=True),
    "124m": GPTConfig(width=768, layers=12, heads=12, context=1024, tied=True),
    "1.3b": GPTConfig(width=2048, layers=24, heads=16, context=2048, tied=True),
}


def preset(name: str, **changes: int | bool) -> GPTConfig:
    """The TinyGPT sizes of this name with `changes` to some of them. Raises UserError for an unknown name."""
    if name not in PRESETS:
        raise UserError(f"There is no model preset {name!r}; {nearest(name, list(PRESETS))}")
    return replace(PRESETS[name], **changes)  # type: ignore[arg-type]


class Block(nn.Module):
    """A transformer block: attention and a feed-forward layer, each after a LayerNorm and with a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        x = x + self.out(attend(qkv))
        output: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + output


class TinyGPT(nn.Module):
    """A small decoder-only transformer. Called with tokens, [batch, length], it returns logits."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        if config.tied:
            # as a head, PyTorch's N(0, 1) would start with logits of ±√width; and next to positions of that size, words of .02
            # would hardly be seen
            nn.init.normal_(self.token.weight, std=TIED_STD)
            nn.init.normal_(self.position.weight, std=TIED_STD)
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.trunk(tokens))
        return logits

    def trunk(self, tokens: Tensor) -> Tensor:
        """All but the head."""
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        hidden_states: Tensor = self.norm(x)
        return hidden_states


def build(config: GPTConfig, seed: int) -> TinyGPT:
    """The model with the parameters that this seed gives, whatever the global generator's state, which stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return TinyGPT(config)
