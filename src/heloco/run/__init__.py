"""What a run leaves on disk: its config, its tape, its evaluations, its checkpoints."""

from .config import RunConfig, resolve
from .folder import RunFolder, make_next
from .settings import with_fields

__all__ = ["RunConfig", "RunFolder", "make_next", "resolve", "with_fields"]
