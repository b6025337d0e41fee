"""Opens a service: a new run from a config, or an existing run from its folder."""

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from torch import Tensor, nn

from heloco.cluster.server.evaluation_queue import FOLDER as EVALUATING
from heloco.cluster.server.journaled_run import JournaledRun
from heloco.cluster.server.model_intake import RunFactory
from heloco.cluster.server.resumption import Resumption
from heloco.cluster.server.scorers import scorer_for
from heloco.cluster.server.service import Service
from heloco.cluster.server.transfers import ROUNDS, SnapshotStore
from heloco.disk import disk_errors
from heloco.engine.build import build_parts, build_synchronizer, pick_device
from heloco.engine.local import Observer, describe
from heloco.errors import UserError
from heloco.inner import InnerOptions
from heloco.records.journal_reader import FOLDER as JOURNAL
from heloco.records.journal_reader import read_events
from heloco.records.run_facts import EXTERNAL, BlockFacts, RunFacts
from heloco.records.run_files import (
    CHECKPOINTS,
    CONFIG,
    CREDENTIALS,
    EVALS,
    INCOMING,
    META,
    MODEL_PARTIAL,
    RUN_ID,
    TAPE,
    WORKERS,
)
from heloco.run import RunConfig, RunFolder, checkpoint
from heloco.run.checkpoint import CheckpointDamaged, CheckpointState
from heloco.task import ShardInfo, Task
from heloco.wire import blocks
from heloco.wire.layout import Layout

ENDLESS = 1 << 60
"""Windows of a shard in an external run, where the machines have the data."""
SERVED_LINK_SETTINGS = frozenset({"wire", "rounding", "error_feedback", "feedback_decay"})
"""The settings of [links] that a served run honours."""
Clock = Callable[[], float]


def check_servable(config: RunConfig) -> None:
    """Raises UserError for settings that only a simulation supports, and for settings that can never be satisfied."""
    rounds, cluster = config.rounds, config.cluster
    if any(pace != 1 for pace in rounds.paces):
        raise UserError(
            f"paces are {', '.join(f'{pace:g}' for pace in rounds.paces)}: real machines have paces of their own, which are "
            f"measured. Leave paces out and say how many workers the run has: workers = {len(rounds.paces)}."
        )
    links = config.links
    whole_starts = {"wire_down"} if links.wire_down == "fp32" else set[str]()
    if options := [name for name in links.changed_options if name not in SERVED_LINK_SETTINGS | whole_starts]:
        raise UserError(
            f"{', '.join(options)} cannot be set in a served run yet: starts travel whole, machines wait for them, and links "
            "have the speed that they have. Leave it out, or simulate the run."
        )
    if config.inner.second_moment:
        raise UserError(
            "second_moment is set, and real machines do not exchange AdamW's state: leave it out, or simulate the run."
        )
    if config.input.task == EXTERNAL and (config.inner.compile or config.inner.precision != InnerOptions().precision):
        name = "compile" if config.inner.compile else "precision"
        raise UserError(
            f"{name} is set, but the machines of an external run have loops of their own: leave it out, and set it there."
        )
    if cluster.min_workers > len(rounds.paces):
        raise UserError(
            f"min_workers is {cluster.min_workers}, and the run has {len(rounds.paces)} workers: that many machines can never "
            "take part. Lower min_workers, or give the run more workers."
        )


def journaled_run(
    task: Task,
    config: RunConfig,
    folder: RunFolder | None,
    observers: list[Observer] | None = None,
    task_config: RunConfig | None = None,
) -> JournaledRun:
    """A run of one of the built-in tasks, not begun yet. `task_config`: what another process can build the task from."""
    synchronizer = build_parts(task, config).synchronizer
    scorer = scorer_for(task, config, task_config, model_bytes=synchronizer.theta_bytes)
    return JournaledRun(synchronizer, config, task_digest=task.digest, folder=folder, scorer=scorer, observers=observers)


