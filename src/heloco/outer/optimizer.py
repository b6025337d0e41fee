"""The shell around the outer rules: a `torch.optim.Optimizer` whose gradients are pseudo-gradients."""

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar, overload

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from heloco.dtypes import CAN_BE_TRAINED, HALF, TRAINABLE
from heloco.knobs import Knobs, declared_knobs, describe_knobs, fill_knobs, knobs_of_signature

from . import kernels
from .correction import Outcome, combine_all
from .kernels import Numbers
from .kernels.coefficients import Coefficients, coefficients
from .kernels.windows import Block, Release, brought_to
from .masters import master_of, round_masters

SLICE = 1 << 15
"""Elements of a start that are computed at once: as many as torch computes on one thread. With more, each operation waits for
a second thread, and that takes seconds in all if another process, such as an evaluation, has the second core."""
LARGEST_SQUARE = {dtype: torch.finfo(dtype).max for dtype in (torch.float32, torch.float64)}
"""The largest ‖Δ‖² of a block, by the precision of its momentum. A larger one could overflow in the step."""
ScaleBlocks = Callable[[Numbers], Sequence[float]]
"""Δ·Δ of each block -> the factor to scale each with; empty: all stay as they are."""


class NotFinite(ValueError):
    """A pseudo-gradient holds NaN or Inf (or numbers too large to square). Nothing was changed."""


@dataclass(slots=True)
class Blocks:
    """The blocks of one step, everything a rule needs to move them, column by column."""

    parameters: list[Tensor]
    """What the rule moves: the model's parameters, or the masters of those in half precision."""
    momenta: list[Tensor]
    pseudo_gradients: Sequence[Block]
    states: list[dict[str, Any]]
    """The optimizer's state of each parameter."""
    group_of: list[int]
    """The number of each block's parameter group."""
    coefficients: Numbers
    """A row for each of `kernels.coefficients.NAMES`, with a number for each block."""
    sums: Numbers
    """Δ·Δ, m·m and Δ·m before the step, a row for each block."""
    a: Numbers
    """G = a·Δ + b·m, the arrival weight included."""
    b: Numbers
    release: Release | None = None
    """Gives back what was read of pseudo-gradients in a mapped file."""

    def pick(self, indices: list[int]) -> "Blocks":
        p, m = ([column[i] for i in indices] for column in (self.parameters, self.momenta))
        u = [self.pseudo_gradients[i] for i in indices]
        states, group_of = [self.states[i] for i in indices], [self.group_of[i] for i in indices]
        numbers = self.coefficients[:, indices], self.sums[indices], self.a[indices], self.b[indices]
        return Blocks(p, m, u, states, group_of, *numbers, self.release)


_plain_add_param_group = getattr(Optimizer.add_param_group, "__wrapped__", Optimizer.add_param_group)
"""Torch's own without what keeps its compiler out: that would be imported here for nothing, and takes 150 MB and a second."""


