"""HELOCO_KERNELS: which kernels may serve. auto: the fastest there are; portable: torch operations alone."""

import os

from heloco.errors import UserError, nearest

VARIABLE = "HELOCO_KERNELS"
CHOICES = ("auto", "portable")


def compiled_kernels_wanted() -> bool:
    choice = os.environ.get(VARIABLE) or "auto"
    if choice not in CHOICES:
        raise UserError(f"The environment variable {VARIABLE} is {choice!r}; {nearest(choice, CHOICES)}")
    return choice == "auto"
