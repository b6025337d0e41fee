"""A real run again, without its machines: its journal through the synchronizer, compared with its tape line by line."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from heloco.cluster.server import checkpoints
from heloco.cluster.server.journaled_run import JournaledRun
from heloco.cluster.server.open_run import BroughtTask, remembered_model
from heloco.engine.build import build_parts, build_synchronizer
from heloco.engine.local import Collector
from heloco.errors import UserError
from heloco.records.events import Receive
from heloco.records.journal import FOLDER, Mark, contribution_path, first_mark, read_events, segments
from heloco.records.lines import read_lines
from heloco.records.run_files import TAPE
from heloco.run import RunConfig, RunFolder, checkpoint
from heloco.synchronizer import Synchronizer
from heloco.task import Task


@dataclass(frozen=True)
class Replayed:
    begun_at: int
    """The arrival that the replay began after: 0, or that of the oldest checkpoint from which on the journal is whole."""
    lines: int
    """Lines of the tape that were made again."""
    digest: str
    """Of the parameters at the end."""
    difference: str = ""
    """The first one, in words; empty where all lines are the same to the bit."""


def replay(folder: RunFolder, task: Task | None, progressed: Callable[[int], Any] = lambda _: None) -> Replayed:
    """`task` None: of a run whose model was brought by its machines."""
    if not segments(folder.path / FOLDER):
        raise UserError(f"{folder.path} has no journal: it was a simulation. The same config gives the same run: `heloco train`.")
    config, meta = folder.config(), folder.meta()
    digest = meta["task_digest"] if task is None else task.digest
    if digest != meta["task_digest"]:
        raise UserError("The data or the tokenizer is not the one this run was started with: give the same, e.g. with --data.")
    collector = Collector()
    run = JournaledRun(
        _synchronizer(folder, task, config), config, task_digest=digest, folder=None, path=folder.path, observers=[collector]
    )
    try:
        since, begun_at = load_oldest(folder, run)
        for event, mark in read_events(folder.path / FOLDER, since):
            run.follow(event, mark.number)
            progressed(len(collector.tape))
        tape = list(read_lines(folder.path / TAPE))
        return Replayed(begun_at, len(collector.tape), run.digest(), _difference(tape, collector.tape))
    finally:
        run.close()


def _synchronizer(folder: RunFolder, task: Task | None, config: RunConfig) -> Synchronizer:
    if task is not None:
        return build_parts(task, config).synchronizer
    brought = BroughtTask(len(config.workers.paces))
    return build_synchronizer(config, remembered_model(folder), [shard.windows for shard in brought.shards])


def load_oldest(folder: RunFolder, run: JournaledRun) -> tuple[Mark, int]:
    """Loads the oldest checkpoint from which on all contributions are kept; its place in the journal, and its arrival."""
    journal = folder.path / FOLDER
    first, last_missing = first_mark(journal).number, 0
    for event, mark in read_events(journal):
        if isinstance(event, Receive) and not contribution_path(journal, mark.number).is_file():
            last_missing = mark.number
    for path in folder.checkpoints():
        state, tensors = checkpoint.load(path)
        if checkpoints.served_state(state).journal.number >= max(first, last_missing):
            return checkpoints.load(run, state, tensors).journal, state["arrival"]
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
            field = next(key for key in now if was.get(key) != now[key])
            return f"arrival {now['arrival']}: {field} was {was.get(field)!r} and is {now[field]!r}"
    surplus = len(tape) - start - len(again)
    return f"the tape has {surplus} lines more than the journal" if surplus > 0 else ""


def _place(line: dict[str, Any]) -> tuple[int, int]:
    return line["worker"], line["round"]
