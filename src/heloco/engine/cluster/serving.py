"""From a config, or from a run's folder, to a service that runs."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heloco.engine.build import build_parts, build_synchronizer, pick_device
from heloco.engine.cluster.recorded import RecordedRun
from heloco.engine.cluster.service import Service
from heloco.engine.local import Observer, describe
from heloco.errors import UserError
from heloco.run import RunConfig, RunFolder
from heloco.run.tensors import Layout
from heloco.task import Scores, ShardInfo, Task

TICK_S = 0.2
ENDLESS = 1 << 60
"""Windows of a shard that is a machine's own business."""


def evaluation_of(task: Task, model: nn.Module, buffers: Callable[[], list[Tensor]]) -> Callable[[], Scores]:
    """The scores of the outer model as it stands."""

    @torch.no_grad()
    def evaluate() -> Scores:
        for ours, kept in zip(model.buffers(), buffers(), strict=True):
            ours.copy_(kept)
        return task.evaluate(model)

    return evaluate


def recorded_run(task: Task, config: RunConfig, folder: RunFolder | None, observers: list[Observer] | None = None) -> RecordedRun:
    """Not begun yet."""
    parts = build_parts(task, config)
    evaluate = evaluation_of(task, parts.model, lambda: parts.synchronizer.buffers)
    return RecordedRun(parts.synchronizer, config, task_digest=task.digest, folder=folder, evaluate=evaluate, observers=observers)


def new_run(task: Task, config: RunConfig, path: Path, observers: list[Observer] | None = None) -> Service:
    folder = RunFolder.create(path, config, describe(task, config, task.build_model(), clock="real"))
    return _begun(recorded_run(task, config, folder, observers), config, folder)


def old_run(task: Task, folder: RunFolder, config: RunConfig, observers: list[Observer] | None = None) -> Service:
    """Takes a run up again; `config` may have other cluster settings than it had."""
    if task.digest != folder.meta()["task_digest"]:
        raise UserError(
            "The data or the tokenizer is not the one this run was started with: give the same text, e.g. with --data."
        )
    return _begun(recorded_run(task, config, folder, observers), config, folder)


def _begun(run: RecordedRun, config: RunConfig, folder: RunFolder, found: Any = None) -> Service:
    try:
        run.begin()
        digests = {"task_digest": run.task_digest, "model_digest": folder.meta().get("model_digest", "")}
        return Service(run, config, folder.path, **digests, found=found)
    except BaseException:
        run.close()
        raise


# ---- runs whose model comes from outside


class Brought(nn.Module):
    """The blocks of a model that a machine brought, without what it computes."""

    def __init__(self, layout: Layout, tensors: dict[str, Tensor], names: list[str]) -> None:
        super().__init__()
        kinds = {kind: [n for n in layout.names if n.startswith(f"{kind}.")] for kind in ("parameter", "buffer")}
        total = sum(map(len, kinds.values()))
        if total != len(layout.names) or len(names) != total or len(set(names)) != total:
            raise UserError("The model's blocks must be named parameter.0, …, buffer.0, …, with a name of their own each.")
        self.block_names = names[: len(kinds["parameter"])]
        self.buffer_names = names[len(kinds["parameter"]) :]
        for i in range(len(kinds["parameter"])):
            self.register_parameter(f"p{i}", nn.Parameter(tensors[f"parameter.{i}"].clone(), requires_grad=False))
        for i in range(len(kinds["buffer"])):
            self.register_buffer(f"b{i}", tensors[f"buffer.{i}"].clone())


class BroughtTask:
    """Stands for a task that only the machines know."""

    unit = "samples"

    def __init__(self, workers: int) -> None:
        self.shards = tuple(ShardInfo(f"machine {i}", ENDLESS) for i in range(workers))
        self.digest = "external"


def external_run(config: RunConfig, path: Path, observers: list[Observer] | None = None) -> Service:
    """A run that begins with the model of the first machine that joins, or goes on with the one it has."""
    task = BroughtTask(len(config.workers.paces))

    def made(model: Brought, folder: RunFolder) -> RecordedRun:
        model.to(pick_device(config.run.device))
        synchronizer = build_synchronizer(config, model, [shard.windows for shard in task.shards])
        return RecordedRun(synchronizer, config, task_digest=task.digest, folder=folder, observers=observers)

    def found(layout: Layout, tensors: dict[str, Tensor], names: list[str]) -> RecordedRun:
        model = Brought(layout, tensors, names)
        run = made(model, RunFolder.create(path, config, _described(task, config, model), among=_OURS))
        run.begin()
        return run

    if (path / "config.toml").exists():
        folder = RunFolder.open(path)
        run = made(remembered(folder), folder)
        return _begun(run, config, folder, found)
    path.mkdir(parents=True, exist_ok=True)
    RunFolder.check_free(path, among=_OURS)
    return Service(None, config, path, task_digest=task.digest, found=found)


_OURS = ("run-id", "model.partial", "credentials", "workers", "ray")
"""What may lie in the folder before the model is there."""


def _described(task: Any, config: RunConfig, model: Brought) -> dict[str, Any]:
    meta = describe(task, config, model, clock="real")
    for block, name in zip(meta["blocks"], model.block_names, strict=True):
        block["name"] = name
    return {**meta, "buffers": model.buffer_names, "dtypes": [str(p.dtype).removeprefix("torch.") for p in model.parameters()]}


def remembered(folder: RunFolder) -> Brought:
    """The model of a run that has begun: its shapes; the values come from the checkpoint."""
    _, tensors = folder.load_model()
    meta = folder.meta()
    kept = {name: t for name, t in tensors.items() if name.startswith(("parameter.", "buffer."))}
    names = [block["name"] for block in meta["blocks"]] + list(meta["buffers"])
    return Brought(Layout.of(kept), kept, names)


# ---- time


class Housekeeper(threading.Thread):
    """Lets time pass for a service: lost machines, pauses, checkpoints."""

    def __init__(self, service: Service) -> None:
        super().__init__(name="heloco-housekeeper", daemon=True)
        self.service = service
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(TICK_S):
            try:
                self.service.tick()
            except Exception as error:
                with self.service.lock:
                    self.service._fail(f"the synchronizer met an error of its own ({type(error).__name__}: {error}).")

    def end(self) -> None:
        self._over.set()
        self.join()
