"""An outer rule of the user's own: a function of one block in plain torch operations, as an outer optimizer."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from torch import Tensor

from heloco.knobs import declared_knobs, knobs_of_signature

from .constants import LookaheadKnobs
from .correction import plain_coefficients
from .kernels import BlockKernels
from .kernels.coefficients import Coefficients
from .optimizer import Blocks, OuterOptimizer

RuleFunction = Callable[..., tuple[Tensor, Tensor]]
"""(θ, m, Δ, ρ, knobs by keyword) -> (θ_{t+1}, m_{t+1}), of one block: like `mla_step`. With a parameter called `state` it also
gets a dict that is kept with the block: tensors and plain values, saved in checkpoints."""


class FunctionRule(OuterOptimizer):
    """The optimizer around a `RuleFunction`: calls it for each block, and writes what it returns into θ and m."""

    function: ClassVar[RuleFunction]
    has_state: ClassVar[bool]

    def __init__(self, params: Any, **given: Any) -> None:
        super().__init__(params, given)

    def _coefficients(self, group: dict[str, Any], weight: float) -> Coefficients:  # noqa: ARG002
        return plain_coefficients(weight)

    def _apply(self, blocks: Blocks, block_kernels: BlockKernels) -> list[float]:  # noqa: ARG002
        return list(self._move(blocks))

    def _move(self, blocks: Blocks) -> Iterator[float]:
        columns = blocks.parameters, blocks.momenta, blocks.pseudo_gradients, blocks.a.tolist(), blocks.states, blocks.group_of
        for theta, m, delta, rho, state, group in zip(*columns, strict=True):
            knobs = {name: self.param_groups[group][name] for name in self.own_knobs}
            extra = {"state": state} if self.has_state else {}
            moved = type(self).function(theta.detach(), m, delta.to(m.dtype), rho, **knobs, **extra)
            self._check_result(moved, theta)
            new_theta, new_m = moved
            yield float((new_theta.double() - theta.double()).norm())
            m.copy_(new_m)
            theta.copy_(new_theta)

    own_knobs: ClassVar[tuple[str, ...]] = ()
    """The knobs that the function takes; `lookahead` is the optimizer's."""

    def _check_result(self, moved: Any, theta: Tensor) -> None:
        is_pair = isinstance(moved, tuple) and len(moved) == 2 and all(isinstance(x, Tensor) for x in moved)
        if not is_pair or any(x.shape != theta.shape for x in moved):
            raise TypeError(f"The rule {type(self).__name__} must return (θ, m), two tensors of shape {tuple(theta.shape)}.")


def make_rule(rule: Any) -> type[OuterOptimizer]:
    """The optimizer class of a rule: the class itself, or one made around a `RuleFunction`."""
    if isinstance(rule, type) and issubclass(rule, OuterOptimizer):
        return rule
    parameters = inspect.signature(rule).parameters
    own = knobs_of_signature(rule, skipped=("rho", "state"))
    lookahead = {}
    if {"lr", "momentum"} <= own.keys() and "lookahead" not in own:  # what θ − ημm needs
        lookahead = {"lookahead": declared_knobs(LookaheadKnobs)["lookahead"]}
    content = {
        "__doc__": rule.__doc__, "function": staticmethod(rule), "has_state": "state" in parameters,
        "knobs": {**own, **lookahead}, "own_knobs": tuple(own),
    }  # fmt: skip
    return type(getattr(rule, "__name__", "rule"), (FunctionRule,), content)
