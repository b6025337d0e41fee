"""Hugging Face models as the language task's model: weights, tokenizer, context, and the settings that go with them."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from heloco.cluster.client.worker import Worker, task_of
from heloco.cluster.server.process import RunHost, spec_of
from heloco.corpus import load_tokenizer
from heloco.engine.build import build_task
from heloco.errors import UserError
from heloco.run import RunConfig, RunFolder, resolve, with_fields
from heloco.study.grid import digest
from heloco.task.hf import open_hf
from support.hf_models import BYTES, COMMON, SHORT, gpt2_config, transformers, warnings_in, write_words
from support.local_link import LocalLink
from support.repository import REPOSITORY
from support.runs import evals, heloco

pytestmark = pytest.mark.usefixtures("one_thread", "offline")


@pytest.mark.parametrize("name", ["gpt2", "llama", "scratch"])
def test_a_hugging_face_model_learns(name, models, tmp_path):
    settings = ("--arrivals", "20", "--inner-steps", "5", "--batch-size", "8", "--lr", "0.01", "--paces", "1,1,2,2,2")
    result = heloco("train", "--hf", models[name], *BYTES, *COMMON, *settings, "--out", tmp_path / "run")
    assert result.code == 0 and not warnings_in(result), result.err
    losses = [line["mean"]["loss"] for line in evals(tmp_path / "run")]
    assert 5.3 < losses[0] < 6.0, "it starts near the uniform guess"
    assert losses[-1] < losses[0] - 0.5
    assert json.loads((tmp_path / "run" / "run.json").read_text())["unit"] == "tokens"


def test_training_begins_with_the_models_weights_in_float32(models, tmp_path):
    half = Path(shutil.copytree(models["llama"], tmp_path / "half"))
    weights = {name: t.to(torch.bfloat16) for name, t in load_file(half / "model.safetensors").items()}
    save_file(weights, half / "model.safetensors", metadata={"format": "pt"})
    changed = json.loads((half / "config.json").read_text()) | {"dtype": "bfloat16"}
    (half / "config.json").write_text(json.dumps(changed))
    model = open_hf(str(half)).build(0)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name].float()), name


def test_from_scratch_the_seed_decides_and_nothing_else(models):
    hf_model = open_hf(str(models["scratch"]))
    before = torch.get_rng_state()
    first = hf_model.build(5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    repeat, other = hf_model.build(5).state_dict(), hf_model.build(6).state_dict()
    assert all(torch.equal(t, repeat[name]) for name, t in first.state_dict().items())
    assert not torch.equal(first.transformer.wte.weight, other["transformer.wte.weight"])
    assert first.lm_head.weight is first.transformer.wte.weight


@pytest.mark.parametrize(("positions", "context"), [(64, 64), (512, 128)])
def test_the_context_is_128_or_what_the_model_has_positions_for(positions, context, tmp_path):
    gpt2_config(n_positions=positions).save_pretrained(tmp_path)
    _, config = build_task(resolve(with_fields(RunConfig(), {"hf": str(tmp_path)})))
    assert (config.model.context, config.input.tokenizer, config.model.vocab_size) == (context, "bytes", 0)


def test_the_models_own_tokenizer_is_used_unless_another_is_named(models, text, tmp_path):
    model = Path(shutil.copytree(models["gpt2"], tmp_path / "model"))
    write_words(model / "tokenizer.json")
    (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}')
    few = (*SHORT, "--data", text, "--paces", "1,2", "--arrivals", "2")
    for named, tokenizer in (((), str(model / "tokenizer.json")), (BYTES, "bytes")):
        run = tmp_path / tokenizer[-5:]
        assert heloco("train", "--hf", model, *named, *few, "--out", run).code == 0
        assert RunFolder.open(run).config().input.tokenizer == tokenizer
        assert heloco("export", run, "--format", "hf").code == 0
        theirs = transformers.AutoTokenizer.from_pretrained(run / "hf")
        [ours] = load_tokenizer(tokenizer).encode_batch(["the das of"])
        assert theirs("the das of", add_special_tokens=False)["input_ids"] == ours.tolist()
        assert theirs.eos_token == ("</s>" if not named else "<|endoftext|>")


def test_on_another_machine_the_model_may_lie_elsewhere(models, text, tmp_path):
    model = Path(shutil.copytree(models["gpt2"], tmp_path / "head"))
    write_words(model / "tokenizer.json")
    values = {
        "hf": str(model),
        "data": str(text),
        "paces": [1.0],
        "arrivals": 3,
        "inner_steps": 2,
        "batch_size": 2,
        "context": 16,
    }
    config = resolve(with_fields(RunConfig(), {**values, "eval_every": 0, "device": "cpu"}))
    host = RunHost.open(spec_of(config, tmp_path / "run"))
    try:
        described = host.service.describe()
        new_folder = model.rename(tmp_path / "here")
        with pytest.raises(UserError, match="head"):
            task_of(described, device="cpu")
        task, config = task_of(described, hf=str(new_folder), device="cpu")
        assert config.input.tokenizer == str(new_folder / "tokenizer.json")
        worker = Worker(task, config, tell=lambda _: None)
        assert "all arrivals are in" in worker.run(LocalLink(host.service), "here", described.run)
        gpt2_config(n_inner=64, vocab_size=400).save_pretrained(new_folder)
        with pytest.raises(UserError, match="--hf DIR"):
            task_of(described, hf=str(new_folder), device="cpu")
    finally:
        host.close()


def test_from_python(models):
    import heloco as package

    result = package.simulate(hf=str(models["llama"]), tokenizer="bytes", context=16, arrivals=2, inner_steps=1, eval_windows=2)
    assert type(result.model).__name__ == "LlamaForCausalLM"
    assert result.loss is not None


# ---- the settings


def test_settings_of_tinygpt_do_not_combine_with_it():
    for name, value in (("preset", "paper"), ("width", 64), ("layers", 2), ("heads", 2), ("vocab_size", 300)):
        with pytest.raises(UserError, match=rf"^{name} is a setting of TinyGPT, but hf is some/model: leave one of them out\.$"):
            resolve(with_fields(RunConfig(), {"hf": "some/model", name: value}))
    with pytest.raises(UserError, match=r"^hf is a setting of the language task"):
        resolve(with_fields(RunConfig(), {"hf": "some/model", "task": "images"}))


def test_the_papers_recipe_goes_with_it(models, tmp_path):
    few = ("--arrivals", "1", "--inner-steps", "1", "--context", "16", "--eval-windows", "2", "--paces", "1,1,1,1,1")
    assert heloco("train", "--recipe", "paper", "--hf", models["scratch"], *few, "--out", tmp_path / "run").code == 0
    config = RunFolder.open(tmp_path / "run").config()
    assert (config.inner.batch_size, config.inner.lr, config.model.preset) == (2, 2e-4, "")


@pytest.mark.parametrize("name", ["gpt2", "scratch"])
def test_models_that_are_built_at_the_same_time_are_the_same(models, name):
    """An evaluation may build one while a worker of the same process does."""
    model = open_hf(str(models[name]))
    alone = model.build(3).state_dict()
    with ThreadPoolExecutor(4) as pool:
        for module in pool.map(model.build, [3] * 12):
            assert all(torch.equal(tensor, alone[key]) for key, tensor in module.state_dict().items())


def test_a_run_that_was_kept_is_known_by_its_settings():
    for path in (REPOSITORY / "results" / "runs").glob("*.json"):
        record = json.loads(path.read_text())
        config = resolve(with_fields(RunConfig(), {"norm_limit": "off", **record["settings"]}))
        assert digest(config, record["task"]) == path.stem == record["digest"]
    config = resolve(with_fields(RunConfig(), {"method": "heloco", "norm_limit": "off"}))
    assert config.digest() == "a5139a8a343f310b8e93f55607facc30908cae6ac4ec70dbb4dd699f3e5ff0bc"
    assert digest(config, "text") != digest(with_fields(config, {"hf": "some/model"}), "text")
