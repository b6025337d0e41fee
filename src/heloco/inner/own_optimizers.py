"""Inner optimizers of the user's own, by name."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from heloco.errors import UserError
from heloco.registry import Registry

BUILT_IN_OPTIMIZERS = ("adamw", "muon", "sgd")
MakeOptimizer = Callable[[nn.Module, Any], Optimizer]
"""(model, inner options) -> an optimizer over all parameters of the model."""


class _Maker:
    """Calls what was registered, and checks what it gives."""

    def __init__(self, name: str, optimizer: Any) -> None:
        if not callable(optimizer):
            raise UserError(f"The inner optimizer {name!r} is {optimizer!r}: give a function (model, options) -> optimizer.")
        self.name, self.optimizer = name, optimizer

    def __call__(self, model: nn.Module, options: Any) -> Optimizer:
        is_class = isinstance(self.optimizer, type) and issubclass(self.optimizer, Optimizer)
        optimizer = self.optimizer(model.parameters(), lr=options.lr) if is_class else self.optimizer(model, options)
        if not isinstance(optimizer, Optimizer):
            raise UserError(f"The inner optimizer {self.name!r} gave {optimizer!r}: it must give a torch.optim.Optimizer.")
        parameter_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, p in model.named_parameters():
            if id(p) not in parameter_ids:
                raise UserError(f"The inner optimizer {self.name!r} leaves out the parameter {name!r}: give it all parameters.")
        return optimizer


INNER_OPTIMIZERS: Registry[MakeOptimizer] = Registry(
    "inner optimizer", "heloco.inner_optimizers", _Maker, {}, reserved=BUILT_IN_OPTIMIZERS
)


def register_inner_optimizer(name: str, optimizer: Any) -> None:
    """Adds an inner optimizer of your own to this process: a class of torch optimizers, or a function that makes one.

        heloco.register_inner_optimizer("radam", torch.optim.RAdam)
        heloco.register_inner_optimizer(
            "slow-decay", lambda model, options: torch.optim.RAdam(model.parameters(), lr=options.lr, weight_decay=1e-4)
        )
        heloco.simulate(inner_optimizer="radam", lr=1e-3)

    `options` are the run's `heloco.inner.InnerOptions`. Each step sets the learning rate of all parameter groups. Installed
    packages: entry point group `heloco.inner_optimizers`. See docs/extend.md.
    """
    INNER_OPTIMIZERS.register(name, optimizer)
