"""SHA-256 of files, remembered by path, size and time, so that a second look at a large corpus costs nothing."""

import contextlib
import hashlib
import json
import tempfile
import time
from pathlib import Path

from heloco.errors import UserError

_SETTLED_S = 2.0  # a file that changed so recently may change again within its clock's tick: its digest is not remembered


def fingerprint(path: Path, cache: Path) -> str:
    """The file's SHA-256, from memory if its size, time and inode are those remembered."""
    try:
        state = path.stat()
        place = str(path.resolve())
        file_state = [place, state.st_size, state.st_mtime_ns, state.st_ino]
        note = cache / "fingerprints" / f"{hashlib.sha256(place.encode()).hexdigest()[:24]}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            note_fields = json.loads(note.read_bytes())
            if note_fields["file"] == file_state:
                return str(note_fields["sha256"])
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): check that it exists and that you may read it.") from error
    if time.time() - state.st_mtime > _SETTLED_S:
        _remember(note, json.dumps({"file": file_state, "sha256": digest}))
    return digest


def _remember(note: Path, content: str) -> None:
    with contextlib.suppress(OSError):  # only speed is lost
        note.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=note.parent, prefix=".", delete=False) as file:
            file.write(content)
        Path(file.name).replace(note)
