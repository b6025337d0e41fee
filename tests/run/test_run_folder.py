"""A run's folder: the same from the same config, enough to run it again, never written over, whole when the disk is full."""

import json
import math
import shutil
import signal
import tomllib

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from heloco.engine.build import build_task
from heloco.engine.local import describe
from heloco.errors import UserError
from heloco.run import RunConfig, RunFolder, resolve
from support.disks import fill_disk
from support.nursery import Fault
from support.runs import TINY, assert_refused, checkpoints, digests, evals, heloco, tape, train, write_text

OFTEN = ("--checkpoint-every", "3", "--eval-every", "2")

# ---- determinism


@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("--method", "sync-nesterov", "--keep-state"),
        ("--method", "delayed-nesterov", "--assign", "flexible"),
        ("--method", "heloco-ramp", "--assign", "liu", "--split", "dirichlet"),
        ("--task", "images"),
    ],
    ids=" ".join,
)
def test_the_same_config_gives_the_same_files_to_the_bit_and_another_seed_gives_others(settings, tmp_path, unbroken):
    first, repeat, other = (
        unbroken(*settings),
        train(tmp_path / "again", *settings),
        train(tmp_path / "other", *settings, "--seed", "1"),
    )
    assert digests(repeat) == digests(first)
    assert (other / "tape.jsonl").read_bytes() != (first / "tape.jsonl").read_bytes()
    assert (other / "evals.jsonl").read_bytes() != (first / "evals.jsonl").read_bytes()
    ours, theirs = (load_file(checkpoints(folder)[-1] / "tensors.safetensors") for folder in (first, other))
    assert ours.keys() == theirs.keys() and not torch.equal(ours["parameter.0"], theirs["parameter.0"])


def test_another_process_gives_the_same_files_to_the_bit(tmp_path, nursery, unbroken):
    assert nursery.run("train", *TINY, "--out", tmp_path / "run").code == 0
    assert digests(tmp_path / "run") == digests(unbroken())


def test_the_global_random_state_neither_matters_nor_changes(tmp_path, unbroken):
    torch.manual_seed(123)
    np.random.seed(123)
    before = torch.random.get_rng_state()
    train(tmp_path / "run")
    assert torch.equal(torch.random.get_rng_state(), before)
    assert digests(tmp_path / "run") == digests(unbroken())


# ---- where it is


def test_a_folder_that_exists_is_refused_and_untouched(tmp_path, unbroken):
    run = shutil.copytree(unbroken(), tmp_path / "run")
    says = f"The run folder {run} exists: choose another --out, or `heloco resume {run}` to go on with it."
    assert_refused(tmp_path, "train", *TINY, "--out", run, says=says)
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    assert_refused(tmp_path, "train", *TINY, "--out", other, says=f"{other} exists and is no empty folder: choose another --out.")
    assert_refused(tmp_path, "train", *TINY, "--out", other / "thesis.txt", says="exists and is no empty folder")
    assert_refused(tmp_path, "train", *TINY, "--out", other / "thesis.txt" / "run", says="cannot be written (Not a directory)")


def test_an_empty_folder_is_taken(tmp_path, unbroken):
    (tmp_path / "empty").mkdir()
    assert digests(train(tmp_path / "empty")) == digests(unbroken())


def test_folders_above_are_made(tmp_path, unbroken):
    assert digests(train(tmp_path / "some" / "where" / "run")) == digests(unbroken())


def test_without_out_runs_are_numbered_by_method(tmp_path):
    few = ("--arrivals", "1", "--eval-every", "0")
    numbered = ["heloco-ramp-001", "heloco-ramp-002", "mla-001", "heloco-ramp-003"]
    for settings, name in zip(((), (), ("--method", "mla"), ()), numbered, strict=True):
        result = heloco("train", *TINY, *few, *settings, cwd=tmp_path)
        assert result.code == 0
        assert result.out.splitlines()[-1] == f"The run's folder: runs/{name}"
        assert (tmp_path / "runs" / name / "tape.jsonl").is_file()
    shutil.rmtree(tmp_path / "runs" / numbered[1])
    heloco("train", *TINY, *few, cwd=tmp_path)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == set(numbered)


def test_two_runs_started_at_once_get_two_folders(tmp_path, nursery):
    """The first is held up while it builds its model; the second is faster; neither is refused."""
    first = nursery.run("train", *TINY, cwd=tmp_path, fault=Fault("heloco.engine.local:describe", signal=signal.SIGSTOP))
    assert first.code is None
    assert heloco("train", *TINY, cwd=tmp_path).out.endswith("The run's folder: runs/heloco-ramp-001\n")
    first = nursery.wake(first)
    assert (first.code, first.out.splitlines()[-1]) == (0, "The run's folder: runs/heloco-ramp-002")
    assert digests(tmp_path / "runs" / "heloco-ramp-001") == digests(tmp_path / "runs" / "heloco-ramp-002")


def test_the_folder_is_named_in_full_however_long_its_path_is(tmp_path):
    folder = tmp_path / ("long-" * 30) / "with [brackets] and spaces"
    result = heloco("train", *TINY, "--arrivals", "1", "--out", folder)
    assert result.out.splitlines()[-1] == f"The run's folder: {folder}"


