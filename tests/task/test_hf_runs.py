"""Runs that train a Hugging Face model: what they write, the same again, killed, and exported."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from heloco.run import RunConfig, RunFolder, resolve, with_fields
from heloco.run.settings import read_toml
from support.hf_models import BYTES, SHORT, gpt2_config, model_of, refused, reloaded, same_logits, transformers, warnings_in
from support.nursery import Fault
from support.runs import evals, heloco, outcome, tape

pytestmark = pytest.mark.usefixtures("one_thread", "offline")


@pytest.fixture(scope="module")
def trained(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`trained(name, *settings)`: the folder of a short run. Made once: only look at it."""
    folders: dict[tuple[str, ...], Path] = {}

    def get(name: str, *settings: str) -> Path:
        key = (name, *settings)
        if key not in folders:
            out = tmp_path_factory.mktemp("trained") / "run"
            result = heloco("train", "--hf", models[name], *BYTES, *SHORT, *settings, "--out", out)
            assert result.code == 0 and not warnings_in(result), result.err
            folders[key] = out
        return folders[key]

    return get


def test_parameters_have_transformers_own_names_and_tied_ones_count_once(models, trained):
    for name in ("gpt2", "llama"):
        meta = json.loads((trained(name) / "run.json").read_text())
        theirs = transformers.AutoModelForCausalLM.from_pretrained(models[name])
        assert [block["name"] for block in meta["blocks"]] == [n for n, _ in theirs.named_parameters()]
        assert meta["parameters"] == theirs.num_parameters()
        assert meta["tied"] == ({"lm_head.weight": "transformer.wte.weight"} if name == "gpt2" else {})


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_same_seed_gives_the_same_tape(name, models, trained, tmp_path):
    repeat = tmp_path / "again"
    assert heloco("train", "--hf", models[name], *BYTES, *SHORT, "--out", repeat).code == 0
    assert outcome(repeat) == outcome(trained(name))
    assert tape(trained(name, "--seed", "1")) != tape(repeat)


def test_dropout_is_on_in_training_and_off_in_evaluations(models, trained, tmp_path):
    """Two models that differ in nothing but dropout: the first evaluation is the same, the first round is not."""
    dry = Path(shutil.copytree(models["gpt2"], tmp_path / "dry"))
    gpt2_config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).save_pretrained(dry)
    assert heloco("train", "--hf", dry, *BYTES, *SHORT, "--out", tmp_path / "run").code == 0
    wet = trained("gpt2")
    assert evals(tmp_path / "run")[0] == evals(wet)[0]
    assert tape(tmp_path / "run")[0]["loss"] != tape(wet)[0]["loss"]
    evaluation = json.loads(heloco("eval", wet, "--json").out)
    assert evaluation["scores"] == evals(wet)[-1]["scores"]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_run_that_was_killed_ends_as_if_nothing_had_happened(name, models, trained, nursery, tmp_path):
    settings = ("--checkpoint-every", "3")
    run = tmp_path / "run"
    fault = Fault("heloco.run.folder:RunFolder.write_arrival", 5, signal=signal.SIGKILL)
    killed = nursery.run("train", "--hf", models[name], *BYTES, *SHORT, *settings, "--out", run, fault=fault)
    assert killed.code == -signal.SIGKILL, killed.err
    result = heloco("resume", run)
    assert result.code == 0 and "Resuming" in result.out, result.err
    assert outcome(run) == outcome(trained(name, *settings))


def test_settings_that_matter_are_written_down(models, trained, tmp_path):
    config = RunFolder.open(trained("gpt2")).config()
    assert (config.model.hf, config.model.context, config.input.tokenizer) == (str(models["gpt2"]), 16, "bytes")
    result = heloco("train", "--hf", "gpt2", *BYTES, *SHORT, "--out", tmp_path / "run", cwd=models["gpt2"].parent)
    assert result.code == 0, "a relative folder that is called like a model on the hub"
    assert RunFolder.open(tmp_path / "run").config() == config


