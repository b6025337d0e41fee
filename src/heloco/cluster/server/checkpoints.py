"""Checkpoints of a served run: its state at an event of its journal.

A checkpoint is written in the background. Under the run's lock only the small part of the state is copied. While the tensors are
copied no outer step can be made. If one waits, the copy is given up, and a later state is copied.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from pathlib import Path

from torch import Tensor

from heloco.cluster.protocol.messages import Acknowledgement, Paused
from heloco.cluster.server.evaluation_queue import EvaluationDue
from heloco.cluster.server.journaled_run import JournaledRun
from heloco.cluster.server.machine_book import MachineRecord
from heloco.cluster.server.machine_scores import MachineScores
from heloco.cluster.server.tensor_readers import GaveWay
from heloco.disk import FULL, make_durable
from heloco.errors import DiskError, UserError
from heloco.records.journal import Journal
from heloco.records.journal_reader import Mark
from heloco.run import RunFolder, checkpoint
from heloco.run.checkpoint import CheckpointState

log = logging.getLogger("heloco.server")

GIVES_WAY = 8
"""After this many copies in a row that gave way to outer steps, the next one is finished."""


class ServedState(CheckpointState, frozen=True, kw_only=True):
    """What a checkpoint of a served run holds."""

    journal: Mark
    time_s: float
    paused: Paused | None
    evaluations_due: tuple[EvaluationDue, ...]
    started_s: dict[int, float]
    holders: dict[int, str]
    last_machines: dict[int, str]
    start_digests: dict[int, str]
    start_places: dict[int, EvaluationDue]
    machine_scores: MachineScores
    contributors: list[str]
    machines: dict[str, MachineRecord]
    acks: dict[int, list[Acknowledgement]]


def load(run: JournaledRun, state: ServedState, tensors: Mapping[str, Tensor]) -> None:
    """Puts the run into the state of a checkpoint."""
    if state.config_digest != run.config.digest():
        raise UserError("The run's config is not the one its checkpoint was made with: restore config.toml.")
    if state.task_digest != run.task_digest:
        raise UserError("The data or the tokenizer is not the one this run was started with: give the same text.")
    run.synchronizer.load(state.books, tensors)
    run.time_s, run.units, run.paused = state.time_s, state.units, state.paused
    run.saved_at = run.synchronizer.arrivals
    run.started_s, run.holders, run.last_machines = dict(state.started_s), dict(state.holders), dict(state.last_machines)
    run.start_digests, run.start_places = dict(state.start_digests), dict(state.start_places)
    run.machine_scores = state.machine_scores
    run.contributors.extend(state.contributors)
    run.book.load(state.machines)
    for worker, acks in state.acks.items():
        run.acks[worker].extend(acks)


def save(run: JournaledRun) -> None:
    """Writes a checkpoint, and returns when it is durable."""
    finish_saving(run, wait=True)
    begin_saving(run)
    finish_saving(run, wait=True)


def save_if_due(run: JournaledRun, *, gives_way: bool = True) -> None:
    """Begins a checkpoint if one is due, and finishes the one that was begun before if it is written. Does not wait.
    `gives_way`: see `begin_saving`."""
    finish_saving(run)
    arrivals_since, interval = run.synchronizer.arrivals - run.saved_at, run.config.run.checkpoint_every
    is_due = (arrivals_since and run.is_finished) or (interval and arrivals_since >= interval)
    if run.checkpoint_under_way is None and is_due and run.lines.catch_up():
        begin_saving(run, gives_way=gives_way and not run.is_finished and run.readers.gave_way < GIVES_WAY)


def begin_saving(run: JournaledRun, *, gives_way: bool = False) -> Future[int | None]:
    """Copies the small part of the state, and leaves the rest to a thread. The caller holds the run's lock. Without room or
    descriptors it raises OSError, and nothing has changed. When the checkpoint is written, events that it covers may be pruned
    from the journal, and old checkpoints with them.

    Returns the future of the checkpoint's arrival. With `gives_way` the copy is given up as soon as an outer step waits for it:
    then it is None, and the checkpoint is due again."""
    assert run.folder is not None and run.checkpoint_under_way is None
    run.book.forget_surplus({*run.contributors, *run.holders.values()})
    folder, books, tensors = run.folder, run.synchronizer.books(), run.synchronizer.tensors()
    with run.hold_evaluations() as evaluations_due:
        if not run.lines.catch_up():  # a line that waits is in no file, and its evaluation is due no more
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder.path))
        line_sizes = folder.line_sizes()
    state = ServedState(
        config_digest=run.config.digest(), task_digest=run.task_digest, books=books, lines=line_sizes,
        journal=run.journal.end, time_s=run.time_s, units=run.units, paused=run.paused, evaluations_due=evaluations_due,
        started_s=dict(run.started_s), holders=dict(run.holders), last_machines=dict(run.last_machines),
        start_digests=dict(run.start_digests), start_places=dict(run.start_places), machine_scores=run.machine_scores,
        contributors=list(run.contributors), machines=run.book.to_records(),
        acks={worker: list(acks) for worker, acks in run.acks.items()},
    )  # fmt: skip
    segment = run.journal.open_again()
    budget_bytes = run.config.cluster.journal_gb * 1e9
    leave = run.readers.enter()

    def check_nobody_waits() -> None:
        if gives_way and run.readers.are_awaited:
            leave()
            raise GaveWay

    def on_copied() -> None:
        """The next outer step waits for the copy alone, so nothing that waits for the disk comes before it."""
        leave()
        make_durable(segment.fileno(), Path(segment.name))

    def write() -> int | None:
        keep_first = replays_from_the_start(folder)
        try:
            folder.save_checkpoint(state, tensors, keep_first=keep_first, before_piece=check_nobody_waits, copied=on_copied)
        except GaveWay:
            return None
        finally:
            leave()
            segment.close()
        _prune(folder, run.journal, budget_bytes)  # before the next checkpoint is begun, so that its copy does not wait for this
        return state.arrival

    run.checkpoint_under_way = run.slow_work.submit(write)
    return run.checkpoint_under_way


def wait_for_saving(run: JournaledRun) -> None:
    """Waits until the checkpoint that was begun is written or has failed. The caller does not hold the run's lock."""
    if (under_way := run.checkpoint_under_way) is not None:
        futures_wait([under_way])