class OuterOptimizer(Optimizer):
    """Common to all outer rules: `p.grad` holds the pseudo-gradient Δ, `state[p]["momentum_buffer"]` the outer momentum m.

    θ is at least float32: a parameter in half precision has a master in `state[p]["master"]`, which the rule moves. Each step
    writes the master's rounding into the parameter, over whatever else was written there.

    After a step, `outcomes` tells for each block with a pseudo-gradient, in the order of the parameters, what was done to it, and
    `movements` how far it moved (‖θ_{t+1} − θ_t‖).
    """

    has_fused_step: ClassVar[bool] = False
    """Whether the rule's whole step is `momentum_step`, which some kernels make together with the sums it is decided by."""
    knobs: ClassVar[Knobs] = {}
    """The rule's constants by name, from the declaration that its class statement names, or else from its own `__init__`."""
    outcomes: list[Outcome]
    movements: list[float]
    counts: Any = None
    """In a run, the `heloco.policy.ArrivalCounts` of the arrival that the next step is about. The synchronizer sets it."""

    def __init_subclass__(cls, knobs: Any = None, **defaults: Any) -> None:
        """Derives the class's knobs, signature and docstring from their declaration, with other `defaults` for some."""
        super().__init_subclass__()
        if knobs is not None:
            cls.knobs = declared_knobs(knobs, **defaults)
            explicit_parameters = [p for p in inspect.signature(cls.__init__).parameters.values() if p.kind is not p.VAR_KEYWORD]
            keyword = inspect.Parameter.KEYWORD_ONLY
            knob_parameters = [
                inspect.Parameter(k.name, keyword, default=k.default, annotation=k.kind) for k in cls.knobs.values()
            ]
            cls.__signature__ = inspect.Signature([*explicit_parameters[1:], *knob_parameters])  # type: ignore[attr-defined]
        elif "__init__" in cls.__dict__:
            cls.knobs = knobs_of_signature(cls.__init__)
        if cls.__doc__:
            cls.__doc__ = inspect.cleandoc(cls.__doc__).replace("{knobs}", describe_knobs(cls.knobs))

    def __init__(self, params: Any, knob_values: Mapping[str, Any], **others: Any) -> None:
        """`knob_values`: values of knobs by name. `others`: what else each parameter group holds."""
        super().__init__(params, {**fill_knobs(self.knobs, knob_values), **others})
        self.outcomes = []
        self.movements = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a parameter group, as torch does. Refuses knobs out of range and parameters that cannot be trained."""
        self._check({**self.defaults, **param_group})
        _plain_add_param_group(self, param_group)
        try:
            self._check_trainable()
        except ValueError:
            del self.param_groups[-1]
            raise

    def _check_trainable(self) -> None:
        """Refuses the parameters of the last group whose dtype no rule can move."""
        group, before = self.param_groups[-1], sum(len(group["params"]) for group in self.param_groups[:-1])
        names = group.get("param_names") or [f"block {before + i}" for i in range(len(group["params"]))]
        for name, p in zip(names, group["params"], strict=True):
            if p.dtype not in TRAINABLE:
                raise ValueError(f"{name} is {p.dtype}: {CAN_BE_TRAINED}")

    def _check(self, group: dict[str, Any]) -> None:
        """Refuses a parameter group's settings outside their range."""
        for name, knob in self.knobs.items():
            knob.check(group[name])

    @abstractmethod
    def _apply(self, blocks: Blocks, block_kernels: kernels.BlockKernels) -> list[float]:
        """The rule's equation: moves the parameters and momenta of all blocks, and returns how far each parameter moved.

        `block_kernels` are those over just these blocks, for rules that use them. If the rule `has_fused_step`, they may have
        moved the blocks already.
        """

    def _gain(self, group: dict[str, Any]) -> float:  # noqa: ARG002
        """How much of G enters the momentum, for the rules with m = μm + gain·G."""
        return 1.0

    def _step_coefficients(self, group: dict[str, Any]) -> Coefficients:
        """lr, mu, gain."""
        return group["lr"], group["momentum"], self._gain(group)

    def coefficients_of(self, group: dict[str, Any], weight: float) -> Coefficients:
        """How the blocks of a group move, in numbers alone. Without a correction: G = ρΔ."""
        return coefficients(self._step_coefficients(group), weight=weight)

    @overload
    def step(
        self,
        closure: None = None,
        *,
        weight: float = 1.0,
        pseudo_gradients: Sequence[Block] | None = None,
        scale: ScaleBlocks | None = None,
        release: Release | None = None,
    ) -> None: ...
    @overload
    def step(
        self,
        closure: Callable[[], float],
        *,
        weight: float = 1.0,
        pseudo_gradients: Sequence[Block] | None = None,
        scale: ScaleBlocks | None = None,
        release: Release | None = None,
    ) -> float: ...

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], float] | None = None,
        *,
        weight: float = 1.0,
        pseudo_gradients: Sequence[Block] | None = None,
        scale: ScaleBlocks | None = None,
        release: Release | None = None,
    ) -> float | None:
        """One arrival. `weight` is ρ. Raises `NotFinite` and leaves everything as it was if a pseudo-gradient is not finite.

        `pseudo_gradients`, one for each parameter on whatever device and in whatever precision, take the place of `p.grad`.
        `scale` may scale blocks down: it is called with the sums that the step needs anyway, before anything is changed.
        `release` gives back what was read of pseudo-gradients in a mapped file: see `kernels.windows`.
        """
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight is {weight!r}: an arrival's weight must be a finite number ≥ 0.")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        blocks = self._blocks_with_grad() if pseudo_gradients is None else self._blocks_with(pseudo_gradients, release)
        self._step(*blocks, weight, scale, release)
        return loss

    def _step(
        self,
        parameters: list[Tensor],
        deltas: Sequence[Block],
        group_of: list[int],
        weight: float,
        scale: ScaleBlocks | None,
        release: Release | None,
    ) -> None:
        thetas = self._masters(parameters)
        momenta = [m if (m := self.state[p].get("momentum_buffer")) is not None else self._first_momentum(p) for p in parameters]
        block_kernels = kernels.BlockKernels(thetas, momenta, deltas, release)
        group_coefficients = [self.coefficients_of(group, weight) for group in self.param_groups]
        sums = block_kernels.step(group_coefficients, group_of) if self.has_fused_step and scale is None else None
        if sums is None:
            sums = block_kernels.statistics()
        usable = sums[:, 0] <= [LARGEST_SQUARE[m.dtype] for m in momenta]  # a NaN is not below anything
        if not usable.all():
            raise NotFinite(f"the pseudo-gradient of block {usable.argmin()} is not finite")
        block_coefficients = np.array(group_coefficients, dtype=np.float64).T.take(group_of, axis=1)
        factors = scale(sums[:, 0]) if scale is not None else ()
        a, b, self.outcomes = combine_all(scale_sums(sums, factors), block_coefficients)
        a = a * factors if len(factors) else a  # G = a·sΔ + b·m
        states = [self.state[p] for p in parameters]
        blocks = Blocks(thetas, momenta, deltas, states, group_of, block_coefficients, sums, a, b, release)
        self.movements = self._apply(blocks, block_kernels)
        round_masters(parameters, thetas)

    @torch.no_grad()
    def thetas(self) -> list[Tensor]:
        """θ as the rule moves it: the parameters of all groups, or their masters. Do not write to them."""
        return [theta.detach() for group in self.param_groups for theta in self._masters(group["params"])]

    @torch.no_grad()
    def squares(self, pseudo_gradients: Sequence[Block], release: Release | None = None) -> Numbers:
        """Δ·Δ of each block, as a step would find it."""
        _, deltas, _ = self._blocks_with(pseudo_gradients, release)
        thetas = self.thetas()
        squares: Numbers = kernels.BlockKernels(thetas, thetas, deltas, release).statistics()[:, 0]
        return squares

    @torch.no_grad()
    def norm(self) -> float:
        """‖θ‖."""
        thetas = self.thetas()
        squares = kernels.BlockKernels(thetas, thetas, thetas).statistics()[:, 0].tolist()
        return math.sqrt(sum(squares))

    def _masters(self, parameters: list[Tensor]) -> list[Tensor]:
        """What the rule moves: each parameter itself, or its master."""
        if not HALF.intersection(p.dtype for p in parameters):
            return parameters
        return [master_of(p, self.state[p]) if p.dtype in HALF else p for p in parameters]

    def _blocks_with_grad(self) -> tuple[list[Tensor], list[Tensor], list[int]]:
        """The parameters with a `p.grad`, these, and the number of each one's group."""
        blocks = [(p, u, i) for i, group in enumerate(self.param_groups) for p in group["params"] if (u := p.grad) is not None]
        return [p for p, _, _ in blocks], [u for _, u, _ in blocks], [i for _, _, i in blocks]

    def _blocks_with(
        self, pseudo_gradients: Sequence[Block], release: Release | None = None
    ) -> tuple[list[Tensor], Sequence[Block], list[int]]:
        """All parameters, their pseudo-gradients, and the number of each one's group."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        if list(map(_shape, parameters)) != list(map(_shape, pseudo_gradients)):
            raise ValueError("pseudo_gradients must be of the parameters' shapes, one for each parameter in their order.")
        deltas = [brought_to(p.device, u, release) for u, p in zip(pseudo_gradients, parameters, strict=True)]
        return parameters, deltas, [i for i, group in enumerate(self.param_groups) for _ in group["params"]]

    @torch.no_grad()
    def lookahead(self) -> list[Tensor]:
        """New tensors a worker starts from, one per parameter: θ, or θ − ημm for the rules that look ahead (Eq. dispatch)."""
        starts: list[Tensor] = []
        for group in self.param_groups:
            lookahead_factor = group["lr"] * group["momentum"] if group.get("lookahead") else 0.0
            momenta = (
                [self.state[p].get("momentum_buffer") for p in group["params"]]
                if lookahead_factor
                else [None] * len(group["params"])
            )
            group_starts = look_ahead(self._masters(group["params"]), momenta, lookahead_factor)
            starts += (
                group_starts
                if not HALF.intersection(p.dtype for p in group["params"])
                else _copies(group_starts, group["params"])
            )
        return starts

    @torch.no_grad()
    def lookahead_of(self, number: int) -> Iterator[Tensor]:
        """What a worker starts from (see `lookahead`) for one parameter, counted over all groups. The flat slices share their
        memory: use each before you ask for the next. Without look-ahead it is the parameter itself: do not write to it."""
        group, p = [(group, p) for group in self.param_groups for p in group["params"]][number]
        lookahead_factor = group["lr"] * group["momentum"] if group.get("lookahead") else 0.0
        momentum = self.state[p].get("momentum_buffer") if lookahead_factor else None
        [theta] = self._masters([p])
        if momentum is None:
            yield p.detach()
        elif kernels.are_homogeneous([theta, momentum]) and not kernels.on_gpu(p):
            room = torch.empty(min(SLICE, p.numel()), dtype=momentum.dtype)
            parts, momenta = torch.split(theta.detach().view(-1), SLICE), torch.split(momentum.view(-1), SLICE)
            for part, m in zip(parts, momenta, strict=True):
                yield torch.mul(m, -lookahead_factor, out=room[: part.numel()]).add_(part).to(p.dtype)
        else:
            yield look_ahead([theta], [momentum], lookahead_factor)[0].to(p.dtype)

    def _first_momentum(self, p: Tensor) -> Tensor:
        """m as it is at first: zeros, at least in float32."""
        momentum = torch.zeros_like(p, dtype=_momentum_dtype(p), memory_format=torch.preserve_format)
        self.state[p]["momentum_buffer"] = momentum
        return momentum

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads a saved state, as torch does, but keeps the momentum of half-precision models in float32."""
        super().load_state_dict(state_dict)
        # torch casts loaded state to the parameter's dtype; the momentum of a half-precision model is float32 and stays so
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for p, key in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(key, {}).items():
                    if isinstance(value, Tensor) and name != "step":
                        self.state[p][name] = value.detach().to(p.device, _momentum_dtype(p), copy=True)


