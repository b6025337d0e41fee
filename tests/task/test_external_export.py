"""Models that came with the machines, exported for Hugging Face's libraries: a whole Llama, and an adapter of one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import heloco
from support.hf_models import llama_config, reloaded, same_logits, saved, transformers
from support.local_link import LocalLink
from support.own_loops import external_runs, quiet
from support.runs import assert_refused
from support.runs import heloco as command

pytestmark = pytest.mark.usefixtures("one_thread", "offline")


def batches() -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    while True:
        yield torch.randint(300, (2, 16), generator=draw)


def trained(model: nn.Module, place: Path) -> Path:
    """A run that one loop trained with this model, which holds the run's final model afterwards."""
    with external_runs(place) as serve:
        service = serve(inner_steps=2, arrivals=2)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        with heloco.join(LocalLink(service), model, optimizer, tell=quiet):
            for tokens in batches():
                model(tokens, labels=tokens).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        service.housekeeping.save_if_due(wait=True)
    return place / "run"


@pytest.fixture
def llama(tmp_path: Path) -> tuple[Any, Path]:
    """A random Llama, and the folder that it came from."""
    folder = saved(llama_config(), tmp_path / "llama")
    return transformers.AutoModelForCausalLM.from_pretrained(folder), folder


def test_a_llama_comes_out_as_it_is_at_the_end_of_the_run(llama, tmp_path):
    model, folder = llama
    (folder / "tokenizer_config.json").write_text("{}")
    run, out = trained(model, tmp_path), tmp_path / "exported"
    result = command("export", run, "--format", "hf", "--hf", folder, "--out", out)
    assert result.code == 0, result.err
    assert type(reloaded(out)).__name__ == "LlamaForCausalLM"
    same_logits(reloaded(out), model.eval(), 300)
    assert (out / "tokenizer_config.json").read_text() == "{}"


def test_without_weights_in_the_folder_its_config_is_enough(llama, tmp_path):
    model, folder = llama
    (folder / "model.safetensors").unlink()
    run, out = trained(model, tmp_path), tmp_path / "exported"
    assert command("export", run, "--format", "hf", "--hf", folder, "--out", out).code == 0
    same_logits(reloaded(out), model.eval(), 300)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, "default"),
        ({"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["mlp"]}, "default"),
        ({"target_modules": ["q_proj"], "use_dora": True}, "another"),
    ],
    ids=["plain", "embeddings", "dora"],
)
def test_an_adapter_comes_out_as_an_adapter(llama, tmp_path, settings, name):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base, folder = llama
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, task_type="CAUSAL_LM", **settings), adapter_name=name)
    model.save_pretrained(tmp_path / "adapter")
    adapter = tmp_path / "adapter" / ("" if name == "default" else name)
    run, out = trained(model, tmp_path), tmp_path / "exported"
    assert command("export", run, "--format", "hf", "--hf", adapter, "--out", out).code == 0
    fresh = transformers.AutoModelForCausalLM.from_pretrained(folder)
    same_logits(peft.PeftModel.from_pretrained(fresh, out).eval(), model.eval(), 300)
    exported = load_file(out / "adapter_model.safetensors")
    assert not any("heloco" in block for block in exported)
    model.save_pretrained(tmp_path / "as-peft-does")  # with the run's final model in it
    theirs = load_file(tmp_path / "as-peft-does" / adapter.relative_to(tmp_path / "adapter") / "adapter_model.safetensors")
    assert all(torch.equal(exported[block], theirs[block]) for block in exported) and exported.keys() <= theirs.keys()
    assert command("export", run, "--out", tmp_path / "one.safetensors").code == 0
    names = set(load_file(tmp_path / "one.safetensors"))
    assert names == {name for name, p in model.named_parameters() if p.requires_grad}


def test_what_is_exported_can_be_read_by_others(llama, tmp_path):
    model, folder = llama
    run = trained(model, tmp_path)
    assert command("export", run, "--out", tmp_path / "one.safetensors").code == 0
    assert command("export", run, "--format", "hf", "--hf", folder, "--out", tmp_path / "exported").code == 0
    (tmp_path / "new").touch()
    usual = (tmp_path / "new").stat().st_mode
    for path in (tmp_path / "one.safetensors", *(tmp_path / "exported").iterdir()):
        assert path.stat().st_mode == usual, path


def test_a_folder_that_does_not_fit_is_refused(llama, tmp_path):
    model, folder = llama
    run = trained(model, tmp_path)
    assert_refused(tmp_path, "export", run, "--format", "hf", says="say with --hf DIR where its config.json is")
    other = saved(llama_config(hidden_size=16), tmp_path / "other")
    assert_refused(tmp_path, "export", run, "--format", "hf", "--hf", other, says="does not fit the Hugging Face model")
    (folder / "adapter_config.json").write_text("{}")
    assert_refused(tmp_path, "export", run, "--format", "hf", "--hf", folder, says="which is of no adapter")
    assert not (run / "hf").exists()
