"""Checkpoints: one folder each, put in place by a rename.

tensors.safetensors    parameters, momentum, buffers
state.json             everything else
SHA256SUMS             the digests of both, over the bytes that were written; `sha256sum -c` checks them
"""

import hashlib
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct
from torch import Tensor

from heloco.books import Books
from heloco.disk import SCARCE, make_durable, make_folder_durable, sha256
from heloco.errors import UserError
from heloco.wire.layout import Layout, Stored, write

KEEP = 2
FORMAT = 4
TENSORS, STATE, SUMS = "tensors.safetensors", "state.json", "SHA256SUMS"


class CheckpointDamaged(UserError):
    """A checkpoint's files are not the ones that were written."""


class LineSizes(Struct, frozen=True, kw_only=True):
    """Where the tape and the evaluations stand."""

    tape_bytes: int = 0
    evals_bytes: int = 0


NO_LINES = LineSizes()


class CheckpointState(Struct, frozen=True, kw_only=True):
    """What every checkpoint holds in addition to its tensors. Runs of one kind add to it."""

    config_digest: str
    task_digest: str
    books: Books
    lines: LineSizes
    units: int
    format: int = FORMAT

    @property
    def arrival(self) -> int:
        """How many contributions were accepted before the checkpoint."""
        return self.books.arrivals


State = TypeVar("State", bound=CheckpointState)


def save(
    folder: Path,
    state: CheckpointState,
    tensors: Mapping[str, Tensor],
    *,
    keep_first: bool = False,
    before_piece: Callable[[], None] = lambda: None,
    copied: Callable[[], None] = lambda: None,
) -> Path:
    """Writes `folder/arrival-…` and removes all but the newest KEEP. The one before stays whole until this one is.

    The tensors are written one by one: nothing is held twice. `before_piece` is called again and again while they are; if it
    raises, there is no checkpoint. `copied` is called when they may change again, long before they are durable; what must be
    durable before the checkpoint can be made so there. `keep_first`: the oldest stays too."""
    folder.mkdir(exist_ok=True)
    final = folder / f"arrival-{state.arrival:08d}"
    for left_over in folder.glob(".arrival-*"):  # of a process that was killed: a run has one writer at a time
        shutil.rmtree(left_over)
    temporary = folder / f".{final.name}"
    temporary.mkdir()
    try:
        _write_files(temporary, state, tensors, before_piece, copied)
        if final.exists():  # the same arrival again: only refusals came in between
            discard(final)
        temporary.rename(final)
        make_folder_durable(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in list_checkpoints(folder)[int(keep_first) : -KEEP]:
        discard(old)
    return final


def _write_files(
    folder: Path,
    state: CheckpointState,
    tensors: Mapping[str, Tensor],
    before_piece: Callable[[], None],
    copied: Callable[[], None],
) -> None:
    with (folder / TENSORS).open("wb", buffering=0) as file:
        write(file, Layout.from_tensors(tensors), tensors, before_piece=before_piece)
        copied()
        tensors_digest = sha256(folder / TENSORS)  # from the system's cache: hashing takes longer than copying
        make_durable(file.fileno(), folder / TENSORS)
    content = msgspec.json.encode(state)
    sums = f"{tensors_digest}  {TENSORS}\n{hashlib.sha256(content).hexdigest()}  {STATE}\n"
    for name, text in ((STATE, content), (SUMS, sums.encode())):
        with (folder / name).open("wb") as file:
            file.write(text)
            file.flush()
            make_durable(file.fileno(), folder / name)
    make_folder_durable(folder)


def discard(path: Path) -> None:
    """Out of sight first, so that nobody finds it half deleted."""
    hidden = path.with_name(f".{path.name}.old")
    path.rename(hidden)
    shutil.rmtree(hidden)


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints there are, oldest first."""
    return sorted(folder.glob("arrival-" + "[0-9]" * 8))


def load(path: Path, kind: type[State]) -> tuple[State, Mapping[str, Tensor]]:
    """(state, tensors) of one checkpoint, every byte checked; a tensor is read when it is asked for."""
    state = load_state(path, kind)
    if sha256(path / TENSORS) != _sums(path)[TENSORS]:
        raise CheckpointDamaged(f"The checkpoint {path} is damaged: its tensors are cut short or edited. {_remedy(path)}")
    return state, Stored(path / TENSORS)


def load_state(path: Path, kind: type[State]) -> State:
    """The state alone, checked. `kind` says which kind of run it must be of; CheckpointState is any."""
    try:
        content = (path / STATE).read_bytes()
        sums = _sums(path)
        if not (path / TENSORS).is_file():
            raise FileNotFoundError(f"there is no {TENSORS}")
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, OSError) and error.errno in SCARCE:
            raise
        raise CheckpointDamaged(f"The checkpoint {path} cannot be read ({error}). {_remedy(path)}") from error
    if hashlib.sha256(content).hexdigest() != sums[STATE]:
        raise CheckpointDamaged(
            f"The checkpoint {path} was edited: its {STATE} is not the one that {SUMS} was written for. {_remedy(path)}"
        )
    try:
        if (number := msgspec.json.decode(content, type=_Format).format) != FORMAT:
            raise UserError(f"The checkpoint {path} has format {number}, this version reads {FORMAT}: use that version.")
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise CheckpointDamaged(f"The checkpoint {path} is not one of such a run ({error}). {_remedy(path)}") from error


class _Format(Struct, frozen=True):
    format: int


def _sums(path: Path) -> dict[str, str]:
    pairs = (line.split("  ", 1) for line in (path / SUMS).read_text().splitlines())
    sums = {name: digest for digest, name in pairs}
    if set(sums) != {TENSORS, STATE}:
        raise ValueError(f"its {SUMS} was edited")
    return sums


def _remedy(path: Path) -> str:
    others = [other.name for other in list_checkpoints(path.parent) if other != path]
    if others:
        return f"Restore it, or delete the folder {path.name} to go on from {others[-1]}."
    return "Restore it, or there is no other: start the run again."
