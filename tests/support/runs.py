"""Tiny runs of the real command line in this process; looking at their folders and comparing them."""

import contextlib
import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from heloco.cli.main import run

TINY_MODEL = (
    "--preset", "1m", "--width", "32", "--layers", "1", "--heads", "2", "--context", "16", "--eval-windows", "4",
)  # fmt: skip


TINY = (
    *TINY_MODEL, "--recipe", "plain", "--inner-steps", "2", "--arrivals", "8", "--batch-size", "2", "--lr", "0.003",
    "--paces", "1,1,6,6,6",
)  # fmt: skip
"""The smallest run: about 0.3 s. Give other values behind it: the last one counts."""


def fitting(arguments: Sequence[str | Path]) -> list[str]:
    """The arguments as text, for images without TINY's model, which is a language model."""
    words = [str(argument) for argument in arguments]
    behind = 1 + len(TINY_MODEL)
    return [words[0], *words[behind:]] if "images" in words and tuple(words[1:behind]) == TINY_MODEL else words


@dataclass(frozen=True)
class Done:
    """A command that has ended; a negative code is the signal that ended it, None that it was stopped."""

    code: int | None
    out: str
    err: str
    pid: int = 0

    @property
    def sentence(self) -> str:
        """The one sentence on stderr; beside it there may be only warnings and the bars of the tokenising."""
        others = ("tokenising ", "heloco: warning: ")
        sentences = [line for line in self.err.splitlines() if line.strip() and not line.startswith(others)]
        assert len(sentences) == 1 and sentences[0].startswith("heloco: "), self.err
        return sentences[0].removeprefix("heloco: ")

    @property
    def warnings(self) -> list[str]:
        """The warnings on stderr."""
        starts = "heloco: warning: "
        return [line.removeprefix(starts) for line in self.err.splitlines() if line.startswith(starts)]


@contextlib.contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def heloco(*arguments: str | Path, cwd: Path | None = None, threads: int = 1) -> Done:
    """`heloco ARGUMENTS`; on one thread, for a tiny model is faster on one than on two."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(cwd or "."), on_threads(threads):
        try:
            code = run(fitting(arguments))
        except SystemExit as end:  # argparse's way to end --help
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def train(out: Path, *settings: str | Path) -> Path:
    """A tiny run that must go well; returns its folder."""
    result = heloco("train", *TINY, *settings, "--out", out)
    assert result.code == 0, result.err
    return out


def write_text(folder: Path, **changed: str) -> Path:
    words = {"de": "der die das und ist nicht ein mit", "en": "the of and to in that is was"} | changed
    folder.mkdir()
    for name, line in words.items():
        (folder / f"{name}.train.txt").write_text(f"{line}\n\n" * 25)
        (folder / f"{name}.val.txt").write_text(f"{line}\n\n" * 5)
    return folder


def digests(folder: Path) -> dict[str, str]:
    """Every file and folder below, hidden ones too, with a digest of its content: whatever changes shows."""
    digest_by_name = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        digest_by_name[name] = "folder" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    return digest_by_name


def outcome(folder: Path) -> dict[str, str]:
    """What must be the same to the bit however the run was broken off: all but the checkpoints before the last."""
    last = f"checkpoints/{checkpoints(folder)[-1].name}/"
    return {name: digest for name, digest in digests(folder).items() if "/" not in name or name.startswith(last)}


def checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "checkpoints").iterdir() if not path.name.startswith("."))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tape(folder: Path) -> list[dict[str, Any]]:
    return lines(folder / "tape.jsonl")


def evals(folder: Path) -> list[dict[str, Any]]:
    return lines(folder / "evals.jsonl")


def assert_refused(around: Path, *arguments: str | Path, says: str, cwd: Path | None = None) -> None:
    """Exit code 2, one sentence with `says` in it, and the folder `around` it all as it was."""
    before = digests(around)
    result = heloco(*arguments, cwd=cwd)
    assert result.code == 2, (result.out, result.err)
    assert says in result.sentence
    assert digests(around) == before