def test_a_model_on_the_hub_is_pinned_to_its_commit(models, trained, tmp_path, monkeypatch):
    """A hub's cache made by hand, as a download leaves it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    hub_folder, commit = tmp_path / "hub" / "models--some--tiny", "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(models["gpt2"], hub_folder / "snapshots" / commit)
    (hub_folder / "refs").mkdir()
    (hub_folder / "refs" / "main").write_text(commit)
    assert heloco("train", "--hf", "some/tiny", *BYTES, *SHORT, "--out", tmp_path / "run").code == 0
    assert RunFolder.open(tmp_path / "run").config().model.hf == f"some/tiny@{commit}"
    assert tape(tmp_path / "run") == tape(trained("gpt2"))
    (hub_folder / "refs" / "main").write_text("f" * 40)  # the hub goes on, the run does not
    assert heloco("eval", tmp_path / "run").code == 0
    assert heloco("export", tmp_path / "run", "--format", "hf").code == 0
    same_logits(reloaded(tmp_path / "run" / "hf"), model_of(trained("gpt2")), 257)


def test_a_runs_config_can_be_taken_for_another_model(trained, unbroken):
    def config_from(run: Path, **flags: str) -> RunConfig:
        return resolve(with_fields(RunConfig(), read_toml(run / "config.toml", overridden=flags) | flags))

    ours, theirs = unbroken("--preset", "30m"), trained("gpt2")
    config = config_from(ours, hf="some/model")
    assert (config.model.hf, config.model.preset, config.model.width, config.input.tokenizer) == ("some/model", "", 0, "")
    config = config_from(theirs, preset="30m")
    assert (config.model.hf, config.model.preset, config.model.width) == ("", "30m", 384)
    assert config_from(theirs) == RunFolder.open(theirs).config()


# ---- export


@pytest.mark.parametrize("name", ["gpt2", "llama", "scratch"])
def test_an_exported_run_is_the_same_model_to_transformers(name, models, trained, tmp_path):
    run, out = trained(name), tmp_path / "some" / "model"
    result = heloco("export", run, "--format", "hf", "--out", out)
    count = json.loads((run / "run.json").read_text())["parameters"]
    assert (result.code, result.out, result.err) == (0, f"Wrote {count:,} parameters to {out}.\n", "")
    files = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in out.iterdir()) == files
    assert [path.name for path in out.parent.iterdir()] == ["model"]
    model = reloaded(out)
    same_logits(model, model_of(run), 257)
    theirs = transformers.AutoConfig.from_pretrained(models[name])
    assert type(model.config) is type(theirs) and model.config.use_cache
    ours, theirs = model.config.to_dict(), theirs.to_dict()
    apart = ("architectures", "dtype", "_name_or_path")
    assert {key: value for key, value in ours.items() if key not in apart} == {k: v for k, v in theirs.items() if k not in apart}
    continued = model.generate(torch.tensor([[104, 101]]), max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert continued.shape[1] <= 5


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_as_safetensors_it_loads_strictly(name, models, trained, tmp_path):
    out = tmp_path / "model.safetensors"
    assert heloco("export", trained(name), "--out", out).code == 0
    fresh = transformers.AutoModelForCausalLM.from_pretrained(models[name]).eval()
    fresh.load_state_dict(load_file(out), strict=True)
    same_logits(fresh, model_of(trained(name)), 257)


def test_an_export_that_cannot_be_is_refused(unbroken, trained, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thing").write_text("")
    for run in (unbroken(), trained("gpt2")):
        for out in ("full", "file"):
            says = f"{out} exists and is no empty folder: choose another --out."
            refused(tmp_path, "export", run, "--format", "hf", "--out", out, says=says)
        refused(tmp_path, "export", run, "--format", "hf", "--out", "file/model", says="file/model cannot be written (")
        refused(tmp_path, "export", run, "--format", "hff", says="There is no export format 'hff'; did you mean 'hf'?")
    refused(tmp_path, "export", unbroken(), "--format", "safetensor", says="did you mean 'safetensors'?")
    images = unbroken("--task", "images", "--arrivals", "4")
    says = "There is no Hugging Face form of the task images: use --format safetensors."
    refused(tmp_path, "export", images, "--format", "hf", says=says)
    (tmp_path / "free").mkdir()
    assert heloco("export", unbroken(), "--format", "hf", "--out", "free", cwd=tmp_path).code == 0, "an empty folder will do"
