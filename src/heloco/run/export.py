"""A run's model as one safetensors file with the names of its state_dict, or as a folder that Hugging Face's library loads."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from heloco.corpus.tokenizer_export import write_tokenizer
from heloco.disk import disk_errors
from heloco.errors import UserError
from heloco.records.run_facts import RunFacts
from heloco.run.config import gpt_config
from heloco.run.folder import RunFolder
from heloco.task.gpt2_form import as_gpt2
from heloco.task.hf import open_hf, save, transformers
from heloco.wire.blocks import BUFFER, PARAMETER, block_name

FORMATS = ("safetensors", "hf")


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
            temporary.replace(out)
        finally:
            temporary.unlink(missing_ok=True)
    return count


def _name_tensors(facts: RunFacts, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], int]:
    """A checkpoint's outer parameters and buffers by the model's names for them, and the number of parameters."""
    named_tensors = {block.name: tensors[block_name(PARAMETER, i)] for i, block in enumerate(facts.blocks)}
    count = sum(t.numel() for t in named_tensors.values())
    named_tensors |= {alias: named_tensors[name].clone() for alias, name in facts.tied.items()}
    named_tensors |= {name: tensors[block_name(BUFFER, i)] for i, name in enumerate(facts.buffers)}
    return named_tensors, count


def export_hf(folder: RunFolder, out: Path) -> tuple[int, bool]:
    """Writes a folder for `AutoModelForCausalLM.from_pretrained`, whole or not at all; returns the number of parameters, and
    whether the tokenizer is there too."""
    config = folder.config(for_task=True)
    if config.input.task != "language":
        raise UserError(f"There is no Hugging Face form of the task {config.input.task}: use --format safetensors.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is no empty folder: choose another --out.")
    named_tensors, count = _name_tensors(folder.facts(), folder.load_model()[1])
    hf = open_hf(config.model.hf) if config.model.hf else None
    transformers()  # says so where it is missing, before anything is written
    place = out.resolve()
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    with disk_errors(out, "export again."):
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.mkdir()
            end_of_text = write_tokenizer(config.input.tokenizer, config.input.data, temporary)
            if hf is not None:
                hf.write(temporary, named_tensors)
            else:
                save(as_gpt2(gpt_config(config.model), named_tensors, end_of_text), temporary)
            temporary.replace(place)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return count, end_of_text is not None
