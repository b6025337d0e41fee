"""Libraries that only some data or models need are imported when these are asked for."""

import importlib
from typing import Any

from heloco.errors import UserError


def library(name: str, purpose: str, extra: str = "data") -> Any:
    """The imported module, or a sentence with the line that installs it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(f"{purpose} needs the package {package} ({error}): pip install 'heloco[{extra}]'.") from error
