"""The journal: what happened to a real run, written down before it counts.

journal/events.jsonl                 one line per dispatch, abandoned round and contribution, and what else is worth knowing
journal/WORKER-ROUND-VERSION.safetensors   the tensors of a contribution

A line carries its number and a seal over itself and the line before, so that an edited or missing one is found. A contribution is
in the journal when its line is durable; a tensor file without a line is a transfer that has not ended.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from heloco.errors import UserError
from heloco.run.disk import sync_folder

FOLDER, EVENTS = "journal", "events.jsonl"
Event = dict[str, Any]


class Journal:
    def __init__(self, run: Path) -> None:
        """Opens the journal of a run's folder, or begins it. A last line without its end (a kill) is cut off."""
        self.path = run / FOLDER
        self.path.mkdir(exist_ok=True)
        self.last = 0
        """The number of the last event; 0 where there is none."""
        self.kept: list[tuple[int, Path, int]] = []
        """(number, file, bytes) of the contributions whose tensors are still there."""
        self.whole_since = 0
        """The number of the last contribution whose tensors are not there any more: a replay can begin behind it."""
        self._seal, self._size = "", 0
        for event, seal, size in read_events(self.path / EVENTS):
            self._count(event)
            self._seal, self._size = seal, size
        self._file = (self.path / EVENTS).open("ab", buffering=0)
        self._file.truncate(self._size)
        sync_folder(self.path)
        sync_folder(run)

    def _count(self, event: Event) -> None:
        self.last = event["n"]
        if event["event"] == "receive":
            if (path := tensors_of(self.path.parent, event)).exists():
                self.kept.append((self.last, path, event["bytes"]))
            else:
                self.whole_since, self.kept = self.last, []

    def append(self, event: Event) -> Event:
        """Writes an event; it is durable after the next `sync`. On a full disk nothing of it stays."""
        event = {"n": self.last + 1, **event}
        line, seal = _sealed(event, self._seal)
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            self._file.truncate(self._size)
            raise
        self._seal, self._size = seal, self._size + len(line)
        self._count(event)
        return event

    def sync(self, tensors: Path | None = None) -> None:
        """Makes all events durable, and before them the tensors of the last."""
        if tensors is not None:
            with tensors.open("rb") as file:
                os.fsync(file.fileno())
            sync_folder(self.path)
        os.fsync(self._file.fileno())

    def read(self, after: int = 0) -> Iterator[Event]:
        return (event for event, _, _ in read_events(self.path / EVENTS) if event["n"] > after)

    def tensors(self, worker: int, index: int, version: int) -> Path:
        return self.path / _name(worker, index, version)

    def prune(self, until: int, budget_bytes: float) -> None:
        """Removes the tensors of events up to `until`, which a checkpoint stands for, if all together are over the budget."""
        if sum(size for _, _, size in self.kept) <= budget_bytes:
            return
        for number, path, _ in self.kept:
            if number <= until:
                path.unlink(missing_ok=True)
                self.whole_since = number
        self.kept = [kept for kept in self.kept if kept[0] > until]

    def remove_unfinished(self) -> None:
        """Tensor files without an event: transfers that did not end before a restart."""
        known = {path for _, path, _ in self.kept}
        for path in self.path.glob("*.safetensors"):
            if path not in known:
                path.unlink()

    def close(self) -> None:
        self._file.close()


def _name(worker: int, index: int, version: int) -> str:
    return f"{worker}-{index}-{version}.safetensors"


def tensors_of(run: Path, event: Event) -> Path:
    """The tensors of a contribution, in the folder of its run."""
    return run / FOLDER / _name(event["worker"], event["round"], event["version"])


def _sealed(event: Event, before: str) -> tuple[bytes, str]:
    text = json.dumps(event, separators=(",", ":"), allow_nan=False)
    seal = hashlib.blake2b(f"{before}{text}".encode(), digest_size=6).hexdigest()
    return f'{text[:-1]},"seal":"{seal}"}}\n'.encode(), seal


def read_events(path: Path) -> Iterator[tuple[Event, str, int]]:
    """(event, its seal, the file's size behind it), every line checked; a last line without its end is left out."""
    if not path.exists():
        return
    before, size = "", 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                event = json.loads(line)
                seal = event.pop("seal")
                if event["n"] != number or _sealed(event, before) != (line, seal):
                    raise ValueError
            except (ValueError, KeyError, TypeError, AttributeError):
                raise UserError(
                    f"{path}: line {number} was edited, or lines before it are missing. Restore the file, or start the run anew."
                ) from None
            before, size = seal, size + len(line)
            yield event, seal, size
