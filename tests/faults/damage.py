"""Damages files in the folder of a run whose synchronizer is down. A restart must be able to repair them."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path


def newest_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").glob("arrival-*"))


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(bytes(content))


def _checkpoint(run: Path, draw: random.Random) -> str:
    name = draw.choice(["state.json", "tensors.safetensors", "SHA256SUMS"])
    flip(newest_checkpoint(run) / name, draw)
    return f"{newest_checkpoint(run).name}/{name}"


def _tape(run: Path, draw: random.Random) -> str:
    """Cuts the tape, at most back to the older checkpoint. Earlier events may have been pruned from
    the journal on a full disk."""
    older = sorted((run / "checkpoints").glob("arrival-*"))[-2:][0]
    reaches = json.loads((older / "state.json").read_bytes())["lines"]["tape_bytes"]
    content = (run / "tape.jsonl").read_bytes()
    (run / "tape.jsonl").write_bytes(content[: draw.randrange(reaches, max(reaches, len(content)) + 1)])
    return "tape.jsonl"


def _start(run: Path, draw: random.Random) -> str:
    paths = sorted((run / "rounds").glob("*.safetensors"))
    if paths:
        flip(draw.choice(paths), draw)
    return "rounds"


def _rubbish(run: Path, draw: random.Random) -> str:
    segment = max((run / "journal").glob("events-*.jsonl"))
    with segment.open("ab") as file:
        file.write(draw.choice([bytes(300), b'{"n":', b"rubbish\n", bytes(300) + b"\n"]))
    return segment.name


def _uploads(run: Path, draw: random.Random) -> str:  # noqa: ARG001
    shutil.rmtree(run / "incoming", ignore_errors=True)
    return "incoming"


KINDS: tuple[Callable[[Path, random.Random], str], ...] = (_checkpoint, _tape, _start, _rubbish, _uploads)


def damage(run: Path, seed: int) -> str:
    """Damages one file, and returns its name."""
    draw = random.Random(seed)
    return draw.choice(KINDS)(run, draw)
