"""The command line: parse, build, call."""

from .main import main

__all__ = ["main"]
