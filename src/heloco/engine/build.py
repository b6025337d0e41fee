"""From a config to the objects of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from heloco.engine.schedule import steps_of_workers
from heloco.engine.simulated_links import FileSizes, SimulatedLinks
from heloco.errors import UserError
from heloco.inner import InnerOptions, SequentialInner
from heloco.ledger import Ledger
from heloco.methods import get_method
from heloco.policy import Drop, make_choice, make_guard, make_weight
from heloco.records.provenance import Provenance
from heloco.records.run_facts import RunFacts
from heloco.run.config import RunConfig, outer_knobs, weight_name, weight_options
from heloco.run.settings import named_in
from heloco.run.task_config import gpt_config
from heloco.synchronizer import Synchronizer
from heloco.task import BUILT_IN_TASKS, TASKS, Task
from heloco.wire.blocks import name_start

HF_CONTEXT = 128
"""Tokens per sample of a Hugging Face model where nothing is said: the paper's, and not the thousands that it may be made for."""


def build_task(config: RunConfig, progress: Any = None) -> tuple[Task, RunConfig]:
    """The task, and the config with what only the data could tell: sources, vocabulary, absolute paths; and
    what only a Hugging Face model could tell: its context and tokenizer."""
    data, model, seed = config.input, config.model, config.run.seed
    if data.task not in BUILT_IN_TASKS:
        return TASKS.find(data.task)(config), replace(config, input=replace(data, data=_absolute(data.data)))
    if data.task == "external":
        raise UserError("The external task is whatever model machines bring to a real run: `heloco serve --task external`.")
    if data.task == "images":
        from heloco.task.images import ImagesTask

        return ImagesTask(seed=seed), config
    from heloco.corpus import prepare, split
    from heloco.task.hf_adapter import open_model
    from heloco.task.language import LanguageTask

    hf = open_model(model.hf, rank=model.lora, alpha=model.lora_alpha, targets=model.lora_targets) if model.hf else None
    if hf is not None:
        model = replace(model, hf=hf.source, context=model.context or min(hf.context, HF_CONTEXT))
    data = replace(data, tokenizer=data.tokenizer or (hf.tokenizer() if hf else "bytes"))
    corpus = prepare(
        data.data,
        data.tokenizer,
        languages=data.languages or None,
        limit_bytes=round(data.limit_mb * 1e6) if data.data.startswith("hf:") else None,
        field=data.field,
        progress=progress,
    )
    how_many = len(corpus.sources) if data.split == "source" else len(config.rounds.paces)
    shards = split(corpus, scheme=data.split, shards=how_many, context=model.context, alpha=data.alpha, seed=seed)
    if hf is None:
        model = replace(model, vocab_size=model.vocab_size or corpus.vocab_size)
    architecture = hf or gpt_config(model)
    task = LanguageTask(corpus, shards, architecture, context=model.context, seed=seed, eval_windows=model.eval_windows)
    effective = replace(
        config,
        input=replace(
            data,
            data=_absolute(data.data),
            tokenizer=_absolute(data.tokenizer),
            languages=[source.name for source in corpus.sources],
        ),
        model=model,
    )
    return task, effective


def _absolute(name: str) -> str:
    """A path that holds from any folder; names such as builtin, gpt2 or hf:… stay, even where a file is called so."""
    if name in ("builtin", "bytes", "gpt2") or name.startswith("hf:"):
        return name
    return str(Path(name).expanduser().resolve()) if Path(name).expanduser().exists() else name


@dataclass(frozen=True)
class Parts:
    """The objects of one run, built from its config."""

    task: Task
    config: RunConfig
    model: nn.Module
    """The outer model: its parameters are the ones the outer rule moves."""
    synchronizer: Synchronizer
    device: torch.device

    @cached_property
    def inner(self) -> SequentialInner:
        """The inner loop of the run, built when it is first used."""
        return SequentialInner(self.task, self.config.inner, seed=self.config.run.seed, device=self.device)


