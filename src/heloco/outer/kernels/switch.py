"""HELOCO_KERNELS: which kernels may serve. auto: the fastest there are; portable: torch operations alone."""

import os

from heloco.errors import UserError, nearest

VARIABLE = "HELOCO_KERNELS"
CHOICES = ("auto", "portable")


def compiled_kernels_wanted() -> bool:
    """Whether compiled kernels may be used: false if HELOCO_KERNELS is `portable`. Raises UserError for an unknown value."""
    choice = os.environ.get(VARIABLE) or "auto"
    if choice not in CHOICES:
        raise UserError(f"The environment variable {VARIABLE} is {choice!r}; {nearest(choice, CHOICES)}")
    return choice == "auto"