_shape = attrgetter("shape")


def scale_sums(sums: Numbers, factors: Sequence[float]) -> Numbers:
    """(Δ·Δ, m·m, Δ·m) of blocks whose Δ is scaled by these factors; none: as they are."""
    if not len(factors):
        return sums
    s = np.array(factors)
    scaled_sums: Numbers = sums * np.array([s * s, np.ones_like(s), s]).T
    return scaled_sums


def _momentum_dtype(p: Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32)


def look_ahead(parameters: list[Tensor], momenta: list[Tensor | None], lookahead_factor: float) -> list[Tensor]:
    """θ − ahead·m of each block as a new tensor, or θ where there is no m. Blocks that are alike go together.

    On the CPU the product is rounded before it is added: with `alpha=` torch fuses the two where the processor can.
    """
    present_momenta = [m for m in momenta if m is not None]
    if not present_momenta:
        return _copies(parameters, parameters)
    if len(present_momenta) < len(parameters) or not kernels.are_homogeneous([*parameters, *present_momenta]):
        each = zip(parameters, momenta, strict=True)
        return [p.detach().clone() if m is None else p.detach() - m * lookahead_factor for p, m in each]
    if kernels.on_gpu(present_momenta[0]):
        return list(torch._foreach_sub(parameters, present_momenta, alpha=lookahead_factor))
    starts = list(torch._foreach_mul(present_momenta, -lookahead_factor))
    torch._foreach_add_(starts, parameters)
    return starts


