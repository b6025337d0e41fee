"""Tiny runs on Ray, waiting for what happens in them, and what must be true of their folders afterwards."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.account import check_arrivals, check_ledger
from heloco.cluster.client.worker import task_of
from heloco.cluster.protocol.messages import RunInfo
from heloco.cluster.server.replay import replay
from heloco.records.events import Event
from heloco.records.journal_reader import read_events
from heloco.run import RunConfig, RunFolder, checkpoint, resolve, with_fields
from heloco.run.checkpoint import CheckpointState
from support.runs import tape

LONGEST_S = 90.0
TINY: dict[str, Any] = {
    "preset": "1m", "width": 32, "layers": 1, "heads": 2, "context": 16, "eval_windows": 4, "batch_size": 2, "lr": 0.003,
    "paces": [1.0, 1.0, 1.0], "method": "heloco-ramp", "checkpoint_every": 17, "eval_every": 25, "beat_s": 0.5, "device": "cpu",
}  # fmt: skip


def config(**settings: Any) -> RunConfig:
    return resolve(with_fields(RunConfig(), {**TINY, **settings}))


def until(condition: Callable[[], Any], what: str, limit_s: float = LONGEST_S) -> Any:
    end = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < end, f"{what} took longer than {limit_s} s"
        time.sleep(0.02)
    return value


def events(folder: Path) -> list[tuple[int, Event]]:
    return [(mark.number, event) for event, mark in read_events(folder / "journal")]


def check_exact(folder: Path, arrivals: int) -> None:
    """Every contribution once, no window of data skipped or repeated, and the journal gives the same parameters to the bit."""
    accepted = [line for line in tape(folder) if line["verdict"] != "refused"]
    check_arrivals(accepted, arrivals)
    state = checkpoint.load_state(checkpoint.list_checkpoints(folder / "checkpoints")[-1], CheckpointState)
    check_ledger(accepted, state.books)
    run = RunFolder.open(folder)
    config, digest = (folder / "config.toml").read_text(), run.facts().task_digest
    info = RunInfo(run="", heloco="", config=config, task_digest=digest, model_digest="", external=False)
    replay_result = replay(run, task_of(info, device="cpu")[0])
    assert replay_result.difference is None, replay_result.difference
    assert (replay_result.lines, replay_result.digest) == (arrivals, tape(folder)[-1]["digest"])
