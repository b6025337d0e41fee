"""Checkpoints: one folder each, tensors as safetensors, the rest as JSON, both with digests, put in place by a rename."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from heloco.errors import UserError
from heloco.run.disk import sha256, sync_folder
from heloco.run.tensors import Layout, Stored, write

KEEP = 2
FORMAT = 1


def _seal(state: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def save(folder: Path, arrival: int, state: dict[str, Any], tensors: dict[str, Tensor], *, keep_first: bool = False) -> Path:
    """Writes `folder/arrival-…` and removes all but the newest KEEP. The one before stays whole until this one is.

    The tensors are written one by one: nothing is held twice. `keep_first`: the oldest stays too."""
    folder.mkdir(exist_ok=True)
    final = folder / f"arrival-{arrival:08d}"
    for left_over in folder.glob(".arrival-*"):  # of a process that was killed: a run has one writer at a time
        shutil.rmtree(left_over)
    temporary = folder / f".{final.name}"
    temporary.mkdir()
    try:
        path = temporary / "tensors.safetensors"
        digest = hashlib.sha256()
        with path.open("wb", buffering=0) as file:
            write(file, Layout.of(tensors), tensors, hashed=digest)
        state = {"format": FORMAT, "arrival": arrival, **state, "tensors_sha256": digest.hexdigest()}
        (temporary / "state.json").write_text(json.dumps({"seal": _seal(state), "state": state}))
        for name in temporary.iterdir():
            with name.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(temporary)
        if final.exists():  # the same arrival again: only refusals came in between
            _discard(final)
        temporary.rename(final)
        sync_folder(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in found(folder)[int(keep_first) : -KEEP]:
        _discard(old)
    return final


def _discard(path: Path) -> None:
    """Out of sight first, so that nobody finds it half deleted."""
    hidden = path.with_name(f".{path.name}.old")
    path.rename(hidden)
    shutil.rmtree(hidden)


def found(folder: Path) -> list[Path]:
    """The checkpoints there are, oldest first."""
    return sorted(folder.glob("arrival-" + "[0-9]" * 8))


def state_of(path: Path) -> dict[str, Any]:
    """Of a checkpoint of ours that was just written or loaded."""
    state: dict[str, Any] = json.loads((path / "state.json").read_text())["state"]
    return state


def load(path: Path) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """(state, tensors) of one checkpoint, every byte checked; a tensor is read when it is asked for."""
    others = [other.name for other in found(path.parent) if other != path]
    remedy = f"delete the folder {path.name} to go on from {others[-1]}." if others else "there is no other: start the run anew."
    try:
        document = json.loads((path / "state.json").read_text())
        state = document["state"]
        if document["seal"] != _seal(state):
            raise UserError(f"The checkpoint {path} was edited: its state.json does not match its seal. Restore it, or {remedy}")
        if state["format"] != FORMAT:
            raise UserError(f"The checkpoint {path} has format {state['format']}, this version reads {FORMAT}: use that version.")
        if sha256(path / "tensors.safetensors") != state["tensors_sha256"]:
            raise UserError(f"The checkpoint {path} is damaged: its tensors are cut short or edited. Restore them, or {remedy}")
        return state, Stored(path / "tensors.safetensors")
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"The checkpoint {path} cannot be read ({error}). Restore it, or {remedy}") from error
