"""A training script of nanoGPT's shape: its own GPT, its own text, AdamW, a cosine schedule, accumulation, clipping.

Three lines of it are heloco's, marked so. Where HELOCO_ADDRESS is not set they do nothing:

    python examples/plain_loop.py
    HELOCO_ADDRESS=https://head:8443 HELOCO_TOKEN=… python examples/plain_loop.py        # on each machine
"""

import argparse
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import heloco  # heloco

TEXT = """
Shall I compare thee to a summer's day? Thou art more lovely and more temperate: rough winds do shake the darling buds of May,
and summer's lease hath all too short a date; sometime too hot the eye of heaven shines, and often is his gold complexion dimm'd;
and every fair from fair sometime declines, by chance or nature's changing course untrimm'd; but thy eternal summer shall not
fade, nor lose possession of that fair thou ow'st; nor shall death brag thou wander'st in his shade, when in eternal lines to time
thou grow'st: so long as men can breathe or eyes can see, so long lives this, and this gives life to thee.
When, in disgrace with fortune and men's eyes, I all alone beweep my outcast state, and trouble deaf heaven with my bootless
cries, and look upon myself and curse my fate, wishing me like to one more rich in hope, featured like him, like him with friends
possess'd, desiring this man's art and that man's scope, with what I most enjoy contented least; yet in these thoughts myself
almost despising, haply I think on thee, and then my state, like to the lark at break of day arising from sullen earth, sings
hymns at heaven's gate; for thy sweet love remember'd such wealth brings that then I scorn to change my state with kings.
"""
LETTERS = sorted(set(TEXT))
CONTEXT, WIDTH, HEADS, LAYERS = 32, 48, 3, 2
BATCH, ACCUMULATE, CLIP = 8, 2, 1.0
LR, LR_MIN, WARMUP = 5e-3, 5e-4, 10


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.ln_1(x)).chunk(3, dim=-1))
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.ln_f = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, len(LETTERS), bias=False)
        self.head.weight = self.wte.weight
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(words) + self.wpe(torch.arange(words.shape[1], device=words.device))
        logits = self.head(self.ln_f(self.blocks(x)))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))


def learning_rate(step: int, steps: int) -> float:
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    progress = min(1.0, (step - WARMUP) / max(1, steps - WARMUP))
    return LR_MIN + 0.5 * (1 + math.cos(math.pi * progress)) * (LR - LR_MIN)


def train(address: Any = None, *, steps: int = 200, seed: int = 0, device: str = "cpu") -> tuple[nn.Module, list[float]]:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    data = torch.tensor([LETTERS.index(letter) for letter in TEXT])
    model = GPT().to(device)
    optimizer = optimizer_of(model)
    losses = []
    with heloco.join(address, model, optimizer) as run:  # heloco
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            total = 0.0
            for _ in range(ACCUMULATE):
                at = torch.randint(len(data) - CONTEXT, (BATCH,), generator=generator)
                window = torch.stack([data[i : i + CONTEXT + 1] for i in at]).to(device)
                loss = model(window[:, :-1], window[:, 1:]) / ACCUMULATE
                loss.backward()
                total += loss.item()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            run.report(total, samples=ACCUMULATE * BATCH)  # heloco: for the run's tape; may be left out
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(total)
            if step % 20 == 0:
                print(f"step {step}: loss {total:.3f}")
    return model, losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    trained, history = train(steps=arguments.steps, seed=arguments.seed, device=arguments.device)
    print(f"{len(history)} steps, the last loss is {history[-1]:.3f}")
