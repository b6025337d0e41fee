"""Runs of TinyGPT as Hugging Face models, and what goes with an exported model: its tokenizer and generation config."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from heloco.corpus import gpt2
from heloco.corpus.tokenizer_export import from_ranks
from heloco.run import RunFolder
from support.hf_models import BYTES, SHORT, model_of, refused, reloaded, same_logits, transformers, write_words
from support.runs import evals, heloco, train

pytestmark = pytest.mark.usefixtures("one_thread", "offline")


def test_a_generation_config_stays_with_the_model(models, tmp_path):
    model = Path(shutil.copytree(models["gpt2"], tmp_path / "model"))
    transformers.GenerationConfig(max_new_tokens=7, eos_token_id=256).save_pretrained(model)
    run = tmp_path / "run"
    assert heloco("train", "--hf", model, *BYTES, *SHORT, "--arrivals", "1", "--out", run).code == 0
    assert heloco("export", run, "--format", "hf").out == f"Wrote 23,040 parameters to {run / 'hf'}.\n"
    assert reloaded(run / "hf").generation_config.max_new_tokens == 7


@pytest.mark.parametrize("settings", [(), ("--preset", "30m", "--layers", "2")], ids=["untied", "tied"])
def test_tinygpt_is_a_gpt2_to_transformers(settings, unbroken, tmp_path):
    run, out = unbroken(*settings), tmp_path / "model"
    assert heloco("export", run, "--format", "hf", "--out", out).code == 0
    model = reloaded(out)
    assert type(model).__name__ == "GPT2LMHeadModel"
    assert (model.lm_head.weight is model.transformer.wte.weight) == bool(settings)
    assert model.num_parameters() == json.loads((run / "run.json").read_text())["parameters"]
    same_logits(model, model_of(run), 257)
    same_logits(model.train(), model_of(run), 257)  # no dropout
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("Ünd <b>\n 1")["input_ids"] == list("Ünd <b>\n 1".encode())
    assert tokenizer.decode(list("Ünd <b>\n 1".encode())) == "Ünd <b>\n 1"
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id == 256


def test_an_exported_tinygpt_can_be_trained_on(unbroken, tmp_path):
    """Out through `export`, in through `--hf`: it begins where it ended."""
    assert heloco("export", unbroken(), "--format", "hf", "--out", tmp_path / "model").code == 0
    assert heloco("train", "--hf", tmp_path / "model", *SHORT, "--out", tmp_path / "run").code == 0
    first, last = evals(tmp_path / "run")[0]["scores"], evals(unbroken())[-1]["scores"]
    for source, score in last.items():
        assert first[source]["loss"] == pytest.approx(score["loss"], abs=1e-5)


def test_gpt2s_ranks_become_its_tokenizer(shared):
    content = from_ranks(gpt2.read_ranks(shared / "gpt2" / "gpt2.tiktoken"))
    assert gpt2.is_gpt2(content)


def test_a_tokenizer_that_is_gone_is_left_out_and_said(text, tmp_path):
    write_words(tmp_path / "tokenizer.json")
    run = train(tmp_path / "run", "--data", text, "--paces", "1,2", "--tokenizer", tmp_path / "tokenizer.json", "--arrivals", "2")
    (tmp_path / "tokenizer.json").unlink()
    result = heloco("export", run, "--format", "hf")
    notice = f"Its tokenizer, {tmp_path / 'tokenizer.json'}, is not on this machine any more and was left out."
    assert result.code == 0 and result.out.endswith(f"{run / 'hf'}. {notice}\n")
    same_logits(reloaded(run / "hf"), model_of_without_data(run), 13)


def model_of_without_data(run: Path) -> Any:
    from heloco.run.task_config import gpt_config

    folder = RunFolder.open(run)
    model = gpt_config(folder.config().model).build(0)
    heloco("export", run)
    model.load_state_dict(load_file(run / "model.safetensors"))
    return model.eval()


def test_an_export_that_fails_half_way_leaves_nothing(unbroken, tmp_path, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.GPT2LMHeadModel.save_pretrained", full)
    says = "The disk is full while writing model: free some space, then export again."
    refused(tmp_path, "export", unbroken(), "--format", "hf", "--out", "model", says=says)
