"""Replays a real run: its journal goes through the synchronizer again, and the tape is compared line by line."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from heloco.cluster.server import checkpoints
from heloco.cluster.server.checkpoints import ServedState
from heloco.cluster.server.journaled_run import JournaledRun
from heloco.cluster.server.open_run import ExternalTask, load_external_model
from heloco.engine.build import build_parts, build_synchronizer
from heloco.engine.local import Collector
from heloco.errors import UserError
from heloco.records.events import Receive
from heloco.records.journal_reader import FOLDER, Mark, contribution_path, first_mark, read_events, segments
from heloco.records.lines import read_records
from heloco.records.run_files import TAPE
from heloco.records.tape import ArrivalRecord
from heloco.run import RunConfig, RunFolder, checkpoint
from heloco.synchronizer import Synchronizer
from heloco.task import Task


@dataclass(frozen=True)
class ReplayResult:
    """What a replay computed, and where it first differs from the tape."""

    begun_at: int
    """The arrival after which the replay began: 0, or the arrival of the oldest checkpoint from which the journal is complete."""
    lines: int
    """Lines of the tape that were computed again."""
    digest: str
    """Digest of the parameters at the end."""
    difference: str | None = None
    """The first difference as a sentence; None if all lines are equal to the bit."""


def replay(folder: RunFolder, task: Task | None, on_progress: Callable[[int], Any] = lambda _: None) -> ReplayResult:
    """Replays the run in `folder`. Without a `task` it is an external run."""
    if not segments(folder.path / FOLDER):
        raise UserError(f"{folder.path} has no journal: it was a simulation. The same config gives the same run: `heloco train`.")
    config, facts = folder.config(), folder.facts()
    digest = facts.task_digest if task is None else task.digest
    if digest != facts.task_digest:
        raise UserError("The data or the tokenizer is not the one this run was started with: give the same, e.g. with --data.")
    collector = Collector()
    run = JournaledRun(
        _synchronizer(folder, task, config), config, task_digest=digest, folder=None, path=folder.path, observers=[collector]
    )
    try:
        since, begun_at = load_oldest(folder, run)
        for event, mark in read_events(folder.path / FOLDER, since):
            run.follow(event, mark.number)
            on_progress(len(collector.tape))
        tape = list(read_records(folder.path / TAPE, ArrivalRecord))
        return ReplayResult(begun_at, len(collector.tape), run.digest(), _difference(tape, collector.tape))
    finally:
        run.close()


def _synchronizer(folder: RunFolder, task: Task | None, config: RunConfig) -> Synchronizer:
    if task is not None:
        return build_parts(task, config).synchronizer
    external_task = ExternalTask(len(config.rounds.paces))
    return build_synchronizer(config, load_external_model(folder), [shard.windows for shard in external_task.shards])


def load_oldest(folder: RunFolder, run: JournaledRun) -> tuple[Mark, int]:
    """Loads the oldest checkpoint after which all contributions are kept. Returns its place in the journal and its arrival."""
    journal = folder.path / FOLDER
    first, last_missing = first_mark(journal).number, 0
    for event, mark in read_events(journal):
        if isinstance(event, Receive) and not contribution_path(journal, mark.number).is_file():
            last_missing = mark.number
    for path in folder.checkpoints():
        state, tensors = checkpoint.load(path, ServedState)
        if state.journal.number >= max(first, last_missing):
            checkpoints.load(run, state, tensors)
            return state.journal, state.arrival
    raise UserError(f"{folder.path} has no checkpoint from which on its contributions are kept: there is nothing to replay from.")


def _difference(tape: list[ArrivalRecord], replayed_records: list[ArrivalRecord]) -> str | None:
    """Compares the replayed records with the tape's last ones. Records that only the journal has are no difference: they were
    never written to the tape, or the tape lost them."""
    if not replayed_records:
        return None
    first = replayed_records[0]
    start = next((i for i, line in enumerate(tape) if (line.worker, line.round) == (first.worker, first.round)), len(tape))
    for line, replayed in zip(tape[start:], replayed_records, strict=False):
        for field in ArrivalRecord.__struct_fields__:
            before, now = getattr(line, field), getattr(replayed, field)
            if before != now:
                return f"arrival {replayed.arrival}: {field} was {before!r} and is {now!r}"
    surplus = len(tape) - start - len(replayed_records)
    return f"the tape has {surplus} lines more than the journal" if surplus > 0 else None
