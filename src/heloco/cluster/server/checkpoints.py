"""Checkpoints of a served run: its state at an event of its journal."""

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct
from torch import Tensor

from heloco.cluster.protocol.messages import Acknowledgement, Paused
from heloco.cluster.server.journaled_run import JournaledRun
from heloco.cluster.server.machine_book import MachineRecord
from heloco.errors import UserError
from heloco.records.journal import Mark
from heloco.run import checkpoint
from heloco.run.checkpoint import CheckpointDamaged


class ServedState(Struct, frozen=True, kw_only=True):
    """What a checkpoint of a served run holds in addition to the synchronizer's state."""

    journal: Mark
    time_s: float
    units: int
    paused: Paused | None
    evaluated_at: int
    started_s: dict[int, float]
    holders: dict[int, str]
    last_machines: dict[int, str]
    start_digests: dict[int, str]
    contributors: list[str]
    machines: dict[str, MachineRecord]
    acks: dict[int, list[Acknowledgement]]


def served_state(state: Mapping[str, Any]) -> ServedState:
    try:
        return msgspec.convert(state["served"], ServedState, strict=False)
    except (KeyError, msgspec.MsgspecError) as error:
        raise CheckpointDamaged(f"A checkpoint's state is not one of a served run ({error}).") from error


def load(run: JournaledRun, state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ServedState:
    """Puts the run into the state of a checkpoint."""
    if state["config_digest"] != run.config.digest():
        raise UserError("The run's config is not the one its checkpoint was made with: restore config.toml.")
    if state["task_digest"] != run.task_digest:
        raise UserError("The data or the tokenizer is not the one this run was started with: give the same text.")
    served = served_state(state)
    run.synchronizer.load_state_dict({"books": state["books"], "tensors": tensors})
    run.time_s, run.units, run.paused = served.time_s, served.units, served.paused
    run.evaluated_at, run.saved_at = served.evaluated_at, run.synchronizer.arrivals
    run.started_s, run.holders, run.last_machines = dict(served.started_s), dict(served.holders), dict(served.last_machines)
    run.start_digests = dict(served.start_digests)
    run.contributors.extend(served.contributors)
    run.book.load(served.machines)
    for worker, acks in served.acks.items():
        run.acks[worker].extend(acks)
    return served


def save(run: JournaledRun) -> None:
    """Writes a checkpoint. Events that it covers may then be pruned from the journal, and old checkpoints with them."""
    assert run.folder is not None
    run.book.forget_surplus({*run.contributors, *run.holders.values()})
    synchronizer = run.synchronizer.state_dict()
    served = ServedState(
        journal=run.journal.end, time_s=run.time_s, units=run.units, paused=run.paused, evaluated_at=run.evaluated_at,
        started_s=run.started_s, holders=run.holders, last_machines=run.last_machines, start_digests=run.start_digests,
        contributors=list(run.contributors), machines=run.book.to_records(),
        acks={worker: list(acks) for worker, acks in run.acks.items()},
    )  # fmt: skip
    state = {
        "config_digest": run.config.digest(), "task_digest": run.task_digest, "books": synchronizer["books"],
        "served": msgspec.to_builtins(served, str_keys=True),
    }  # fmt: skip
    run.journal.make_durable()
    run.folder.save_checkpoint(run.synchronizer.arrivals, state, synchronizer["tensors"], keep_first=replays_from_the_start(run))
    run.saved_at = run.synchronizer.arrivals
    make_room(run, run.config.cluster.journal_gb * 1e9)


def save_if_due(run: JournaledRun) -> None:
    """Writes a checkpoint if one is due. Called after an arrival was answered, because it may take a while."""
    arrivals_since, interval = run.synchronizer.arrivals - run.saved_at, run.config.run.checkpoint_every
    if run.lines.catch_up() and ((arrivals_since and run.is_finished) or (interval and arrivals_since >= interval)):
        save(run)


def replays_from_the_start(run: JournaledRun) -> bool:
    """Whether the journal still reaches back to the first event. If so, the first checkpoint is kept too."""
    assert run.folder is not None
    paths = run.folder.checkpoints()
    return not paths or paths[0].name == "arrival-00000000"


def make_room(run: JournaledRun, budget_bytes: float) -> None:
    """Prunes the journal to its budget. Only events that the newest checkpoints cover are removed."""
    assert run.folder is not None
    newest = run.folder.checkpoints()[-checkpoint.KEEP :]
    marks = [served_state(checkpoint.load_state(path)).journal for path in newest]
    if marks and run.journal.prune(min(marks, key=lambda mark: mark.number), budget_bytes):
        for path in run.folder.checkpoints()[: -checkpoint.KEEP]:
            checkpoint.discard(path)
