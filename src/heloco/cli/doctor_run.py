"""What `heloco doctor ADDRESS` tries of the run's task on this machine: its data, its tokenizer, memory, and one inner step."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from heloco.cli.findings import Finding
from heloco.errors import UserError

if TYPE_CHECKING:
    import torch

    from heloco.cluster.protocol.messages import RunInfo
    from heloco.run import RunConfig
    from heloco.task import Task

MODELS_HELD = 6
"""What a round takes at least, in models: parameters, gradients, two moments of the optimizer, the round's start, and the
contribution."""
MEMORY = Path("/proc/meminfo")


def check_task(info: "RunInfo", arguments: argparse.Namespace) -> Iterator[Finding]:
    """Builds the run's task here and makes an inner step of it, as `heloco join` would."""
    if info.external:
        yield Finding("task", True, "machines bring their own model and data: what a script needs is known when it runs")
        return
    from heloco.cluster.client.worker import task_of

    places = {name: getattr(arguments, name) for name in ("data", "tokenizer", "hf", "device")}
    try:
        task, config = task_of(info, **places)
    except (UserError, OSError) as error:
        yield from _what_is_missing(info, arguments, str(error))
        return
    yield Finding(
        "data", True, f"{_short(config.input.data)}: the run's, {sum(shard.windows for shard in task.shards):,} samples"
    )
    if config.input.task == "language":
        yield Finding("tokenizer", True, f"{_short(config.input.tokenizer)}: the run's")
    memory = _check_memory(task, config)
    yield memory
    if memory.is_good:
        yield _check_step(task, config)


def _what_is_missing(info: "RunInfo", arguments: argparse.Namespace, reason: str) -> Iterator[Finding]:
    """The task could not be built: because of the tokenizer if that cannot be loaded by itself, else because of the data."""
    from heloco.corpus import load_tokenizer
    from heloco.run.settings import parse_toml

    values = parse_toml(info.config, "the run's config", for_task=True)
    tokenizer, data = (getattr(arguments, name) or str(values.get(name, "")) for name in ("tokenizer", "data"))
    is_folder = data not in ("", "builtin") and not data.startswith("hf:")
    try:
        if tokenizer and values.get("task") == "language":
            load_tokenizer(tokenizer, Path(data).expanduser() if is_folder else None)
    except (UserError, OSError) as error:
        yield Finding("tokenizer", False, f"{error} Give it with --tokenizer FILE.")
        return
    yield Finding("data", False, reason)


def _check_memory(task: "Task", config: "RunConfig") -> Finding:
    """Whether model, optimizer and the round's start fit into the memory that is free. Activations come on top of that."""
    from heloco.engine.build import pick_device
    from heloco.engine.stack_limits import model_bytes

    try:
        device = pick_device(config.run.device)
        needed = MODELS_HELD * model_bytes(task.build_model())
    except (UserError, MemoryError, RuntimeError) as error:
        return Finding("memory", False, str(error).splitlines()[0])
    free = free_bytes(device)
    place = "on the GPU" if device.type == "cuda" else "in memory"
    text = f"a round takes {needed / 1e9:.2f} GB {place} and what its samples take, and {free / 1e9:.2f} GB are free"
    return Finding("memory", needed < free, text if needed < free else f"{text}: free some, or join with a larger machine")


def free_bytes(device: "torch.device") -> float:
    """The memory that processes may still take, of the GPU or of the machine."""
    from heloco.engine.stack_limits import free_memory

    if device.type != "cuda" and MEMORY.exists():
        for line in MEMORY.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return 1024.0 * int(value.split()[0])
    return free_memory(device)


def _check_step(task: "Task", config: "RunConfig") -> Finding:
    """Makes two inner steps as `heloco join` does, and compares a round with the longest that the run allows."""
    from heloco.cluster.client.worker import Worker

    try:
        worker = Worker(task, config, tell=lambda _: None)
        step_s = worker.warm_up()
    except (UserError, MemoryError, RuntimeError) as error:
        return Finding("inner step", False, f"failed: {(str(error).splitlines() or [type(error).__name__])[0]}")
    round_s, limit_s = step_s * config.rounds.inner_steps, config.cluster.round_limit_s
    text = f"{step_s:.3g} s; a round of {config.rounds.inner_steps} steps takes {round_s:.3g} s without its transfers"
    if round_s > limit_s:
        return Finding("inner step", False, f"{text}, and the run allows {limit_s:g} s (round_limit_s): use a faster machine")
    return Finding("inner step", True, f"{text}, on {worker.inner.device}")


def _short(place: str) -> str:
    return place or "the model's own"
