"""Outer rules written out in plain float64 torch, and blocks with a given cosine."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from heloco.outer import OuterOptimizer
from heloco.outer.delayed_nesterov import delayed_nesterov_step
from heloco.outer.heloco import heloco_start, heloco_step
from heloco.outer.mla import mla_step
from heloco.outer.nesterov import nesterov_step

F64 = torch.float64


VARIANTS = [{"reorient": r, "weigh": w} for r in ("printed", "ramp") for w in ("after", "before")]


COSINES = [-1.0, -0.7, -1e-9, 1e-9, 0.1, 0.1999999, 0.2000001, 0.6, 1.0]
"""Each case, and both sides of where one case ends and the next begins."""


def pair(cosine: float, u_norm: float, m_norm: float, shape: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    """A pseudo-gradient and a momentum of these norms at this cosine."""
    generator = torch.Generator().manual_seed(seed)
    v, w = (torch.randn(shape, dtype=F64, generator=generator) for _ in range(2))
    v /= v.norm()
    w -= (w * v).sum() * v
    w /= w.norm()
    return u_norm * (cosine * v + math.sqrt(1 - cosine**2) * w), m_norm * v


def feed(params: list[Tensor], deltas: list[Tensor]) -> None:
    for p, delta in zip(params, deltas, strict=True):
        p.grad = delta.clone(memory_format=torch.preserve_format)


def run(
    optimizer: OuterOptimizer | torch.optim.Optimizer, params: list[Tensor], deltas: list[list[Tensor]], **step: Any
) -> list[Tensor]:
    for delta in deltas:
        feed(params, delta)
        optimizer.step(**step)
    return [p.detach().clone() for p in params]


def momenta(optimizer: torch.optim.Optimizer, params: list[Tensor]) -> list[Tensor]:
    return [optimizer.state[p]["momentum_buffer"] for p in params]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Equal to the bit."""
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


def assert_near(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Equal up to the roundings of a few steps over numbers of order 1 to 10."""
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)


STEPS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {"nesterov": nesterov_step, "mla": mla_step, "heloco": heloco_step}


class Equations:
    """One block under one rule, by the rule's pure function."""

    def __init__(self, rule: str, theta: Tensor, lr: float = 0.7, momentum: float = 0.9, **constants: Any) -> None:
        self.rule, self.lr, self.mu, self.constants = rule, lr, momentum, constants
        self.theta, self.m = theta.detach().clone(), torch.zeros_like(theta)
        self.total, self.t = torch.zeros_like(theta), 0

    def arrive(self, delta: Tensor, rho: float = 1.0) -> None:
        knobs = {"lr": self.lr, "momentum": self.mu, **self.constants}
        if self.rule == "delayed":
            self.t += 1
            moved = delayed_nesterov_step(self.theta, self.m, self.total, delta, rho, self.t, **knobs)
            self.theta, self.m, self.total = moved
        else:
            self.theta, self.m = STEPS[self.rule](self.theta, self.m, delta, rho, **knobs)

    def lookahead(self) -> Tensor:
        return heloco_start(self.theta, self.m, lr=self.lr, momentum=self.mu)


GROUPS: list[dict[str, Any]] = [
    {"lr": 0.5, "momentum": 0.8, "c_ok": 0.9, "k_s": 2.0, "kappa": 1.0},
    {"lr": 0.1, "reorient": "ramp", "k_d": 3.0, "c_bad": -0.5, "beta_max": 0.1},
    {"momentum": 0.0, "weigh": "before", "eps": 0.5},
]


def grouped(params: list[Tensor], groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"params": params[i :: len(groups)], **settings} for i, settings in enumerate(groups)]