def _copies(tensors: list[Tensor], templates: list[Tensor]) -> list[Tensor]:
    """Copies of the tensors, each in the dtype of its template. On a GPU one launch copies many."""
    if not any(map(kernels.on_gpu, tensors)):
        return [x.detach().to(y.dtype, copy=True) for x, y in zip(tensors, templates, strict=True)]
    copies = [torch.empty_like(x.detach(), dtype=y.dtype) for x, y in zip(tensors, templates, strict=True)]
    torch._foreach_copy_(copies, [x.detach() for x in tensors])
    return copies


def momentum_step(blocks: Blocks, block_kernels: kernels.BlockKernels) -> list[float]:
    """m = μm + gain·G, θ −= η(G + μm) for all blocks, with G = a·Δ + b·m. Returns how far each moved."""
    if not block_kernels.has_moved:
        block_kernels.update(np.array([blocks.a, blocks.b, *blocks.coefficients[:3]]).T)
    return momentum_step_lengths(blocks)


@np.errstate(all="ignore")
def momentum_step_lengths(blocks: Blocks) -> list[float]:
    """η‖G + μm_{t+1}‖ from the sums: G + μm_{t+1} = xΔ + ym with x = (1 + μ·gain) a and y = b + μ(μ + gain·b)."""
    (uu, mm, um), (lr, mu, gain) = blocks.sums.T, blocks.coefficients[:3]
    x, y = (1 + mu * gain) * blocks.a, blocks.b + mu * (mu + gain * blocks.b)
    square = x * x * uu + 2 * x * y * um + y * y * mm
    lengths: list[float] = (lr * np.sqrt(np.where(square > 0, square, 0.0))).tolist()
    return lengths
