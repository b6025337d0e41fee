"""A run's folder: the same from the same config, enough to run it again, never written over, whole when the disk is full or the
training diverges."""

import contextlib
import itertools
import json
import math
import shutil
import signal
import tomllib
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from heloco.engine.build import build_task
from heloco.engine.local import Collector, LocalRun, LocalState, describe
from heloco.errors import RunStopped, UserError
from heloco.records.tape import ArrivalRecord
from heloco.run import RunConfig, RunFolder, resolve, with_fields
from heloco.seeds import derive
from heloco.task.datasets import DatasetTask
from support.disks import fill_disk
from support.nursery import Fault
from support.runs import TINY, assert_refused, checkpoints, digests, evals, heloco, outcome, tape, train, write_text

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
    assert {path.name for path in folder.iterdir()} == {"config.toml", "run.json", "tape.jsonl", "evals.jsonl", "checkpoints"}
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
        "spans", "inner_steps", "loss", "last_loss", "samples", "units", "blocks",
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
    own = TINY[: TINY.index("--lr")]  # without those that the file sets
    flags = [*own, "--config", "run.toml", "--data", "text", "--method", "heloco-ramp", "--k-d", "0.5", "--seed", "7"]
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


# ---- contributions that are not finite


class Diverging:
    """A task of two numbers whose loss is NaN in the chosen rounds (worker, index), and in no other."""

    def __init__(self, *rounds: tuple[int, int]) -> None:
        self.marks = set()
        for worker, index in rounds:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(derive(0, "round", worker, index))  # what the inner loop does at the start of a round
                self.marks.add(float(torch.rand(())))

    def task(self) -> DatasetTask:
        torch.manual_seed(0)
        data = {name: [(torch.randn(2), torch.randn(1)) for _ in range(20)] for name in "ab"}
        return DatasetTask(nn.Linear(2, 1), self.loss, data, validation={"a": data["a"]})

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = (model(batch[0]) - batch[1]).square().mean()
        return loss * float("nan") if float(torch.rand(())) in self.marks else loss

    def start(self, folder: Path | None, **settings: object) -> LocalRun:
        values = {"paces": [1.0, 2.0], "inner_steps": 2, "batch_size": 2, "arrivals": 8, "checkpoint_every": 3, **settings}
        config = resolve(with_fields(RunConfig(), values))
        task = self.task()
        local = LocalRun(task, config)
        if folder is not None:
            local.folder = RunFolder.create(folder, config, describe(task, config, local.model))
            local.folder.start_writing()
        return local

    def resume(self, folder: Path) -> LocalRun:
        opened = RunFolder.open(folder)
        local = LocalRun(self.task(), opened.config(), folder=opened)
        state, tensors = opened.load_latest(LocalState)
        local.load(state, tensors)
        opened.start_writing(state.lines)
        return local


def finish(local: LocalRun) -> None:
    with contextlib.closing(local.folder):
        local.run()


def test_a_contribution_that_is_not_finite_is_refused_on_the_tape_and_its_worker_starts_again(tmp_path):
    finish(Diverging((0, 1)).start(tmp_path / "run"))
    lines = tape(tmp_path / "run")
    history = [(x["time_s"], x["worker"], x["round"], x["verdict"], x["arrival"], x["outer_step"], x["spans"]) for x in lines]
    assert history == [
        (2, 0, 0, "applied", 1, 1, [[0, 4]]),
        (4, 0, 1, "refused", 1, 1, [[4, 4]]),
        (4, 1, 0, "applied", 2, 2, [[0, 4]]),
        (6, 0, 2, "applied", 3, 3, [[4, 4]]),  # the same data again
        (8, 0, 3, "applied", 4, 4, [[8, 4]]),
        (8, 1, 1, "applied", 5, 5, [[4, 4]]),
        (10, 0, 4, "applied", 6, 6, [[12, 4]]),
        (12, 0, 5, "applied", 7, 7, [[16, 4]]),
        (12, 1, 2, "applied", 8, 8, [[8, 4]]),
    ]
    refused = lines[1]
    assert refused["reason"] == "the pseudo-gradient has no finite norm"
    assert (refused["loss"], refused["weight"]) == (None, 0) and "blocks" not in refused
    assert all("reason" not in line for line in lines if line is not refused)
    tensors = load_file(checkpoints(tmp_path / "run")[-1] / "tensors.safetensors")
    assert all(tensor.isfinite().all() for tensor in tensors.values())


@pytest.mark.parametrize("method", ["heloco", "sync-nesterov", "delayed-nesterov"])
def test_a_refused_contribution_leaves_no_trace_in_parameters_momentum_or_barrier(method):
    local = Diverging((0, 1), (1, 1)).start(None, method=method)
    snapshots: list[tuple[str, dict[str, torch.Tensor]]] = []

    class Look(Collector):
        def arrived(self, record: ArrivalRecord) -> None:
            tensors = local.synchronizer.tensors()
            snapshots.append((record.verdict, {name: tensor.clone() for name, tensor in tensors.items()}))

    local.observers.append(Look())
    local.run()
    assert [verdict for verdict, _ in snapshots].count("refused") == 2
    for (_, before), (verdict, after) in itertools.pairwise(snapshots):
        same = before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        assert same == (verdict == "refused")


