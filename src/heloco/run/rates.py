"""Warns of learning rates far above their defaults: one was given for the other, or a digit is wrong."""

from heloco.methods import get_method
from heloco.run.config import RunConfig, default_learning_rate, outer_knobs

HIGH_RATE = 100
"""How many times its default a rate must be to be warned of."""


def rate_warnings(config: RunConfig) -> list[str]:
    """A sentence for each learning rate of a resolved config that is `HIGH_RATE` times its default or more."""
    warnings = []
    optimizer = config.inner.inner_optimizer
    inner_default = 0.0 if config.inner.has_own_optimizer else default_learning_rate(optimizer, config.model.width)
    if _is_high(config.inner.lr, inner_default):
        warnings.append(
            f"--lr is {config.inner.lr:g}, {config.inner.lr / inner_default:.3g} times the default {inner_default:g} of "
            f"{optimizer}: the training may diverge. --lr is the rate of the inner steps, --outer-lr "
            "that of the outer method."
        )
    outer_default, outer_rate = get_method(config.outer.method).knobs().get("lr"), outer_knobs(config.outer).get("lr")
    if isinstance(outer_default, float) and isinstance(outer_rate, float) and _is_high(outer_rate, outer_default):
        warnings.append(
            f"--outer-lr is {outer_rate:g}, {outer_rate / outer_default:.3g} times the default {outer_default:g} of "
            f"{config.outer.method}: the training may diverge."
        )
    return warnings


def _is_high(rate: float, default: float) -> bool:
    return default > 0 and round(rate / default, 6) >= HIGH_RATE  # 7 / 0.07 is a little less than 100
