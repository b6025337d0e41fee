"""The settings of the inner loop."""

import math
from dataclasses import dataclass
from typing import Literal

from heloco.errors import UserError
from heloco.inner.own_optimizers import BUILT_IN_OPTIMIZERS, INNER_OPTIMIZERS

WITH_SECOND_MOMENT = ("adamw", "muon")
"""The optimizers that have AdamW's state, at least for some parameters."""


@dataclass(frozen=True, kw_only=True)
class InnerOptions:
    """An optimizer under a cosine; the defaults are the paper's."""

    batch_size: int = 2
    """Samples per micro-batch."""
    accumulate: int = 1
    """Micro-batches per inner step."""
    lr: float = 2e-4
    """Learning rate at the cosine's top; 0: chosen by the optimizer and the model's width."""
    lr_min: float = 1e-6
    """Learning rate at the cosine's end and after it."""
    warmup: int = 0
    """Inner steps over which the learning rate rises linearly before the cosine."""
    schedule_steps: int = 0
    """The cosine's length in inner steps of one shard; 0: the run's steps over its workers."""
    lr_position: Literal["shard", "run"] = "shard"
    """Where a round stands on the cosine: steps done on its shard (the paper), or the whole run's progress."""
    inner_optimizer: str = "adamw"
    """The optimizer of the inner steps: adamw, sgd, muon (Muon for matrices between embedding and head, AdamW for everything
    else), or one of your own by its name."""
    inner_momentum: float | None = None
    """Momentum of Muon or SGD; unset: 0.9."""
    beta1: float = 0.9
    """AdamW's β1, the decay of its first moment (mean gradient)."""
    beta2: float = 0.999
    """AdamW's β2, the decay of its second moment (mean squared gradient)."""
    weight_decay: float = 0.01
    """Weight decay of the inner optimizer: decoupled from the gradient in AdamW and Muon, added to the gradient in SGD."""
    adam_eps: float = 1e-8
    """AdamW's ε, which is added to the root of the second moment in the denominator."""
    keep_state: bool = False
    """Whether the optimizer's state stays with the worker (Liu et al.) or each round starts afresh (the paper)."""
    second_moment: Literal["", "pooled", "rows"] = ""
    """What workers share of AdamW's kept second moment, in simulations alone. rows: each row of a table (embedding, head) is
    raised to the mean over all workers. pooled: every element is the mean over all workers. Unset: nothing."""
    clip: float = 0.0
    """Gradient norm to clip to; 0: no clipping."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """The precision of forward and backward. bf16: they run under autocast, and the parameters stay as they are."""
    compile: bool | None = None
    """Whether the model is compiled with torch.compile: its repeated blocks, or the whole model if it has none. Unset: on a GPU,
    if it has repeated blocks."""
    recompute: bool = False
    """Whether the inside of the model's repeated blocks is computed again in the backward pass instead of being kept: less
    memory, and about a third more time."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulate"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: give a number ≥ 1.")
        for name in ("lr", "lr_min", "warmup", "schedule_steps", "weight_decay", "adam_eps", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)!r}: give a finite number ≥ 0.")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)!r}: it must lie in [0, 1).")
        for name, choices in (("lr_position", ("shard", "run")), ("precision", ("fp32", "bf16"))):
            if getattr(self, name) not in choices:
                raise UserError(f"{name} is {getattr(self, name)!r}: choose {' or '.join(choices)}.")
        if self.has_own_optimizer:
            INNER_OPTIMIZERS.find(self.inner_optimizer)
        if self.inner_momentum is not None and not 0 <= self.inner_momentum < 1:
            raise UserError(f"inner_momentum is {self.inner_momentum!r}: it must lie in [0, 1).")
        if self.second_moment and self.inner_optimizer not in WITH_SECOND_MOMENT:
            raise UserError(
                f"second_moment is about AdamW's state, and {self.inner_optimizer} has no such state: leave one of them out."
            )
        if self.second_moment not in ("", "pooled", "rows"):
            raise UserError(f"second_moment is {self.second_moment!r}: choose rows or pooled, or leave it out.")
        if self.second_moment and not self.keep_state:
            raise UserError("second_moment says what workers share of the state they keep: give --keep-state too.")

    @property
    def has_own_optimizer(self) -> bool:
        """Whether the optimizer is none of those that are built in."""
        return self.inner_optimizer not in BUILT_IN_OPTIMIZERS

    @property
    def optimizer_momentum(self) -> float:
        """The momentum of Muon or SGD: `inner_momentum`, or 0.9 if it is unset."""
        return 0.9 if self.inner_momentum is None else self.inner_momentum

    def first_position(self, shard_steps: int, progress: float) -> float:
        """Where a round's first step stands on the cosine: after the steps done on its shard, or at the run's progress."""
        return shard_steps if self.lr_position == "shard" else progress * self.schedule_steps

    @property
    def windows_per_step(self) -> int:
        """How many windows of its shard a round reads in one inner step."""
        return self.batch_size * self.accumulate


def learning_rate(options: InnerOptions, position: float) -> float:
    """Linear warm-up to `lr`, then a cosine to `lr_min` over the rest of `schedule_steps`, then `lr_min`."""
    if position < options.warmup:
        return options.lr * (position + 1) / options.warmup
    length = max(1, options.schedule_steps - options.warmup)
    progress = min(1.0, (position - options.warmup) / length)
    return options.lr_min + (options.lr - options.lr_min) * 0.5 * (1 + math.cos(math.pi * progress))
