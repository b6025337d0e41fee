"""The shell around the outer rules: a `torch.optim.Optimizer` whose gradients are pseudo-gradients."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, overload

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from . import kernels
from .correction import Correction, Outcome, combine_all, law
from .kernels import Numbers

SLICE = 1 << 20


class NotFinite(ValueError):
    """A pseudo-gradient holds NaN or Inf (or numbers too large to square). Nothing was changed."""


@dataclass(slots=True)
class Blocks:
    """The blocks of one step, everything a rule needs to move them, column by column."""

    parameters: list[Tensor]
    momenta: list[Tensor]
    pseudo_gradients: list[Tensor]
    group_of: list[int]
    """The number of each block's parameter group."""
    laws: Numbers
    """The fields of `kernels.Law`, each a row with a number for each block."""
    sums: Numbers
    """Δ·Δ, m·m and Δ·m before the step, a row for each block."""
    a: Numbers
    """G = a·Δ + b·m, the arrival weight included."""
    b: Numbers

    def pick(self, indices: list[int]) -> "Blocks":
        p, m, u = ([column[i] for i in indices] for column in (self.parameters, self.momenta, self.pseudo_gradients))
        group_of = [self.group_of[i] for i in indices]
        return Blocks(p, m, u, group_of, self.laws[:, indices], self.sums[indices], self.a[indices], self.b[indices])


_plain_add_param_group = getattr(Optimizer.add_param_group, "__wrapped__", Optimizer.add_param_group)
"""Torch's own without what keeps its compiler out: that would be imported here for nothing, and takes 150 MB and a second."""


