"""Hugging Face models that are refused, and what happens without transformers."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from support.hf_models import BYTES, SHORT, gpt2_config, refused
from support.nursery import Fault
from support.repository import TESTS
from support.runs import digests, heloco, write_text

pytestmark = pytest.mark.usefixtures("one_thread", "offline")


def test_what_is_no_model_is_refused(models, tmp_path):
    def folder(name: str, **files: str) -> Path:
        path = tmp_path / name
        path.mkdir()
        for file, content in files.items():
            (path / file.replace("__", ".")).write_text(content)
        return path

    bert = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    scratch = (models["scratch"] / "config.json").read_text()
    (tmp_path / "file").write_text("")
    folder("empty")
    folder("broken", config__json="{")
    folder("strange", config__json='{"model_type": "strange"}')
    folder("t5", config__json='{"model_type": "t5", "d_model": 32, "num_layers": 1}')
    folder("bert", config__json=json.dumps({"model_type": "bert", **bert}))
    folder("adapter", config__json=scratch, adapter_model__safetensors="")
    folder("garbled", config__json=scratch, model__safetensors="no tensors")
    for name, says in (
        ("missing/folder/of/mine", "missing/folder/of/mine is no folder: give one with a Hugging Face model's config.json"),
        ("./missing", "./missing is no folder"),
        ("file", "file is no folder"),
        ("some/name", "'some/name' is no folder here, and the Hugging Face hub does not give it (LocalEntryNotFoundError)"),
        ("empty", f"{tmp_path / 'empty'} holds no Hugging Face model: it has no config.json."),
        ("broken", f"transformers cannot make a causal language model of {tmp_path / 'broken'} ("),
        ("strange", f"transformers cannot make a causal language model of {tmp_path / 'strange'} ("),
        ("t5", f"transformers cannot make a causal language model of {tmp_path / 't5'} (Unrecognized configuration class"),
        ("bert", f"{tmp_path / 'bert'} looks at the tokens it should predict: set is_decoder in its config.json"),
        ("adapter", f"{tmp_path / 'adapter' / 'adapter_model.safetensors'} is not what transformers reads weights from"),
        ("garbled", f"transformers cannot make a causal language model of {tmp_path / 'garbled'} ("),
    ):
        refused(tmp_path, "train", "--hf", name, *BYTES, *SHORT, says=says)


def test_a_model_that_does_not_fit_is_refused(models, tmp_path):
    gpt2_config(vocab_size=256, bos_token_id=None, eos_token_id=None).save_pretrained(tmp_path / "small")
    lacking = Path(shutil.copytree(models["llama"], tmp_path / "lacking"))
    weights = load_file(lacking / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, lacking / "model.safetensors", metadata={"format": "pt"})
    other = Path(shutil.copytree(models["gpt2"], tmp_path / "other"))
    gpt2_config(n_embd=64).save_pretrained(other)
    for name, settings, says in (
        ("small", (), "The tokenizer bytes has 257 tokens and the model a vocabulary of 256: give the model's own --tokenizer."),
        (models["gpt2"], ("--context", "65"), "A context of 65 tokens does not fit the model's 64: shorten --context."),
        (models["gpt2"], ("--tokenizer", ""), "has weights but no tokenizer.json: say with --tokenizer what its tokens are."),
        ("lacking", (), "The weights of " + str(lacking) + " lack lm_head.weight: save a whole AutoModelForCausalLM there."),
        ("other", (), f"transformers cannot make a causal language model of {other} ("),
    ):
        refused(tmp_path, "train", "--hf", name, *BYTES, *SHORT, *settings, says=says)


def test_a_run_whose_model_is_gone_or_another_is_refused(models, nursery, tmp_path):
    model = Path(shutil.copytree(models["gpt2"], tmp_path / "model"))
    run = tmp_path / "run"
    fault = Fault("heloco.run.folder:RunFolder.write_arrival", 3, signal=signal.SIGKILL)
    nursery.run("train", "--hf", model, *BYTES, *SHORT, "--out", run, fault=fault)
    content = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(content | {"resid_pdrop": 0.5}))
    refused(tmp_path, "resume", run, says=f"The config.json of {model} is not the one this run was started with: restore it.")
    shutil.rmtree(model)
    for command in (("resume",), ("eval",), ("export", "--format", "hf")):
        refused(tmp_path, command[0], run, *command[1:], says=f"{model} is no folder: give one with a Hugging Face model's")
    assert heloco("export", run).code == 0, "safetensors need no model"


def test_without_transformers_a_sentence_says_how_to_get_it(models, unbroken, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for command in (("train", "--hf", models["gpt2"]), ("export", unbroken(), "--format", "hf", "--out", "some/model")):
        before = digests(tmp_path)
        result = heloco(*command, cwd=tmp_path)
        assert result.code == 2 and result.sentence.startswith("A Hugging Face model needs the package transformers (")
        assert result.sentence.endswith("): pip install 'heloco[hf]'.")
        assert digests(tmp_path) == before


def test_nothing_imports_transformers_that_does_not_need_it(tmp_path):
    text = write_text(tmp_path / "text")
    run, data = str(tmp_path / "run"), str(text)
    code = (
        "import sys, heloco.task.hf, heloco.task.gpt2_form, heloco.run.export; from support.runs import *\n"
        f"assert heloco('train', *TINY, '--data', {data!r}, '--paces', '1,2', '--out', {run!r}).code == 0\n"
        f"assert heloco('export', {run!r}).code == 0\n"
        "assert not {'transformers', 'huggingface_hub'} & sys.modules.keys()"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=TESTS, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
