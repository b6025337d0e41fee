"""What a run leaves on disk: its config, its tape, its evaluations, its checkpoints."""

from .config import RunConfig, resolve, with_fields
from .folder import RunFolder, next_free

__all__ = ["RunConfig", "RunFolder", "next_free", "resolve", "with_fields"]