class OuterOptimizer(Optimizer):
    """Common to all outer rules: `p.grad` holds the pseudo-gradient Δ, `state[p]["momentum_buffer"]` the outer momentum m.

    After a step, `outcomes` tells for each block with a pseudo-gradient, in the order of the parameters, what was done to it, and
    `movements` how far it moved (‖θ_{t+1} − θ_t‖).
    """

    in_one_go: ClassVar[bool] = False
    """Whether the rule's whole step is `momentum_step`, which some kernels make together with the sums it is decided by."""
    outcomes: list[Outcome]
    movements: list[float]

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self.outcomes = []
        self.movements = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._check({**self.defaults, **param_group})
        _plain_add_param_group(self, param_group)

    def _check(self, group: dict[str, Any]) -> None:
        """Refuses a parameter group's settings outside their range."""
        lr, momentum = group["lr"], group["momentum"]
        if not 0 <= lr < math.inf:
            raise ValueError(f"lr is {lr!r}: the outer learning rate must be a finite number ≥ 0.")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum!r}: the outer momentum must lie in [0, 1).")

    @abstractmethod
    def _apply(self, blocks: Blocks, passes: kernels.Passes) -> list[float]:
        """The rule's equation: moves the parameters and momenta of all blocks, and says how far each parameter moved.

        `passes` are those over just these blocks, for rules that use them; one `in_one_go` may find its blocks moved.
        """

    def _correction(self, group: dict[str, Any]) -> Correction | None:  # noqa: ARG002
        return None

    def _gain(self, group: dict[str, Any]) -> float:  # noqa: ARG002
        """How much of G enters the momentum, for the rules with m = μm + gain·G."""
        return 1.0

    @overload
    def step(self, closure: None = None, *, weight: float = 1.0, pseudo_gradients: Sequence[Tensor] | None = None) -> None: ...
    @overload
    def step(
        self, closure: Callable[[], float], *, weight: float = 1.0, pseudo_gradients: Sequence[Tensor] | None = None
    ) -> float: ...

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        weight: float = 1.0,
        pseudo_gradients: Sequence[Tensor] | None = None,
    ) -> float | None:
        """One arrival. `weight` is ρ. Raises `NotFinite` and leaves everything as it was if a pseudo-gradient is not finite.

        `pseudo_gradients`, one for each parameter on whatever device and in whatever precision, take the place of `p.grad`.
        """
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight is {weight!r}: an arrival's weight must be a finite number ≥ 0.")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters, deltas, group_of = self._found() if pseudo_gradients is None else self._handed(pseudo_gradients)
        momenta = [m if (m := self.state[p].get("momentum_buffer")) is not None else self._first_momentum(p) for p in parameters]
        passes = kernels.Passes(parameters, momenta, deltas)
        if pseudo_gradients is not None and not (passes.alike and _fits(deltas[0], parameters[0])):  # as torch has them in p.grad
            deltas = [u if _fits(u, p) else u.to(p.device, p.dtype) for u, p in zip(deltas, parameters, strict=True)]
            passes = kernels.Passes(parameters, momenta, deltas)
        laws = [self._law(group, self._correction(group), weight) for group in self.param_groups]
        sums = passes.step(laws, group_of) if self.in_one_go else None
        if sums is None:
            sums = passes.statistics()
        finite = np.isfinite(sums[:, 0])
        if not finite.all():
            raise NotFinite(f"the pseudo-gradient of block {finite.argmin()} is not finite")
        of_blocks = np.array(laws, dtype=np.float64).T.take(group_of, axis=1)
        a, b, self.outcomes = combine_all(sums, of_blocks)
        self.movements = self._apply(Blocks(parameters, momenta, deltas, group_of, of_blocks, sums, a, b), passes)
        return loss

    def _found(self) -> tuple[list[Tensor], list[Tensor], list[int]]:
        """The parameters with a `p.grad`, these, and the number of each one's group."""
        found = [(p, u, i) for i, group in enumerate(self.param_groups) for p in group["params"] if (u := p.grad) is not None]
        return [p for p, _, _ in found], [u for _, u, _ in found], [i for _, _, i in found]

    def _handed(self, pseudo_gradients: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[int]]:
        """All parameters, their pseudo-gradients, and the number of each one's group."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        if list(map(_shape, parameters)) != list(map(_shape, pseudo_gradients)):
            raise ValueError("pseudo_gradients must be of the parameters' shapes, one for each parameter in their order.")
        return parameters, list(pseudo_gradients), [i for i, group in enumerate(self.param_groups) for _ in group["params"]]

    @torch.no_grad()
    def lookahead(self) -> list[Tensor]:
        """New tensors a worker starts from, one per parameter: θ, or θ − ημm for the rules that look ahead (Eq. dispatch)."""
        starts: list[Tensor] = []
        for group in self.param_groups:
            ahead = group["lr"] * group["momentum"] if group.get("lookahead") else 0.0
            momenta = [self.state[p].get("momentum_buffer") for p in group["params"]] if ahead else [None] * len(group["params"])
            starts += _ahead(group["params"], momenta, ahead)
        return starts

    @torch.no_grad()
    def lookahead_of(self, number: int) -> Iterator[Tensor]:
        """The same for one parameter, counted over all groups, in flat slices that share their memory: each is to be used before
        the next is asked for. Without look-ahead it is the parameter itself: look only."""
        group, p = [(group, p) for group in self.param_groups for p in group["params"]][number]
        ahead = group["lr"] * group["momentum"] if group.get("lookahead") else 0.0
        momentum = self.state[p].get("momentum_buffer") if ahead else None
        if momentum is None:
            yield p.detach()
        elif p.is_contiguous() and kernels.alike([p, momentum]) and not kernels.on_gpu(p):
            room = torch.empty(min(SLICE, p.numel()), dtype=p.dtype)
            for part, m in zip(p.detach().view(-1).split(SLICE), momentum.view(-1).split(SLICE), strict=True):
                yield torch.sub(part, m, alpha=ahead, out=room[: part.numel()])
        else:
            yield _ahead([p], [momentum], ahead)[0]

    def _law(self, group: dict[str, Any], correction: Correction | None, weight: float) -> kernels.Law:
        """How the blocks of a group move, in numbers alone."""
        return law(correction, weight)._replace(lr=group["lr"], mu=group["momentum"], gain=self._gain(group))

    def _first_momentum(self, p: Tensor) -> Tensor:
        """m as it is at first: zeros, at least in float32."""
        momentum = torch.zeros_like(p, dtype=_momentum_dtype(p), memory_format=torch.preserve_format)
        self.state[p]["momentum_buffer"] = momentum
        return momentum

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        # torch casts loaded state to the parameter's dtype; the momentum of a half-precision model is float32 and stays so
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for p, key in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    if isinstance(value, Tensor) and name != "step":
                        self.state[p][name] = value.detach().to(p.device, _momentum_dtype(p), copy=True)


_shape = attrgetter("shape")


def _fits(pseudo_gradient: Tensor, parameter: Tensor) -> bool:
    return pseudo_gradient.dtype is parameter.dtype and pseudo_gradient.device == parameter.device


def _momentum_dtype(p: Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32)


def _ahead(parameters: list[Tensor], momenta: list[Tensor | None], ahead: float) -> list[Tensor]:
    """θ − ahead·m of each block as a new tensor, or θ where there is no m. Blocks that are alike go together, on a GPU all."""
    held = [m for m in momenta if m is not None]
    if len(held) == len(parameters) and kernels.alike([*parameters, *held]):
        return list(torch._foreach_sub(parameters, held, alpha=ahead))
    parameters = [p.detach() for p in parameters]
    starts: dict[int, Tensor] = {}
    kinds: dict[tuple[torch.device, torch.dtype, torch.dtype | None], list[int]] = {}
    for i, (p, m) in enumerate(zip(parameters, momenta, strict=True)):
        if kernels.on_gpu(p) and type(p) is Tensor:
            kinds.setdefault((p.device, p.dtype, None if m is None else torch.promote_types(p.dtype, m.dtype)), []).append(i)
        else:
            starts[i] = p.clone() if m is None else p.clone().sub_(m, alpha=ahead)
    for (_, dtype, wide), indices in kinds.items():
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


def momentum_step(blocks: Blocks, passes: kernels.Passes) -> list[float]:
    """m = μm + gain·G, θ −= η(G + μm) for all blocks, with G = a·Δ + b·m. Returns how far each moved."""
    if not passes.moved:
        passes.update(np.array([blocks.a, blocks.b, *blocks.laws[:3]]).T)
    return momentum_step_lengths(blocks)


@np.errstate(all="ignore")
def momentum_step_lengths(blocks: Blocks) -> list[float]:
    """η‖G + μm_{t+1}‖ from the sums: G + μm_{t+1} = xΔ + ym with x = (1 + μ·gain) a and y = b + μ(μ + gain·b)."""
    (uu, mm, um), (lr, mu, gain) = blocks.sums.T, blocks.laws[:3]
    x, y = (1 + mu * gain) * blocks.a, blocks.b + mu * (mu + gain * blocks.b)
    square = x * x * uu + 2 * x * y * um + y * y * mm
    lengths: list[float] = (lr * np.sqrt(np.where(square > 0, square, 0.0))).tolist()
    return lengths
