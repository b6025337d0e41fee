"""A run's model as one safetensors file with the names of its state_dict, or as a folder that Hugging Face's libraries load: the
whole model, or of a run that trained an adapter, the adapter."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from heloco.corpus.tokenizer_export import write_tokenizer
from heloco.disk import disk_errors, make_readable
from heloco.errors import UserError
from heloco.records.run_facts import RunFacts
from heloco.run.config import RunConfig
from heloco.run.folder import RunFolder
from heloco.run.task_config import gpt_config
from heloco.task.gpt2_form import as_gpt2
from heloco.task.hf import open_hf, save, transformers
from heloco.task.hf_adapter import ADAPTER, ADAPTER_CONFIG, adapter_name, open_model
from heloco.wire.blocks import BUFFER, FROZEN, PARAMETER, block_name

FORMATS = ("safetensors", "hf")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def export_model(folder: RunFolder, out: Path) -> int:
    """Writes the newest checkpoint's outer parameters and buffers; returns the number of parameters. Needs no data."""
    state, tensors = folder.load_model()
    facts = folder.facts()
    named_tensors, count = _name_tensors(facts, tensors)
    for name in facts.passing_buffers:  # a state_dict does not hold these
        del named_tensors[name]
    if out.is_dir():
        raise UserError(f"{out} is a folder: name the file to write, e.g. --out {out / 'model.safetensors'}.")
    with disk_errors(out, "export again."):
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = out.with_name(f".{out.name}.partial")
        try:
            save_file(named_tensors, temporary, metadata={"format": "pt", "method": facts.method, "arrival": str(state.arrival)})
            make_readable(temporary)
            temporary.replace(out)
        finally:
            temporary.unlink(missing_ok=True)
    return count


def _name_tensors(facts: RunFacts, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """A checkpoint's outer parameters and buffers by the model's names for them, and the number of parameters."""
    named_tensors = {block.name: tensors[block_name(PARAMETER, i)] for i, block in enumerate(facts.blocks)}
    count = sum(t.numel() for t in named_tensors.values())
    named_tensors |= {alias: named_tensors[name].clone() for alias, name in facts.tied.items()}
    named_tensors |= {name: tensors[block_name(BUFFER, i)] for i, name in enumerate(facts.buffers) if name != FROZEN}
    return named_tensors, count


def export_hf(folder: RunFolder, out: Path, model_folder: Path | None = None) -> tuple[int, bool]:
    """Writes a folder for `AutoModelForCausalLM.from_pretrained`, whole or not at all; returns the number of parameters, and
    whether the tokenizer is there too. `model_folder`, for a run whose model came with its machines: where its config.json is, or
    the adapter_config.json of its adapter."""
    config, facts = folder.config(for_task=True), folder.facts()
    if not facts.is_external and config.input.task != "language":
        raise UserError(f"There is no Hugging Face form of the task {config.input.task}: use --format safetensors.")
    if facts.is_external != (model_folder is not None):
        raise UserError(
            "This run's model came with its machines: say with --hf DIR where its config.json is, or its adapter_config.json."
            if facts.is_external
            else "--hf is for a run whose model came with its machines, and this run has its own: leave it out."
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is no empty folder: choose another --out.")
    named_tensors, count = _name_tensors(facts, folder.load_model()[1])
    write = _form_of_ours(config) if model_folder is None else _form_of_theirs(model_folder, facts)
    has_tokenizer = False

    def write_into(temporary: Path) -> None:
        nonlocal has_tokenizer
        has_tokenizer = write(temporary, named_tensors)
        for path in temporary.iterdir():
            make_readable(path)

    _write_folder(out, write_into)
    return count, has_tokenizer


Write = Callable[[Path, Mapping[str, Tensor]], bool]
"""Writes a model with these tensors into an empty folder. Returns whether a tokenizer is there too."""


def _form_of_ours(config: RunConfig) -> Write:
    """A model of a built-in task."""
    model = config.model
    hf = open_model(model.hf, rank=model.lora, alpha=model.lora_alpha, targets=model.lora_targets) if model.hf else None
    transformers()  # says so where it is missing, before anything is written

    def write(folder: Path, tensors: Mapping[str, Tensor]) -> bool:
        end_of_text = write_tokenizer(config.input.tokenizer, config.input.data, folder)
        if hf is not None:
            hf.write(folder, tensors)
        else:
            save(as_gpt2(gpt_config(config.model), tensors, end_of_text), folder)
        return end_of_text is not None

    return write


def _form_of_theirs(source: Path, facts: RunFacts) -> Write:
    """A model that came with the machines: Hugging Face's, or an adapter for one."""
    is_adapter = (source / ADAPTER_CONFIG).is_file()
    trained_names = [block.name for block in facts.blocks]
    if is_adapter and not all(name.startswith("base_model.") for name in trained_names):
        raise UserError(f"{source} has an {ADAPTER_CONFIG}, and this run trained {trained_names[0]!r}, which is of no adapter.")
    hf = None if is_adapter else open_hf(str(source))

    def write(folder: Path, tensors: Mapping[str, Tensor]) -> bool:
        if hf is not None:
            hf.write(folder, tensors)
        else:
            shutil.copyfile(source / ADAPTER_CONFIG, folder / ADAPTER_CONFIG)
            adapter = {adapter_name(name): tensors[name].contiguous() for name in trained_names}
            save_file(adapter, folder / ADAPTER, metadata={"format": "pt"})
        for name in _TOKENIZER_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        return (folder / _TOKENIZER_FILES[0]).is_file()

    return write


def _write_folder(out: Path, write_into: Callable[[Path], None]) -> None:
    """A folder, whole or not at all."""
    place = out.resolve()
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    with disk_errors(out, "export again."):
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.mkdir()
            write_into(temporary)
            temporary.replace(place)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
