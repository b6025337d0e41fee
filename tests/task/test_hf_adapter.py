"""`heloco train --hf … --lora r`: a Hugging Face model stays as it is; its adapter is trained, sent, kept and exported."""

import json
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import heloco as package
from heloco.cluster.client.worker import Worker, task_of
from heloco.cluster.server.process import RunHost, spec_of
from heloco.errors import UserError
from heloco.run import RunConfig, RunFolder, resolve, with_fields
from heloco.task.hf import open_hf
from support.hf_models import BYTES, COMMON, SHORT, model_of, refused, same_logits, transformers, warnings_in
from support.local_link import LocalLink
from support.nursery import Fault
from support.runs import evals, heloco, outcome, tape

peft = pytest.importorskip("peft", reason="peft is not installed")
pytestmark = pytest.mark.usefixtures("one_thread", "offline")

LORA = ("--lora", "4")


@pytest.fixture(scope="module")
def trained(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`trained(name, *settings)`: the folder of a short run of an adapter. Made once: only look at it."""
    folders: dict[tuple[str, ...], Path] = {}

    def get(name: str, *settings: str) -> Path:
        key = (name, *settings)
        if key not in folders:
            out = tmp_path_factory.mktemp("trained") / "run"
            result = heloco("train", "--hf", models[name], *BYTES, *SHORT, *LORA, *settings, "--out", out)
            assert result.code == 0 and not warnings_in(result), result.err
            folders[key] = out
        return folders[key]

    return get


def facts(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "run.json").read_text())
    return content


def test_an_adapter_learns_and_the_model_does_not_move(models, tmp_path):
    settings = ("--arrivals", "20", "--inner-steps", "5", "--batch-size", "8", "--lr", "0.02", "--paces", "1,1,2,2,2")
    result = heloco("train", "--hf", models["llama"], *BYTES, *COMMON, *settings, *LORA, "--out", tmp_path / "run")
    assert result.code == 0 and not warnings_in(result), result.err
    losses = [line["mean"]["loss"] for line in evals(tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.05
    merged = dict(model_of(tmp_path / "run").base_model.model.named_parameters())
    for name, parameter in open_hf(str(models["llama"])).build(0).named_parameters():
        layer, _, kind = name.rpartition(".")
        frozen = merged[name] if name in merged else merged[f"{layer}.base_layer.{kind}"]
        assert torch.equal(frozen, parameter), name


@pytest.mark.parametrize(("name", "layers"), [("gpt2", 4), ("llama", 7)])
def test_the_adapters_parameters_are_all_that_the_run_knows(name, layers, trained):
    """Four linear layers in a block of GPT-2, seven in one of Llama: two matrices each, and neither head nor embedding."""
    described = facts(trained(name))
    blocks = [block["name"] for block in described["blocks"]]
    assert len(blocks) == 2 * layers and all(".lora_" in block and block.startswith("base_model.model.") for block in blocks)
    sizes = [block["shape"][0] * block["shape"][1] for block in described["blocks"]]
    assert described["parameters"] == sum(sizes) < 10_000
    config = RunFolder.open(trained(name)).config()
    assert (config.model.lora, config.model.lora_alpha, config.model.lora_targets) == (4, 8.0, None)


def test_the_layers_and_the_scale_can_be_chosen(trained):
    run = trained("llama", "--lora-targets", "q_proj,v_proj", "--lora-alpha", "4")
    names = [block["name"] for block in facts(run)["blocks"]]
    assert len(names) == 4 and all("q_proj" in name or "v_proj" in name for name in names)
    config = RunFolder.open(run).config()
    assert config.digest() == facts(run)["config_digest"] != facts(trained("llama"))["config_digest"]
    assert tape(run) != tape(trained("llama", "--lora-targets", "q_proj,v_proj"))


def test_it_begins_as_the_model_that_it_adapts(models, trained, tmp_path):
    assert heloco("train", "--hf", models["llama"], *BYTES, *SHORT, "--arrivals", "1", "--out", tmp_path / "run").code == 0
    assert evals(trained("llama"))[0]["mean"] == pytest.approx(evals(tmp_path / "run")[0]["mean"])


def test_a_run_that_was_killed_ends_as_if_nothing_had_happened(models, trained, nursery, tmp_path):
    settings = ("--checkpoint-every", "3")
    run = tmp_path / "run"
    fault = Fault("heloco.run.folder:RunFolder.write_arrival", 5, signal=signal.SIGKILL)
    killed = nursery.run("train", "--hf", models["gpt2"], *BYTES, *SHORT, *LORA, *settings, "--out", run, fault=fault)
    assert killed.code == -signal.SIGKILL, killed.err
    result = heloco("resume", run)
    assert result.code == 0 and "Resuming" in result.out, result.err
    assert outcome(run) == outcome(trained("gpt2", *settings))


def test_a_stack_computes_it_too(models, tmp_path):
    runs = {each: tmp_path / each for each in ("sequential", "stacked")}
    for each, out in runs.items():
        settings = ("--recipe", "plain", "--execution", each)
        assert heloco("train", "--hf", models["llama"], *BYTES, *SHORT, *LORA, *settings, "--out", out).code == 0
    alone, stacked = (evals(out)[-1]["mean"]["loss"] for out in runs.values())
    assert stacked == pytest.approx(alone, rel=1e-4) and facts(runs["stacked"])["execution"] == "stacked"


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_exported_folder_is_the_same_model_to_peft(name, models, trained, tmp_path):
    run, out = trained(name), tmp_path / "adapter"
    result = heloco("export", run, "--format", "hf", "--out", out)
    assert (result.code, result.out) == (0, f"Wrote {facts(run)['parameters']:,} parameters to {out}.\n"), result.err
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= {path.name for path in out.iterdir()}
    base = transformers.AutoModelForCausalLM.from_pretrained(models[name]).eval()
    tokens = torch.arange(16)[None]
    before = base(tokens).logits
    adapted = peft.PeftModel.from_pretrained(base, out).eval()
    same_logits(adapted, model_of(run), 257)
    assert not torch.allclose(before, adapted(tokens).logits)
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, str(models[name]))


def test_as_safetensors_it_fits_the_adapter_that_peft_makes(models, trained, tmp_path):
    assert heloco("export", trained("llama"), "--out", tmp_path / "one.safetensors").code == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(models["llama"])
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    missing_keys, unexpected_keys = model.load_state_dict(load_file(tmp_path / "one.safetensors"), strict=False)
    assert not unexpected_keys and not any("lora" in name for name in missing_keys)
    same_logits(model.eval(), model_of(trained("llama")), 257)


def test_an_evaluation_is_of_the_adapted_model(trained):
    evaluation = json.loads(heloco("eval", trained("gpt2"), "--json").out)
    assert evaluation["scores"] == evals(trained("gpt2"))[-1]["scores"]


def test_machines_that_join_train_the_adapter_and_must_have_the_same_weights(models, text, tmp_path):
    model = Path(shutil.copytree(models["llama"], tmp_path / "model"))
    values = {"hf": str(model), "lora": 4, "tokenizer": "bytes", "data": str(text), "paces": [1.0], "arrivals": 3}
    few = {"inner_steps": 2, "batch_size": 2, "context": 16, "eval_every": 0, "device": "cpu"}
    host = RunHost.open(spec_of(resolve(with_fields(RunConfig(), values | few)), tmp_path / "run"))
    try:
        described = host.service.describe()
        task, config = task_of(described, device="cpu")
        worker = Worker(task, config, tell=lambda _: None)
        assert "all arrivals are in" in worker.run(LocalLink(host.service), "here", described.run)
        other = Path(shutil.copytree(model, tmp_path / "other"))
        change_weights(other)
        with pytest.raises(UserError, match=r"^The config\.json or a file of weights of the model here is not the run's: "):
            task_of(described, hf=str(other), device="cpu")
    finally:
        host.close()
    assert len(tape(tmp_path / "run")) == 3 and all(".lora_" in block["name"] for block in facts(tmp_path / "run")["blocks"])


def test_from_python(models):
    settings = {"tokenizer": "bytes", "context": 16, "arrivals": 2, "inner_steps": 1, "eval_windows": 2}
    result = package.simulate(hf=str(models["llama"]), lora=2, **settings)
    assert all(".lora_" in name for name, _ in result.model.named_parameters()) and result.loss is not None
    tokens = torch.arange(16)[None]
    adapted = result.model.eval()(tokens).logits
    merged = result.model.base_model.merge_and_unload()
    torch.testing.assert_close(merged(tokens).logits, adapted)
    assert type(merged).__name__ == "LlamaForCausalLM"


# ---- what is refused


def change_weights(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    model.save_pretrained(folder)


def test_what_cannot_be_adapted_is_refused(models, tmp_path):
    for settings, says in (
        (
            ("--lora", "4"),
            "lora is the rank of an adapter for a Hugging Face model: give the model with --hf, or leave lora out.",
        ),
        (("--hf", models["gpt2"], "--lora", "0"), "lora is 0: give the adapter's rank, a number ≥ 1."),
        (("--hf", models["gpt2"], *LORA, "--lora-alpha", "0"), "lora_alpha is 0.0: give a finite number above 0."),
        (("--hf", models["gpt2"], "--lora-alpha", "8"), "lora_alpha is a setting of an adapter: give its rank with --lora, or"),
        (("--hf", models["gpt2"], *LORA, "--lora-targets", "q_proj"), f"peft cannot put an adapter into {models['gpt2']} ("),
        (("--hf", models["scratch"], *LORA), f"{models['scratch']} has no weights, only a config.json, and an adapter changes a"),
    ):
        refused(tmp_path, "train", *BYTES, *SHORT, *settings, says=says)
    with pytest.raises(UserError, match=r"^lora is the rank of an adapter .* give the model with hf, or leave lora out\.$"):
        package.simulate(lora=4)


def test_other_weights_than_the_runs_are_refused(models, nursery, tmp_path):
    model, run = Path(shutil.copytree(models["llama"], tmp_path / "model")), tmp_path / "run"
    fault = Fault("heloco.run.folder:RunFolder.write_arrival", 3, signal=signal.SIGKILL)
    nursery.run("train", "--hf", model, *BYTES, *SHORT, *LORA, "--out", run, fault=fault)
    change_weights(model)
    for command in ("resume", "eval"):
        says = f"The config.json or a file of weights of {model} is not the one this run was started with: restore it."
        refused(tmp_path, command, run, says=says)


def test_without_peft_a_sentence_says_how_to_get_it(models, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    result = heloco("train", "--hf", models["gpt2"], *BYTES, *SHORT, *LORA, "--out", tmp_path / "run")
    assert result.code == 2 and result.sentence.startswith("An adapter (lora) needs the package peft (")
    assert result.sentence.endswith("): pip install 'heloco[peft]'.") and not (tmp_path / "run").exists()
