"""The shell around the outer rules: a `torch.optim.Optimizer` whose gradients are pseudo-gradients."""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from . import kernels
from .correction import Correction, Outcome, combine


class NotFinite(ValueError):
    """A pseudo-gradient holds NaN or Inf (or numbers too large to square). Nothing was changed."""


class Block(NamedTuple):
    """One tensor in one step: everything a rule needs to move it."""

    parameter: Tensor
    momentum: Tensor
    pseudo_gradient: Tensor
    group: dict[str, Any]
    a: float
    """G = a·Δ + b·m, the arrival weight included."""
    b: float
    sums: tuple[float, float, float]
    """Δ·Δ, m·m and Δ·m before the step."""


class OuterOptimizer(Optimizer):
    """Common to all outer rules: `p.grad` holds the pseudo-gradient Δ, `state[p]["momentum_buffer"]` the outer momentum m.

    After a step, `outcomes` tells for each block with a pseudo-gradient, in the order of the parameters, what was done to it, and
    `movements` how far it moved (‖θ_{t+1} − θ_t‖).
    """

    outcomes: list[Outcome]
    movements: list[float]

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self.outcomes = []
        self.movements = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _check(self, group: dict[str, Any]) -> None:
        """Refuses a parameter group's settings outside their range."""
        lr, momentum = group["lr"], group["momentum"]
        if not 0 <= lr < math.inf:
            raise ValueError(f"lr is {lr!r}: the outer learning rate must be a finite number ≥ 0.")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum!r}: the outer momentum must lie in [0, 1).")

    @abstractmethod
    def _apply(self, blocks: list[Block], passes: kernels.Passes) -> list[float]:
        """The rule's equation: moves the parameters and momenta of all blocks, and says how far each parameter moved.

        `passes` are those over just these blocks, for the rules that can use them.
        """

    def _correction(self, group: dict[str, Any]) -> Correction | None:  # noqa: ARG002
        return None

    @overload
    def step(self, closure: None = None, *, weight: float = 1.0) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], *, weight: float = 1.0) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, *, weight: float = 1.0) -> float | None:
        """One arrival. `weight` is ρ. Raises `NotFinite` and leaves everything as it was if a pseudo-gradient is not finite."""
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight is {weight!r}: an arrival's weight must be a finite number ≥ 0.")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        momenta = [self._momentum(p) for p, _ in found]
        pseudo_gradients = [p.grad for p, _ in found if p.grad is not None]
        passes = kernels.Passes([p for p, _ in found], momenta, pseudo_gradients)
        sums = passes.statistics()
        for index, (uu, _, _) in enumerate(sums):
            if not math.isfinite(uu):
                raise NotFinite(f"the pseudo-gradient of block {index} is not finite")
        corrections = {id(group): self._correction(group) for group in self.param_groups}
        blocks, self.outcomes = [], []
        for (p, group), m, u, of_block in zip(found, momenta, pseudo_gradients, sums, strict=True):
            a, b, outcome = combine(*of_block, corrections[id(group)], weight)
            blocks.append(Block(p, m, u, group, a, b, of_block))
            self.outcomes.append(outcome)
        self.movements = self._apply(blocks, passes)
        return loss

    @torch.no_grad()
    def lookahead(self) -> list[Tensor]:
        """New tensors a worker starts from, one per parameter: θ, or θ − ημm for the rules that look ahead (Eq. dispatch)."""
        starts = []
        for group in self.param_groups:
            ahead = group["lr"] * group["momentum"] if group.get("lookahead") else 0.0
            for p in group["params"]:
                m = self.state[p].get("momentum_buffer") if ahead else None
                start = p.detach().clone()
                starts.append(start if m is None else start.sub_(m, alpha=ahead))
        return starts

    def _momentum(self, p: Tensor) -> Tensor:
        """m, made of zeros at first; at least float32."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p, dtype=_momentum_dtype(p), memory_format=torch.preserve_format)
        momentum: Tensor = state["momentum_buffer"]
        return momentum

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        # torch casts loaded state to the parameter's dtype; the momentum of a half-precision model is float32 and stays so
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for p, key in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    if isinstance(value, Tensor) and name != "step":
                        self.state[p][name] = value.detach().to(p.device, _momentum_dtype(p), copy=True)


def _momentum_dtype(p: Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32)


def momentum_step(blocks: list[Block], gains: list[float], passes: kernels.Passes) -> list[float]:
    """m = μm + gain·G, θ −= η(G + μm) for all blocks, with G = a·Δ + b·m. Returns how far each moved."""
    passes.update([(x.a, x.b, x.group["lr"], x.group["momentum"], gain) for x, gain in zip(blocks, gains, strict=True)])
    return [momentum_step_length(block, gain) for block, gain in zip(blocks, gains, strict=True)]


def momentum_step_length(block: Block, gain: float) -> float:
    """η‖G + μm_{t+1}‖ from the sums: G + μm_{t+1} = xΔ + ym with x = (1 + μ·gain) a and y = b + μ(μ + gain·b)."""
    mu, (uu, mm, um) = block.group["momentum"], block.sums
    x, y = (1 + mu * gain) * block.a, block.b + mu * (mu + gain * block.b)
    return float(block.group["lr"] * math.sqrt(max(0.0, x * x * uu + 2 * x * y * um + y * y * mm)))