def test_a_run_with_refusals_resumes_to_the_bit(tmp_path):
    """Broken off after each line of the tape in turn, refused ones too; with windows of data that wait to be handed out again."""
    diverging = Diverging((0, 1), (1, 1), (0, 2), (0, 5))
    finish(diverging.start(tmp_path / "expected", checkpoint_every=1))
    expected = outcome(tmp_path / "expected")
    verdicts = [line["verdict"] for line in tape(tmp_path / "expected")]
    assert verdicts.count("refused") == 4

    class Crash(Exception):
        pass

    class CrashAt:
        def __init__(self, line: int) -> None:
            self.lines_to_go = line

        def arrived(self, _: object) -> None:
            self.lines_to_go -= 1
            if not self.lines_to_go:
                raise Crash

        def evaluated(self, _: object) -> None:
            pass

    for line in range(1, len(verdicts)):
        folder = tmp_path / f"crashed-{line}"
        local = diverging.start(folder, checkpoint_every=1)
        local.observers.append(CrashAt(line))
        with pytest.raises(Crash):
            finish(local)
        finish(diverging.resume(folder))
        assert outcome(folder) == expected


def test_several_refusals_in_a_row_stop_the_run_and_one_good_arrival_between_them_does_not(tmp_path):
    bad = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4)]
    with pytest.raises(
        RunStopped, match=r"^3 contributions in a row were refused, the last \(worker 1\) because the pseudo-gradient"
    ):
        finish(Diverging(*bad, (1, 0)).start(tmp_path / "stopped", max_refusals=3))
    assert [line["verdict"] for line in tape(tmp_path / "stopped")] == ["refused"] * 3
    finish(Diverging(*bad).start(tmp_path / "goes-on", max_refusals=3))
    verdicts = [line["verdict"] for line in tape(tmp_path / "goes-on")]
    assert verdicts[:7] == ["refused", "refused", "applied", "refused", "refused", "applied", "refused"]
    assert verdicts.count("applied") == 8


def test_a_run_that_diverges_says_so_and_leaves_its_folder_whole(tmp_path):
    folder = tmp_path / "run"
    result = heloco("train", *TINY, "--lr", "1e30", "--max-refusals", "4", "--out", folder)
    assert result.code == 2
    assert result.sentence == (
        "4 contributions in a row were refused, the last (worker 1) because "
        "the pseudo-gradient has no finite norm. The training "
        f"diverges: lower --lr or --outer-lr, or clip with --clip. What was done until then is in {folder}."
    )
    assert result.out.count("contribution was refused: the pseudo-gradient has no finite norm") == 4
    assert [(line["verdict"], line["worker"], line["arrival"]) for line in tape(folder)] == [
        ("refused", 0, 0), ("refused", 1, 0), ("refused", 0, 0), ("refused", 1, 0),
    ]  # fmt: skip
    assert [path.name for path in checkpoints(folder)] == ["arrival-00000000"]
    evaluated = heloco("eval", folder, "--json")
    assert evaluated.code == 0 and json.loads(evaluated.out)["mean"] == evals(folder)[0]["mean"]
    retry = heloco("resume", folder)  # goes on, and meets the fifth
    assert retry.code == 2 and retry.sentence.startswith("5 contributions in a row were refused")
    assert [line["verdict"] for line in tape(folder)] == ["refused"] * 5


def test_losses_beyond_numbers_are_null_in_the_files(tmp_path):
    """A model whose parameters are finite and whose loss is not: the files stay JSON."""
    result = heloco(
        "train", *TINY, "--outer-lr", "1e18", "--lr", "0.1", "--arrivals", "2", "--out", tmp_path / "run", "--eval-every", "1"
    )
    assert result.code in (0, 2)
    for line in [*tape(tmp_path / "run"), *evals(tmp_path / "run")]:
        json.dumps(line, allow_nan=False)
    evaluated = heloco("eval", tmp_path / "run", "--json")
    assert evaluated.code == 0
    json.loads(evaluated.out, parse_constant=pytest.fail)


def test_a_run_that_could_not_be_read_again_is_not_begun(tmp_path):
    config = resolve(RunConfig())
    task = build_task(config)[0]
    facts = msgspec.structs.replace(describe(task, config, task.build_model()), parameters=1.5)
    with pytest.raises(UserError, match=r"The task or the model cannot be described: Expected `int`, got `float`"):
        RunFolder.create(tmp_path / "run", config, facts)
    assert not any((tmp_path / "run").iterdir())
