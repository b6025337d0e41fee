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

        `passes` are those over just these blocks, for rules that use them; one with a `_gain` may find its blocks moved.
        """

    def _correction(self, group: dict[str, Any]) -> Correction | None:  # noqa: ARG002
        return None

    def _gain(self, group: dict[str, Any]) -> float | None:  # noqa: ARG002
        """How much of G enters the momentum, for a rule whose whole step is `momentum_step`; None for any other."""
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
        found = [(p, i) for i, group in enumerate(self.param_groups) for p in group["params"] if p.grad is not None]
        momenta = [self._momentum(p) for p, _ in found]
        pseudo_gradients = [p.grad for p, _ in found if p.grad is not None]
        passes = kernels.Passes([p for p, _ in found], momenta, pseudo_gradients)
        corrections = [self._correction(group) for group in self.param_groups]
        laws = [law for x, y in zip(self.param_groups, corrections, strict=True) if (law := self._law(x, y, weight))]
        sums = passes.step(laws, [i for _, i in found]) if len(laws) == len(corrections) else None
        if sums is None:
            sums = passes.statistics()
        for index, (uu, _, _) in enumerate(sums):
            if not math.isfinite(uu):
                raise NotFinite(f"the pseudo-gradient of block {index} is not finite")
        blocks, self.outcomes = [], []
        for (p, i), m, u, of_block in zip(found, momenta, pseudo_gradients, sums, strict=True):
            a, b, outcome = combine(*of_block, corrections[i], weight)
            blocks.append(Block(p, m, u, self.param_groups[i], a, b, of_block))
            self.outcomes.append(outcome)
        self.movements = self._apply(blocks, passes)
        return loss

    @torch.no_grad()
    def lookahead(self) -> list[Tensor]:
        """New tensors a worker starts from, one per parameter: θ, or θ − ημm for the rules that look ahead (Eq. dispatch)."""
        starts: list[Tensor] = []
        for group in self.param_groups:
            ahead = group["lr"] * group["momentum"] if group.get("lookahead") else 0.0
            momenta = [self.state[p].get("momentum_buffer") if ahead else None for p in group["params"]]
            starts += _ahead([p.detach() for p in group["params"]], momenta, ahead)
        return starts

    def _law(self, group: dict[str, Any], correction: Correction | None, weight: float) -> kernels.Law | None:
        """How the blocks of a group move, for kernels that find out a and b of G = a·Δ + b·m themselves."""
        gain = self._gain(group)
        if gain is None:
            return None
        neutral = kernels.NO_CORRECTION._replace(lr=group["lr"], mu=group["momentum"], gain=gain, weight=weight)
        if correction is None:
            return neutral
        before, after = (weight, 1.0) if correction.weigh == "before" else (1.0, weight)
        constants = {name: getattr(correction, name) for name in ("c_ok", "k_s", "k_d", "kappa", "beta_max", "eps", "c_bad")}
        return neutral._replace(before=before, after=after, ramp=correction.reorient == "ramp", **constants)

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


def _ahead(parameters: list[Tensor], momenta: list[Tensor | None], ahead: float) -> list[Tensor]:
    """θ − ahead·m of each block as a new tensor, or θ where there is no m. On a GPU a few launches do all of them."""
    starts: dict[int, Tensor] = {}
    alike: dict[tuple[torch.device, torch.dtype, torch.dtype | None], list[int]] = {}
    for i, (p, m) in enumerate(zip(parameters, momenta, strict=True)):
        if kernels.on_gpu(p) and type(p) is Tensor:
            alike.setdefault((p.device, p.dtype, None if m is None else torch.promote_types(p.dtype, m.dtype)), []).append(i)
        else:
            starts[i] = p.clone() if m is None else p.clone().sub_(m, alpha=ahead)
    for (_, dtype, wide), indices in alike.items():
        found = [parameters[i] for i in indices]
        if wide is None:
            found = _copies(found, dtype)
        else:  # in the momentum's precision if that is the higher one, with one rounding at the end
            found = found if wide is dtype else _copies(found, wide)
            found = list(torch._foreach_sub(found, [m for i in indices if (m := momenta[i]) is not None], alpha=ahead))
            found = found if wide is dtype else _copies(found, dtype)
        starts.update(zip(indices, found, strict=True))
    return [starts[i] for i in range(len(parameters))]


def _copies(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    made = [torch.empty_like(x, dtype=dtype) for x in tensors]
    torch._foreach_copy_(made, tensors)
    return made


def momentum_step(blocks: list[Block], gains: list[float], passes: kernels.Passes) -> list[float]:
    """m = μm + gain·G, θ −= η(G + μm) for all blocks, with G = a·Δ + b·m. Returns how far each moved."""
    if not passes.moved:
        passes.update([(x.a, x.b, x.group["lr"], x.group["momentum"], gain) for x, gain in zip(blocks, gains, strict=True)])
    return [momentum_step_length(block, gain) for block, gain in zip(blocks, gains, strict=True)]


def momentum_step_length(block: Block, gain: float) -> float:
    """η‖G + μm_{t+1}‖ from the sums: G + μm_{t+1} = xΔ + ym with x = (1 + μ·gain) a and y = b + μ(μ + gain·b)."""
    mu, (uu, mm, um) = block.group["momentum"], block.sums
    x, y = (1 + mu * gain) * block.a, block.b + mu * (mu + gain * block.b)
    return float(block.group["lr"] * math.sqrt(max(0.0, x * x * uu + 2 * x * y * um + y * y * mm)))
