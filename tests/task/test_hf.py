"""Hugging Face models as the language task's model, and runs as Hugging Face models: tiny random ones, no network."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.repository import REPOSITORY, TESTS

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'heloco[hf]'")

from heloco.cluster.client.worker import Worker, task_of  # noqa: E402
from heloco.cluster.server.local_link import LocalLink  # noqa: E402
from heloco.cluster.server.process import RunHost, spec_of  # noqa: E402
from heloco.corpus import gpt2, load_tokenizer  # noqa: E402
from heloco.corpus.tokenizer_export import from_ranks  # noqa: E402
from heloco.engine.build import build_task, load_model  # noqa: E402
from heloco.errors import UserError  # noqa: E402
from heloco.run import RunConfig, RunFolder, resolve, with_fields  # noqa: E402
from heloco.run.settings import read_toml  # noqa: E402
from heloco.study.grid import digest  # noqa: E402
from heloco.task.hf import open_hf  # noqa: E402
from support.nursery import Fault  # noqa: E402
from support.runs import Done, assert_refused, digests, evals, heloco, outcome, tape, train, write_text  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread", "offline")

COMMON = ("--context", "16", "--eval-windows", "4", "--inner-steps", "2", "--batch-size", "2", "--lr", "0.003")
SHORT = (*COMMON, "--arrivals", "8", "--paces", "1,1,6,6,6")
BYTES = ("--tokenizer", "bytes")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def gpt2_config(**changes: Any) -> Any:
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 257}
    return transformers.GPT2Config(**{**sizes, "bos_token_id": 256, "eos_token_id": 256, **changes})


def llama_config(**changes: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 300}
    return transformers.LlamaConfig(**{**sizes, "num_key_value_heads": 2, "max_position_embeddings": 512, **changes})


def saved(config: Any, folder: Path) -> Path:
    """A random model with this config, saved."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny models. Only look at them."""
    around = tmp_path_factory.mktemp("models")
    folders = {
        "gpt2": saved(gpt2_config(), around / "gpt2"),  # tied weights, dropout of 0.1
        "llama": saved(llama_config(), around / "llama"),  # buffers that are in no state_dict
        "scratch": around / "scratch",
    }
    gpt2_config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).save_pretrained(folders["scratch"])
    return folders


