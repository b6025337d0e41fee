"""How much memory Ray's object store needs for a run."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import torch

from heloco.cluster.server.process import ServeSpec
from heloco.errors import UserError
from heloco.records.run_facts import read_facts
from heloco.records.run_files import META
from heloco.run.config import RunConfig, resolve
from heloco.run.settings import parse_toml, with_fields
from heloco.run.task_config import gpt_config
from heloco.task.gpt import TinyGPT


def store_bytes(spec: ServeSpec) -> int:
    """Size of the store: (workers + 2) models, or a third of the machine's memory if the model is not known yet. Unused
    memory of the store is not allocated."""
    with contextlib.suppress(UserError):
        facts = read_facts(Path(spec.folder) / META)
        return (len(facts.paces) + 2) * facts.parameters * 4
    if not spec.config:
        return 0
    config = resolve(with_fields(RunConfig(), parse_toml(spec.config, "the run's config")))
    if config.input.task == "images":
        return 0
    if config.input.task != "language" or config.model.hf:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 3
    vocabulary = config.model.vocab_size or (257 if config.input.tokenizer == "bytes" else 50_257)
    with torch.device("meta"):
        model = TinyGPT(gpt_config(replace(config.model, vocab_size=vocabulary)))
    return (len(config.rounds.paces) + 2) * 4 * sum(p.numel() for p in model.parameters())