def new_run(
    task: Task,
    config: RunConfig,
    path: Path,
    observers: list[Observer] | None = None,
    clock: Clock = time.monotonic,
    task_config: RunConfig | None = None,
) -> Service:
    """Creates the folder of a run at `path`, and begins to serve the run."""
    check_servable(config)
    folder = RunFolder.create(path, config, describe(task, config, task.build_model(), clock="real"))
    return _begin_service(journaled_run(task, config, folder, observers, task_config), clock)


def old_run(
    task: Task,
    folder: RunFolder,
    config: RunConfig,
    observers: list[Observer] | None = None,
    clock: Clock = time.monotonic,
    task_config: RunConfig | None = None,
) -> Service:
    """Resumes a run from its folder. `config` may have other cluster settings than before."""
    check_servable(config)
    if task.digest != folder.facts().task_digest:
        raise UserError(
            "The data or the tokenizer is not the one this run was started with: give the same text, e.g. with --data."
        )
    return _begin_service(journaled_run(task, config, folder, observers, task_config), clock)


def _begin_service(run: JournaledRun, clock: Clock, create_run: RunFactory | None = None) -> Service:
    assert run.folder is not None
    try:
        starts, notices = begin(run)
        model_digest = run.folder.facts().model_digest
        service = Service(
            run.config,
            run.folder.path,
            task_digest=run.task_digest,
            model_digest=model_digest,
            create_run=create_run,
            clock=clock,
        )
        service.notices += notices
        service.take_up(run, starts)
        return service
    except BaseException:
        run.close()
        raise


def rebuild(folder: RunFolder, model_folder: RunFolder, task: Task | None) -> JournaledRun:
    """The run of a folder, not begun, to follow its journal again. Without a `task` it is an
    external run, and the shapes of its model are in `model_folder`."""
    config = folder.config()
    if task is not None:
        return journaled_run(task, config, folder, None)
    model, external_task = load_external_model(model_folder), ExternalTask(len(config.rounds.paces))
    synchronizer = build_synchronizer(config, model, [shard.windows for shard in external_task.shards])
    return JournaledRun(synchronizer, config, task_digest=external_task.digest, folder=folder)


def begin(run: JournaledRun) -> tuple[SnapshotStore, list[str]]:
    """Starts or resumes the run. Returns the store of its start files, and notices about its folder."""
    assert run.folder is not None
    run.folder.take()
    starts = SnapshotStore(run.folder.path, run.start_layout)
    resumption = Resumption(run, starts)
    resumption.begin()
    return starts, resumption.notices


# ---- external runs: a machine brings the model


class ExternalModel(nn.Module):
    """The parameters and buffers of a model that a machine brought, without its forward function."""

    def __init__(self, layout: Layout, tensors: dict[str, Tensor], names: list[str]) -> None:
        super().__init__()
        parameters, buffers = (blocks.blocks_of(kind, tensors) for kind in (blocks.PARAMETER, blocks.BUFFER))
        total = len(parameters) + len(buffers)
        if total != len(layout.names) or len(names) != total or len(set(names)) != total:
            raise UserError("The model's blocks must be named parameter.0, …, buffer.0, …, with a name of their own each.")
        self.block_names, self.buffer_names = names[: len(parameters)], names[len(parameters) :]
        for i, parameter in enumerate(parameters):
            self.register_parameter(f"p{i}", nn.Parameter(parameter.clone(), requires_grad=False))
        for i, buffer in enumerate(buffers):
            self.register_buffer(f"b{i}", buffer.clone())


class ExternalTask:
    """Takes the place of a task in an external run, where only the machines know the task."""

    unit = "samples"

    def __init__(self, workers: int) -> None:
        self.shards = tuple(ShardInfo(f"machine {i}", ENDLESS) for i in range(workers))
        self.digest = "external"


