"""A real run again, without its machines: its journal through the synchronizer, compared with its tape line by line."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from heloco.engine.build import build_parts, build_synchronizer
from heloco.engine.cluster.recorded import RecordedRun
from heloco.engine.cluster.serving import BroughtTask, remembered
from heloco.engine.local import Collector
from heloco.errors import UserError
from heloco.run import RunConfig, RunFolder, checkpoint
from heloco.run.folder import CHECKPOINTS, TAPE
from heloco.run.journal import EVENTS, FOLDER, read_events, tensors_of
from heloco.run.lines import read_lines
from heloco.synchronizer import Synchronizer
from heloco.task import Task


@dataclass(frozen=True)
class Replayed:
    begun_at: int
    """The arrival that the replay began behind: 0, or that of the oldest checkpoint from which on the journal is whole."""
    lines: int
    """Lines of the tape that were made again."""
    digest: str
    """Of the parameters at the end."""
    difference: str = ""
    """The first one, in words; empty where all lines are the same to the bit."""


def replay(folder: RunFolder, task: Task | None, progressed: Callable[[int], Any] = lambda _: None) -> Replayed:
    """`task` None: of a run whose model was brought by its machines."""
    if not (folder.path / FOLDER / EVENTS).exists():
        raise UserError(f"{folder.path} has no journal: it was a simulation. The same config gives the same run: `heloco train`.")
    config, meta = folder.config(), folder.meta()
    digest = meta["task_digest"] if task is None else task.digest
    if digest != meta["task_digest"]:
        raise UserError("The data or the tokenizer is not the one this run was started with: give the same, e.g. with --data.")
    collected = Collector()
    run = RecordedRun(
        _synchronizer(folder, task, config), config, task_digest=digest, folder=None, path=folder.path, observers=[collected]
    )
    since, behind = _beginning(folder, run)
    for event, _, _ in read_events(folder.path / FOLDER / EVENTS):
        if event["n"] > since:
            run.follow(event)
            progressed(len(collected.tape))
    tape = list(read_lines(folder.path / TAPE))
    return Replayed(behind, len(collected.tape), run.digest(), _difference(tape, collected.tape))


def _synchronizer(folder: RunFolder, task: Task | None, config: RunConfig) -> Synchronizer:
    if task is not None:
        return build_parts(task, config).synchronizer
    brought = BroughtTask(len(config.workers.paces))
    return build_synchronizer(config, remembered(folder), [shard.windows for shard in brought.shards])


def _beginning(folder: RunFolder, run: RecordedRun) -> tuple[int, int]:
    """Loads the oldest checkpoint from which on all contributions are kept; (its last event, its arrival)."""
    gone = 0
    for event, _, _ in read_events(folder.path / FOLDER / EVENTS):
        if event["event"] == "receive" and not tensors_of(folder.path, event).exists():
            gone = event["n"]
    for path in checkpoint.found(folder.path / CHECKPOINTS):
        state, tensors = checkpoint.load(path)
        if state["journal"] >= gone:
            run.load(state, tensors)
            return state["journal"], state["arrival"]
    raise UserError(f"{folder.path} has no checkpoint from which on its contributions are kept: there is nothing to replay from.")


def _difference(tape: list[dict[str, Any]], again: list[dict[str, Any]]) -> str:
    """The lines made again must be the tape's last ones. A last line that only the journal has was never answered, or lost."""
    if not again:
        return ""
    first = again[0]
    start = next((i for i, line in enumerate(tape) if _place(line) == _place(first)), len(tape))
    for was, now in zip(tape[start:], again, strict=False):
        now = {**now, "spans": [list(span) for span in now["spans"]]}
        if was != now:
            named = next(key for key in now if was.get(key) != now[key])
            return f"arrival {now['arrival']}: {named} was {was.get(named)!r} and is {now[named]!r}"
    short = len(tape) - start - len(again)
    return f"the tape has {short} lines more than the journal" if short > 0 else ""


def _place(line: dict[str, Any]) -> tuple[int, int]:
    return line["worker"], line["round"]
