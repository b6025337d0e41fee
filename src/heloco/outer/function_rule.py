"""An outer rule of the user's own: a function of one block in plain torch operations, as an outer optimizer."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from torch import Tensor

from heloco.knobs import declared_knobs, knobs_of_signature

from .constants import LookaheadKnobs
from .kernels import BlockKernels
from .kernels.coefficients import Coefficients, coefficients, place
from .kernels.windows import dense, give_back
from .optimizer import Blocks, OuterOptimizer

RuleFunction = Callable[..., tuple[Tensor, Tensor]]
"""(θ, m, Δ, ρ, knobs by keyword) -> (θ_{t+1}, m_{t+1}), of one block: like `mla_step`. With a parameter called `state` it also
gets a dict that is kept with the block: tensors and plain values, saved in checkpoints. With one called `counts` it gets
what is known of the arrival: its staleness, for one."""
NO_KNOBS = ("state", "counts")
"""The parameters of a rule that are not its knobs."""


class FunctionRule(OuterOptimizer):
    """The optimizer around a `RuleFunction`: calls it for each block, and writes what it returns into θ and m."""

    function: ClassVar[RuleFunction]
    function_knobs: ClassVar[tuple[str, ...]]
    """The knobs that the function takes. `lookahead` belongs to the optimizer."""
    extras: ClassVar[tuple[str, ...]]
    """Which of `NO_KNOBS` the function takes."""

    def __init__(self, params: Any, **knob_values: Any) -> None:
        super().__init__(params, knob_values)

    def coefficients_of(self, group: dict[str, Any], weight: float) -> Coefficients:  # noqa: ARG002
        return coefficients(weight=weight)

    def _apply(self, blocks: Blocks, block_kernels: BlockKernels) -> list[float]:  # noqa: ARG002
        return list(self._move(blocks))

    def _move(self, blocks: Blocks) -> Iterator[float]:
        weights = blocks.coefficients[place("weight")].tolist()
        columns = blocks.parameters, blocks.momenta, blocks.pseudo_gradients, weights, blocks.a, blocks.states, blocks.group_of
        for theta, m, delta, rho, a, state, group in zip(*columns, strict=True):
            scale = float(a) / rho if rho else 1.0  # the norm guard's
            keywords = {name: self.param_groups[group][name] for name in self.function_knobs}
            keywords |= {name: value for name, value in (("state", state), ("counts", self.counts)) if name in self.extras}
            versions = theta._version, m._version
            scaled = dense(delta).to(m.dtype) if scale == 1 else dense(delta).to(m.dtype) * scale
            result = type(self).function(theta.detach(), m, scaled, rho, **keywords)
            if (theta._version, m._version) != versions:
                raise TypeError(f"The rule {type(self).__name__} changed θ or m in place: it must return new tensors.")
            self._check_result(result, theta)
            yield float((result[0].double() - theta.double()).norm())
            theta.copy_(result[0])
            m.copy_(result[1])
            give_back(delta, blocks.release)

    def _check_result(self, result: Any, theta: Tensor) -> None:
        is_pair = isinstance(result, tuple) and len(result) == 2 and all(isinstance(x, Tensor) for x in result)
        if not is_pair or any(x.shape != theta.shape for x in result):
            raise TypeError(f"The rule {type(self).__name__} must return (θ, m), two tensors of shape {tuple(theta.shape)}.")


def make_rule(rule: Any) -> type[OuterOptimizer]:
    """The optimizer class of a rule: the class itself, or one made around a `RuleFunction`."""
    if isinstance(rule, type) and issubclass(rule, OuterOptimizer):
        return rule
    name = getattr(rule, "__name__", repr(rule))
    try:
        parameters = inspect.signature(rule).parameters
        required = [p.name for p in parameters.values() if p.default is p.empty and p.name not in NO_KNOBS]
        extras = tuple(name for name in NO_KNOBS if name in parameters)
        inspect.signature(rule).bind(*range(4), **dict.fromkeys(extras))
    except (TypeError, ValueError):
        required, extras = [], ()
    if len(required) != 4:
        raise ValueError(f"The rule {name} must take θ, m, Δ and ρ, in this order, and have a default for every other parameter.")
    function_knobs = knobs_of_signature(rule, skipped=NO_KNOBS)
    lookahead = {}
    if {"lr", "momentum"} <= function_knobs.keys() and "lookahead" not in function_knobs:  # what θ − ημm needs
        lookahead = {"lookahead": declared_knobs(LookaheadKnobs)["lookahead"]}
    content = {
        "__doc__": rule.__doc__, "function": staticmethod(rule), "function_knobs": tuple(function_knobs),
        "extras": extras, "knobs": {**function_knobs, **lookahead},
    }  # fmt: skip
    return type(name, (FunctionRule,), content)