def external_run(
    config: RunConfig, path: Path, observers: list[Observer] | None = None, clock: Clock = time.monotonic
) -> Service:
    """An external run: it begins with the model of the first machine that joins, or continues with the model it has."""
    check_servable(config)
    task = ExternalTask(len(config.rounds.paces))

    def build(model: ExternalModel, folder: RunFolder) -> JournaledRun:
        model.to(pick_device(config.run.device))
        synchronizer = build_synchronizer(config, model, [shard.windows for shard in task.shards])
        return JournaledRun(
            synchronizer, config, task_digest=task.digest, folder=folder, machines_evaluate=True, observers=observers
        )

    def create_run(layout: Layout, tensors: dict[str, Tensor], names: list[str]) -> tuple[JournaledRun, SnapshotStore]:
        model = ExternalModel(layout, tensors, names)
        folder = RunFolder.create(path, config, _describe(task, config, model), among=_ALLOWED_BEFORE_MODEL)
        with contextlib.ExitStack() as if_it_fails, disk_errors(path, "the run begins with the model that was sent."):
            if_it_fails.callback(_remove_unfinished, path)
            if_it_fails.callback(folder.close)
            run = build(model, folder)
            if_it_fails.callback(run.close)
            starts, _ = begin(run)
            if_it_fails.pop_all()
        return run, starts

    if (path / CONFIG).exists() and not has_begun(path):
        _remove_unfinished(path)
    if (path / CONFIG).exists():
        folder = RunFolder.open(path)
        return _begin_service(build(load_external_model(folder), folder), clock, create_run)
    path.mkdir(parents=True, exist_ok=True)
    RunFolder.check_free(path, among=_ALLOWED_BEFORE_MODEL)
    return Service(config, path, task_digest=task.digest, create_run=create_run, clock=clock)


_ALLOWED_BEFORE_MODEL = (RUN_ID, MODEL_PARTIAL, CREDENTIALS, WORKERS, INCOMING)
"""Names that may exist in the folder before the run has its model."""
_MADE_WITH_MODEL = (CONFIG, META, TAPE, EVALS, CHECKPOINTS, ROUNDS, JOURNAL, EVALUATING)
"""Names that are created when the model has arrived. The first checkpoint is written last."""


def has_begun(path: Path) -> bool:
    """Whether an external run has, or once had, its first checkpoint. If it had one, its journal has events."""
    return bool(list((path / CHECKPOINTS).glob("arrival-*"))) or any(True for _ in read_events(path / JOURNAL))


def _remove_unfinished(path: Path) -> None:
    """Removes what a kill or a full disk left of a run that had not begun. The next machine brings its model again."""
    for name in _MADE_WITH_MODEL:
        if (path / name).is_dir():
            shutil.rmtree(path / name)
        else:
            (path / name).unlink(missing_ok=True)


def _describe(task: Any, config: RunConfig, model: ExternalModel) -> RunFacts:
    facts = describe(task, config, model, clock="real")
    named_blocks = zip(model.block_names, facts.blocks, strict=True)
    return replace(
        facts,
        blocks=[BlockFacts(name, block.shape) for name, block in named_blocks],
        buffers=model.buffer_names,
        dtypes=[str(p.dtype).removeprefix("torch.") for p in model.parameters()],
    )


def load_external_model(folder: RunFolder) -> ExternalModel:
    """The model of an external run that has begun, from its newest readable checkpoint."""
    damage: CheckpointDamaged | None = None
    for path in reversed(folder.checkpoints()):
        try:
            _, tensors = checkpoint.load(path, CheckpointState)
        except CheckpointDamaged as error:
            damage = damage or error
            continue
        facts = folder.facts()
        model_tensors = {
            name: tensors[name]
            for name in tensors
            if blocks.is_of_kind(blocks.PARAMETER, name) or blocks.is_of_kind(blocks.BUFFER, name)
        }
        names = [block.name for block in facts.blocks] + facts.buffers
        return ExternalModel(Layout.from_tensors(model_tensors), model_tensors, names)
    raise damage or UserError(f"{folder.path} has no checkpoint, and with them the model that was brought is gone: restore them.")