def finish_saving(run: JournaledRun, *, wait: bool = False) -> None:
    """Notes that the checkpoint that was begun is written, if it is. Raises the error that it ended with."""
    if run.checkpoint_under_way is not None and (wait or run.checkpoint_under_way.done()):
        under_way, run.checkpoint_under_way = run.checkpoint_under_way, None
        saved_at = under_way.result()
        if saved_at is None:
            run.readers.gave_way += 1
        else:
            run.saved_at, run.readers.gave_way = saved_at, 0


@contextlib.contextmanager
def tolerate_full_disk() -> Iterator[None]:
    """Logs that a checkpoint could not be made because the disk is full. The run loses nothing: its journal has everything."""
    try:
        yield
    except (DiskError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in FULL:
            raise
        log.warning("No checkpoint could be made: %s", error)


def replays_from_the_start(folder: RunFolder) -> bool:
    """Whether the journal still reaches back to the first event. If so, the first checkpoint is kept too."""
    paths = folder.checkpoints()
    return not paths or paths[0].name == "arrival-00000000"


def make_room(run: JournaledRun, budget_bytes: float) -> None:
    """Leaves it to a thread to prune the journal to its budget. Only events that the newest checkpoints cover are removed."""
    assert run.folder is not None
    run.slow_work.submit(_prune, run.folder, run.journal, budget_bytes)


def _prune(folder: RunFolder, journal: Journal, budget_bytes: float) -> None:
    try:
        paths = folder.checkpoints()
        marks = [checkpoint.load_state(path, ServedState).journal for path in paths[-checkpoint.KEEP :]]
        if marks and (surplus := journal.to_prune(min(marks, key=lambda mark: mark.number), budget_bytes)):
            for path in paths[: -checkpoint.KEEP]:
                checkpoint.discard(path)
            for path in surplus:
                with contextlib.suppress(OSError):  # what stays is removed next time
                    path.unlink()
    except (OSError, UserError) as error:
        log.warning("Nothing could be removed from the journal: %s", error)
