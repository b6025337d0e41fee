"""What a run leaves on disk: its config, its tape, its evaluations, its checkpoints."""

from .config import RunConfig, resolve, with_fields
from .folder import RunFolder, make_next

__all__ = ["RunConfig", "RunFolder", "make_next", "resolve", "with_fields"]
