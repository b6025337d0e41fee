"""The constants of the outer rules: every name, type, default, range and meaning is declared here, and nowhere else.

What is derived from the declarations: the signatures, checks and docstrings of the optimizers, the settings of a run's config,
the flags of the command line with their help, and the table that the kernels read (`kernels/coefficients.py`).
"""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Annotated, Any, Literal, TypedDict

from heloco.knobs import Knob, declared_knobs, fill_knobs


class MomentumKnobs(TypedDict, total=False):
    """The constants that every rule of this package has."""

    lr: Annotated[float, Knob(0.7, "η, the outer learning rate.", "[0, ∞)")]
    momentum: Annotated[float, Knob(0.9, "μ, the outer momentum.", "[0, 1)")]


class LookaheadKnobs(MomentumKnobs, total=False):
    """The constants of rules whose workers can start from the look-ahead model."""

    lookahead: Annotated[bool, Knob(False, "Whether workers start from θ − ημm instead of θ.")]


class CorrectionKnobs(TypedDict, total=False):
    """The constants of HeLoCo's block correction (Algorithm 2). The defaults are the paper's."""

    reorient: Annotated[
        Literal["printed", "ramp"],
        Knob("printed", "Which λ turns weakly aligned blocks: the paper's text (printed) or its authors' code (ramp)."),
    ]
    weigh: Annotated[
        Literal["after", "before"],
        Knob("after", "Whether ρ is applied after the correction (the paper's text) or before it (its authors' code)."),
    ]
    c_ok: Annotated[float, Knob(0.2, "The cosine from which a block is kept as it is.", "(−∞, ∞)")]
    k_s: Annotated[float, Knob(0.5, "The strength of damping blocks that oppose the momentum.", "[0, ∞)")]
    k_d: Annotated[float, Knob(1.0, "The strength of turning blocks that agree weakly with the momentum.", "[0, ∞)")]
    kappa: Annotated[float, Knob(3.0, "κ, how much the momentum's norm lowers the confidence in a block.", "[0, ∞)")]
    beta_max: Annotated[float, Knob(0.5, "The largest part of the opposing component that damping removes.", "[0, 1]")]
    eps: Annotated[float, Knob(1e-8, "ε, the norm below which a direction is not trusted and the block is skipped.", "[0, ∞)")]
    c_bad: Annotated[float, Knob(-0.2, "The cosine at which the ramp reaches k_d·conf; for reorient=ramp alone.", "(−∞, ∞)")]


class HeLoCoKnobs(LookaheadKnobs, CorrectionKnobs, total=False):
    """The constants of HeLoCo's rule: momentum, look-ahead and block correction."""


class DelayKnobs(MomentumKnobs, total=False):
    """The constants of delayed Nesterov."""

    delay: Annotated[
        int,
        Knob(
            5, "N: the momentum moves at every N-th arrival. Methods set it to the number of workers.", "[1, ∞)",
            is_worker_count=True,
        ),
    ]  # fmt: skip
    c: Annotated[float, Knob(0.0, "The momentum's share of the step at the arrivals in between, at most 1/N.", "[0, 1]")]


CORRECTION = declared_knobs(CorrectionKnobs)


def correction_constants(values: Mapping[str, Any]) -> SimpleNamespace:
    """The correction's constants, checked; `values` replace defaults."""
    constants = SimpleNamespace(**fill_knobs(CORRECTION, values))
    if not constants.c_bad < max(constants.c_ok, 0):
        raise ValueError(f"c_ok is {constants.c_ok!r} and c_bad {constants.c_bad!r}: c_bad must be below c_ok.")
    return constants