@pytest.fixture(scope="module")
def trained(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`trained(name, *settings)`: the folder of a short run. Made once: only look at it."""
    folders: dict[tuple[str, ...], Path] = {}

    def get(name: str, *settings: str) -> Path:
        key = (name, *settings)
        if key not in folders:
            out = tmp_path_factory.mktemp("trained") / "run"
            result = heloco("train", "--hf", models[name], *BYTES, *SHORT, *settings, "--out", out)
            assert result.code == 0 and not said(result), result.err
            folders[key] = out
        return folders[key]

    return get


def said(result: Done) -> list[str]:
    """What is on stderr beside the bars of the tokenising: of transformers' warnings and bars, nothing."""
    return [line for line in result.err.splitlines() if line.strip() and not line.startswith("tokenising ")]


def model_of(run: Path) -> Any:
    """The run's own model, as `heloco eval` has it."""
    folder = RunFolder.open(run)
    task, _ = build_task(folder.config())
    return load_model(task, folder.load_model()[1], torch.device("cpu")).eval()


def same_logits(ours: Any, theirs: Any, vocab_size: int, length: int = 16) -> None:
    tokens = torch.randint(vocab_size, (3, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        a, b = (getattr(output, "logits", output) for output in (ours(tokens), theirs(tokens)))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def reloaded(folder: Path) -> Any:
    """What transformers makes of the folder, complaining of nothing."""
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loaded.values()), loaded
    return model.eval()


# ---- training


@pytest.mark.parametrize("name", ["gpt2", "llama", "scratch"])
def test_a_hugging_face_model_learns(name, models, tmp_path):
    settings = ("--arrivals", "20", "--inner-steps", "5", "--batch-size", "8", "--lr", "0.01", "--paces", "1,1,2,2,2")
    result = heloco("train", "--hf", models[name], *BYTES, *COMMON, *settings, "--out", tmp_path / "run")
    assert result.code == 0 and not said(result), result.err
    losses = [line["mean"]["loss"] for line in evals(tmp_path / "run")]
    assert 5.3 < losses[0] < 6.0, "it starts near the uniform guess"
    assert losses[-1] < losses[0] - 0.5
    assert json.loads((tmp_path / "run" / "run.json").read_text())["unit"] == "tokens"


def test_parameters_have_transformers_own_names_and_tied_ones_count_once(models, trained):
    for name in ("gpt2", "llama"):
        meta = json.loads((trained(name) / "run.json").read_text())
        theirs = transformers.AutoModelForCausalLM.from_pretrained(models[name])
        assert [block["name"] for block in meta["blocks"]] == [n for n, _ in theirs.named_parameters()]
        assert meta["parameters"] == theirs.num_parameters()
        assert meta["tied"] == ({"lm_head.weight": "transformer.wte.weight"} if name == "gpt2" else {})


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


@pytest.mark.parametrize(("positions", "context"), [(64, 64), (512, 128)])
def test_the_context_is_128_or_what_the_model_has_positions_for(positions, context, tmp_path):
    gpt2_config(n_positions=positions).save_pretrained(tmp_path)
    _, config = build_task(resolve(with_fields(RunConfig(), {"hf": str(tmp_path)})))
    assert (config.model.context, config.input.tokenizer, config.model.vocab_size) == (context, "bytes", 0)


def write_words(path: Path) -> None:
    """A tokenizer.json of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[UNK]", "der", "die", "das", "und", "ist", "nicht", "the", "of", "and", "to", "in", "</s>"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(path))


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


def test_from_python(models):
    import heloco as package

    result = package.simulate(hf=str(models["llama"]), tokenizer="bytes", context=16, arrivals=2, inner_steps=1, eval_windows=2)
    assert type(result.model).__name__ == "LlamaForCausalLM"
    assert result.loss is not None


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


def test_a_generation_config_stays_with_the_model(models, tmp_path):
    model = Path(shutil.copytree(models["gpt2"], tmp_path / "model"))
    transformers.GenerationConfig(max_new_tokens=7, eos_token_id=256).save_pretrained(model)
    run = tmp_path / "run"
    assert heloco("train", "--hf", model, *BYTES, *SHORT, "--arrivals", "1", "--out", run).code == 0
    assert heloco("export", run, "--format", "hf").out == f"Wrote 23,040 parameters to {run / 'hf'}.\n"
    assert reloaded(run / "hf").generation_config.max_new_tokens == 7


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_as_safetensors_it_loads_strictly(name, models, trained, tmp_path):
    out = tmp_path / "model.safetensors"
    assert heloco("export", trained(name), "--out", out).code == 0
    fresh = transformers.AutoModelForCausalLM.from_pretrained(models[name]).eval()
    fresh.load_state_dict(load_file(out), strict=True)
    same_logits(fresh, model_of(trained(name)), 257)


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
    from heloco.run.config import gpt_config

    folder = RunFolder.open(run)
    model = gpt_config(folder.config().model).build(0)
    heloco("export", run)
    model.load_state_dict(load_file(run / "model.safetensors"))
    return model.eval()


# ---- the settings


def test_settings_of_tinygpt_do_not_combine_with_it():
    for name, value in (("preset", "paper"), ("width", 64), ("layers", 2), ("heads", 2), ("vocab_size", 300)):
        with pytest.raises(UserError, match=rf"^{name} is a setting of TinyGPT, but hf is some/model: leave one of them out\.$"):
            resolve(with_fields(RunConfig(), {"hf": "some/model", name: value}))
    with pytest.raises(UserError, match=r"^hf is a setting of the language task"):
        resolve(with_fields(RunConfig(), {"hf": "some/model", "task": "images"}))


def test_a_runs_config_can_be_taken_for_another_model(trained, unbroken):
    def config_from(run: Path, **flags: str) -> RunConfig:
        return resolve(with_fields(RunConfig(), read_toml(run / "config.toml", overridden=flags) | flags))

    ours, theirs = unbroken("--preset", "30m"), trained("gpt2")
    config = config_from(ours, hf="some/model")
    assert (config.model.hf, config.model.preset, config.model.width, config.input.tokenizer) == ("some/model", "", 0, "")
    config = config_from(theirs, preset="30m")
    assert (config.model.hf, config.model.preset, config.model.width) == ("", "30m", 384)
    assert config_from(theirs) == RunFolder.open(theirs).config()


def test_the_papers_recipe_goes_with_it(models, tmp_path):
    few = ("--arrivals", "1", "--inner-steps", "1", "--context", "16", "--eval-windows", "2", "--paces", "1,1,1,1,1")
    assert heloco("train", "--recipe", "paper", "--hf", models["scratch"], *few, "--out", tmp_path / "run").code == 0
    config = RunFolder.open(tmp_path / "run").config()
    assert (config.inner.batch_size, config.inner.lr, config.model.preset) == (2, 2e-4, "")


def test_what_was_known_before_is_known_by_the_same_digests():
    """A setting that is not used must not make other runs of those that were kept."""
    paths = sorted((REPOSITORY / "results" / "runs").glob("*.json"))
    for path in paths:
        record = json.loads(path.read_text())
        config = resolve(with_fields(RunConfig(), {"norm_limit": "off", **record["settings"]}))
        assert digest(config, record["task"]) == path.stem == record["digest"]
    config = resolve(with_fields(RunConfig(), {"method": "heloco", "norm_limit": "off"}))
    assert config.digest() == "ef952e6a69d633fb8c4a53d54751cba4776541d8f54d202d8e0eba9bdd97cb01"
    assert digest(config, "text") != digest(with_fields(config, {"hf": "some/model"}), "text")


# ---- bad input


def refused(around: Path, *arguments: str | Path, says: str) -> None:
    assert_refused(around, *arguments, says=says, cwd=around)


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


def test_an_export_that_fails_half_way_leaves_nothing(unbroken, tmp_path, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.GPT2LMHeadModel.save_pretrained", full)
    says = "The disk is full while writing model: free some space, then export again."
    refused(tmp_path, "export", unbroken(), "--format", "hf", "--out", "model", says=says)


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