def test_the_folder_holds_what_it_says(unbroken):
    folder = unbroken(*OFTEN)
    names = {"config.toml", "run.json", "tape.jsonl", "evals.jsonl", "ended.json", "checkpoints"}
    assert {path.name for path in folder.iterdir()} == names
    meta = json.loads((folder / "run.json").read_text())
    assert meta["method"] == "heloco-ramp" and meta["paces"] == [1, 1, 6, 6, 6] and meta["unit"] == "tokens"
    assert [shard["name"] for shard in meta["shards"]] == ["arzhan", "auren", "thelis", "vesnar", "zumeri"]
    assert meta["parameters"] == sum(math.prod(block["shape"]) for block in meta["blocks"]) == 29728
    assert [line["arrival"] for line in tape(folder)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [line["arrival"] for line in evals(folder)] == [0, 2, 4, 6, 8]


def test_the_tape_tells_the_whole_history(unbroken):
    """Paces 1, 1, 6, 6, 6 and two steps a round: by hand."""
    history = [
        (line["time_s"], line["start_s"], line["worker"], line["round"], line["version"], line["staleness"], line["spans"])
        for line in tape(unbroken("--arrivals", "14"))
    ]
    assert history == [
        (2, 0, 0, 0, 0, 0, [[0, 4]]), (2, 0, 1, 0, 0, 1, [[0, 4]]),
        (4, 2, 0, 1, 2, 0, [[4, 4]]), (4, 2, 1, 1, 2, 1, [[4, 4]]),
        (6, 4, 0, 2, 4, 0, [[8, 4]]), (6, 4, 1, 2, 4, 1, [[8, 4]]),
        (8, 6, 0, 3, 6, 0, [[12, 4]]), (8, 6, 1, 3, 6, 1, [[12, 4]]),
        (10, 8, 0, 4, 8, 0, [[16, 4]]), (10, 8, 1, 4, 8, 1, [[16, 4]]),
        (12, 10, 0, 5, 10, 0, [[20, 4]]), (12, 10, 1, 5, 10, 1, [[20, 4]]),
        (12, 0, 2, 0, 0, 12, [[0, 4]]), (12, 0, 3, 0, 0, 13, [[0, 4]]),
    ]  # fmt: skip


def test_every_line_of_the_tape_has_all_that_a_plot_needs(unbroken):
    keys = {
        "arrival", "verdict", "time_s", "start_s", "outer_step", "worker", "round", "version", "staleness", "weight", "shard",
        "spans", "inner_steps", "loss", "last_loss", "samples", "units", "blocks", "bytes_down", "bytes_up",
    }  # fmt: skip
    blocks = {"case", "cosine", "confidence", "strength", "pseudo_gradient_norm", "momentum_norm", "movement"}
    folder = unbroken()
    count = len(json.loads((folder / "run.json").read_text())["blocks"])
    for line in tape(folder):
        assert set(line) == keys
        assert {name: len(values) for name, values in line["blocks"].items()} == dict.fromkeys(blocks, count)
        assert (line["samples"], line["units"]) == (4, 64)


# ---- the effective config


def test_the_effective_config_reproduces_a_run_of_flags_file_and_defaults(tmp_path):
    write_text(tmp_path / "text")
    (tmp_path / "run.toml").write_text(
        '[rounds]\npaces = [2]\nworkers = 3\nassign = "flexible"\n'
        '[outer]\nmethod = "delayed-nesterov"\n[inner]\nlr = 0.02\nkeep_state = true\n[run]\nseed = 5\narrivals = 3\n'
    )
    base_flags = TINY[: TINY.index("--lr")]  # without those that the file sets
    flags = [*base_flags, "--config", "run.toml", "--data", "text", "--method", "heloco-ramp", "--k-d", "0.5", "--seed", "7"]
    assert heloco("train", *flags, "--out", "first", cwd=tmp_path).code == 0
    effective = tomllib.loads((tmp_path / "first" / "config.toml").read_text())
    assert effective["outer"]["method"] == "heloco-ramp"  # the flag, over the file
    assert (effective["run"]["seed"], effective["run"]["arrivals"]) == (7, 8)
    assert (effective["inner"]["lr"], effective["inner"]["keep_state"]) == (0.02, True)  # the file, over the default
    assert (effective["outer"]["k_d"], effective["outer"]["kappa"], effective["outer"]["reorient"]) == (0.5, 3.0, "ramp")
    assert effective["rounds"]["paces"] == [2, 2, 2]
    assert effective["input"]["data"] == str(tmp_path / "text")  # absolute: it holds from any folder
    assert effective["input"]["languages"] == ["de", "en"]
    assert effective["model"]["vocab_size"] == 257
    elsewhere = tmp_path / "else" / "where"
    elsewhere.mkdir(parents=True)
    repeat = heloco("train", "--config", tmp_path / "first" / "config.toml", "--out", "again", cwd=elsewhere)
    assert repeat.code == 0, repeat.err
    assert digests(elsewhere / "again") == digests(tmp_path / "first")


def test_flags_override_the_effective_config_of_a_run(tmp_path, unbroken):
    config = unbroken() / "config.toml"
    result = heloco("train", "--config", config, "--paces", "1,2,3", "--seed", "3", "--out", tmp_path / "run")
    assert result.code == 0, result.err
    effective = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert effective["rounds"]["paces"] == [1, 2, 3] and effective["run"]["seed"] == 3
    assert effective["model"] == tomllib.loads(config.read_text())["model"]


@pytest.mark.parametrize("spelling", ["text", "./text", "{home}", "~/text"])
def test_relative_paths_are_made_absolute(spelling, tmp_path, monkeypatch, text):
    shutil.copytree(text, tmp_path / "text")
    monkeypatch.setenv("HOME", str(tmp_path))
    data = spelling.format(home=tmp_path / "text")
    result = heloco("train", *TINY, "--arrivals", "1", "--paces", "1,2", "--data", data, "--out", "run", cwd=tmp_path)
    assert result.code == 0, result.err
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["input"]["data"] == str(tmp_path / "text")


def test_names_stay_names_where_a_file_is_called_so(tmp_path, unbroken):
    """A folder called `builtin` or a file called `bytes` must not turn into the run's data."""
    write_text(tmp_path / "builtin")
    (tmp_path / "bytes").write_text("{}")
    assert heloco("train", *TINY, "--out", "run", cwd=tmp_path).code == 0
    assert digests(tmp_path / "run") == digests(unbroken())


# ---- a full disk


FULL = {
    "a line of the tape": Fault("heloco.run.folder:RunFolder.write_arrival", 5, "before", mess="full"),
    "an evaluation": Fault("heloco.run.folder:RunFolder.write_eval", 3, "before", mess="full"),
    "the first evaluation": Fault("heloco.run.folder:RunFolder.write_eval", 1, "before", mess="full"),
    "a checkpoint's tensors": Fault("heloco.run.checkpoint:write", 2, "before", mess="full"),
    "half of a checkpoint's tensors": Fault("heloco.run.checkpoint:write", 2, "before", mess="full", room=100_000),
    "a checkpoint's state": Fault("heloco.run.checkpoint:write", 2, "after", mess="full"),
    "the last checkpoint": Fault("heloco.run.checkpoint:write", 4, "before", mess="full", room=50_000),
}


@pytest.mark.parametrize("moment", FULL)
def test_a_full_disk_is_told_and_after_freeing_space_the_run_goes_on_to_the_bit(moment, small_disk, nursery, unbroken):
    folder, ballast = small_disk / "run", small_disk / "ballast"
    fault = Fault(**vars(FULL[moment]) | {"ballast": str(ballast)})
    result = nursery.run("train", *TINY, *OFTEN, "--out", folder, fault=fault)
    assert result.code == 2, (result.out, result.err)
    assert result.sentence.startswith(f"The disk is full while writing {folder}/")
    assert result.sentence.endswith(f": free some space, then `heloco resume {folder}` goes on from the last checkpoint.")
    fill_disk(ballast)  # to the brim: what was freed by the failure is gone too
    full = digests(folder)
    retry = heloco("resume", folder)
    assert retry.code == 2 and retry.sentence.startswith("The disk is full while writing ")
    assert full.items() >= {k: v for k, v in digests(folder).items() if k.startswith("checkpoints/")}.items()
    ballast.unlink()
    assert heloco("resume", folder).code == 0
    assert digests(folder) == digests(unbroken(*OFTEN))


def test_a_disk_that_is_full_from_the_start_is_told_and_the_same_command_works_later(small_disk, unbroken):
    folder, ballast = small_disk / "run", small_disk / "ballast"
    for room in (0, 4096):  # nothing fits; run.json fits and config.toml does not
        fill_disk(ballast, room)
        result = heloco("train", *TINY, "--out", folder)
        assert result.code == 2
        assert result.sentence == f"The disk is full while writing {folder}: free some space, then start the run again."
        assert not any(folder.iterdir())
        ballast.unlink()
    assert digests(train(folder)) == digests(unbroken())


def test_an_export_to_a_full_disk_leaves_the_old_file(small_disk, unbroken):
    out = small_disk / "model.safetensors"
    assert heloco("export", unbroken(), "--out", out).code == 0
    before = digests(small_disk)
    fill_disk(small_disk / "ballast", room=50_000)
    result = heloco("export", unbroken(), "--out", out)
    assert result.code == 2
    assert result.sentence == f"The disk is full while writing {out}: free some space, then export again."
    (small_disk / "ballast").unlink()
    assert digests(small_disk) == before


# ---- what cannot be described


def test_a_run_that_could_not_be_read_again_is_not_begun(tmp_path):
    config = resolve(RunConfig())
    task = build_task(config)[0]
    facts = msgspec.structs.replace(describe(task, config, task.build_model()), parameters=1.5)
    with pytest.raises(UserError, match=r"The task or the model cannot be described: Expected `int`, got `float`"):
        RunFolder.create(tmp_path / "run", config, facts)
    assert not any((tmp_path / "run").iterdir())
