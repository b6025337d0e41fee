"""How a run was served last, next to its credentials: `heloco serve RUN` does the same again, unless flags say otherwise."""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from heloco.disk import write_atomically
from heloco.records.run_files import CREDENTIALS

FILE = "serving.json"


class ServingRecord(Struct, frozen=True, kw_only=True):
    """What was chosen when the run was served, besides the address and the certificate, which the gateway keeps."""

    workers: Annotated[int, Meta(ge=0, le=10_000)] = 0
    """Machines started on the computer that serves the run."""
    ray: str = "auto"
    """auto: a Ray of its own if it is installed; off: without Ray; otherwise the address of a Ray cluster."""
    data: str | None = None
    """Where the run's text is now, if it was moved."""
    cluster: str = ""
    """TOML whose [cluster] settings replace those of the run's config."""

    def save(self, folder: Path) -> None:
        """Writes the record to the run's folder, for its owner alone."""
        (folder / CREDENTIALS).mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(folder / CREDENTIALS / FILE, msgspec.json.encode(self), mode=0o600)

    @classmethod
    def load(cls, folder: Path) -> "ServingRecord":
        """How the run in this folder was served last. What nobody recorded, or what cannot be read, is as for a new run."""
        try:
            return msgspec.json.decode((folder / CREDENTIALS / FILE).read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return cls()