def build_parts(task: Task, config: RunConfig, model: nn.Module | None = None) -> Parts:
    """The objects of a run. `model` is one with the task's initial parameters, if the caller has it already."""
    device = pick_device(config.run.device)
    model = task.build_model().to(device) if model is None else model
    return Parts(task, config, model, build_synchronizer(config, model, [shard.windows for shard in task.shards]), device)


def file_sizes(config: RunConfig, model: nn.Module) -> FileSizes:
    """Bytes of what travels between workers and synchronizer."""
    return FileSizes.from_model(config.links, list(model.parameters()), list(model.buffers()))


def build_links(config: RunConfig, model: nn.Module) -> SimulatedLinks:
    """The links of a simulated run."""
    return SimulatedLinks(config.links, file_sizes(config, model), workers=len(config.rounds.paces), seed=config.run.seed)


def build_synchronizer(config: RunConfig, model: nn.Module, windows: Sequence[int]) -> Synchronizer:
    """A synchronizer that moves the model's own parameters. `windows` is the size of each shard."""
    rounds, outer = config.rounds, config.outer
    method = get_method(outer.method)
    return Synchronizer(
        method.build(model.parameters(), workers=len(rounds.paces), **outer_knobs(outer)),
        inner_steps=steps_of_workers(config, build_links(config, model)),
        windows_per_step=config.inner.windows_per_step,
        ledger=Ledger(windows),
        choose_shard=make_choice(rounds.assign, workers=len(rounds.paces), shards=len(windows), seed=config.run.seed),
        weight=make_weight(weight_name(config), **weight_options(config)),
        planned_arrivals=config.run.arrivals,
        drop=Drop(outer.drop, outer.drop_above),
        guard=make_guard(outer.norm_limit, outer.norm_policy),
        barrier=method.barrier,
        buffers=list(model.buffers()),
    )


@torch.no_grad()
def load_model(task: Task, tensors: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """The task's model with a checkpoint's outer parameters and buffers."""
    model = task.build_model().to(device)
    for name, tensor in name_start(model.parameters(), model.buffers()).items():
        saved_tensor = tensors.get(name)
        if saved_tensor is None or saved_tensor.shape != tensor.shape:
            raise UserError("The checkpoint does not fit the run's model: its config.toml was changed. Restore it.")
        tensor.copy_(saved_tensor)
    return model


def model_digest(task: Task) -> str:
    """The digest of what describes the model outside of the run's config; empty if nothing does."""
    digest: str = getattr(task, "model_digest", "")
    return digest


def model_files(config: RunConfig) -> str:
    """The files of the run's model of which that is the digest, in words."""
    return "config.json" if config.model.lora is None else "config.json or a file of weights"


def check_model(task: Task, config: RunConfig, facts: RunFacts) -> None:
    """Raises UserError if the model that the config names is not what it was when the run began."""
    if model_digest(task) != facts.model_digest:
        raise UserError(f"The {model_files(config)} of {config.model.hf} is not the one this run was started with: restore it.")


def plugins_of(config: RunConfig) -> dict[str, str]:
    """What the config names that comes from another installed package, and that package with its version. run.json keeps it."""
    origins = {f"{registry.kind} {name}": registry.origin(name) for registry, name in named_in(config)}
    return {item: package for item, package in origins.items() if package}


def pick_device(name: str) -> torch.device:
    """The device of this name; auto means the GPU if there is one, otherwise the CPU. Raises UserError if the device cannot be
    used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"The device {name!r} cannot be used here ({str(error).splitlines()[0]}): try --device cpu.") from error
    return device


def provenance_of(device: torch.device, options: InnerOptions) -> Provenance:
    """What a simulation with these options is computed by."""
    on_gpu = device.type == "cuda"
    exact = "tf32" if on_gpu else "fp32"
    return Provenance(
        device=torch.cuda.get_device_name(device) if on_gpu else device.type,
        precision=exact if options.precision == "fp32" else options.precision,
        torch=str(torch.__version__),
    )
