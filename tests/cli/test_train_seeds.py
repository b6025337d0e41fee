"""`heloco train --seeds`: each run is what it would be alone, and what is printed at the end is their mean."""

import csv
import re
import shlex
import signal
from pathlib import Path
from statistics import fmean, stdev

import pytest

from support.nursery import Fault
from support.runs import TINY, assert_refused, checkpoints, digests, evals, heloco, outcome, tape, train

SEEDS = (0, 1, 2)
OFTEN = ("--checkpoint-every", "3", "--eval-every", "2")
STEP = "heloco.inner.sequential:SequentialInner.step"
STACK = "heloco.inner.stacked:StackedInner.begin"


def folders(parent: Path) -> list[Path]:
    return sorted(parent.iterdir())


@pytest.mark.parametrize("execution", ["sequential", "stacked"])
def test_each_seed_is_the_run_that_it_is_alone(execution, tmp_path, unbroken):
    parent = train(tmp_path / "runs", *OFTEN, "--execution", execution, "--seeds", "3")
    assert [folder.name for folder in folders(parent)] == [f"seed-{seed}" for seed in SEEDS]
    for seed, folder in zip(SEEDS, folders(parent), strict=True):
        assert digests(folder) == digests(unbroken(*OFTEN, "--execution", execution, "--seed", str(seed)))


def test_seeds_begin_with_the_seed_that_is_asked_for(tmp_path):
    parent = train(tmp_path / "runs", "--seed", "5", "--seeds", "2", "--task", "images")
    assert [folder.name for folder in folders(parent)] == ["seed-5", "seed-6"]
    assert all("seed = 6\n" in (parent / "seed-6" / name).read_text() for name in ("config.toml",))


def test_the_mean_is_printed_and_so_are_the_commands_that_show_more(tmp_path):
    result = heloco("train", *TINY, "--seeds", "3", cwd=tmp_path)
    [parent] = (tmp_path / "runs").iterdir()
    records = [evals(folder)[-1] for folder in folders(parent)]
    losses = [record["mean"]["loss"] for record in records]
    [line] = [line for line in result.out.splitlines() if line.startswith("│ loss, mean ")]
    numbers = [cell.strip() for cell in line.strip("│").split("│")[1:]]
    assert numbers == [*(f"{loss:.3f}" for loss in losses), f"{fmean(losses):.3f} ± {stdev(losses):.3f}"]
    for source in records[0]["scores"]:
        scores = [record["scores"][source]["loss"] for record in records]
        assert re.search(rf"loss, {source} .*{fmean(scores):.3f} ± {stdev(scores):.3f}", result.out)
    commands = re.findall(r"heloco ((?:compare|report) .*)", result.out)
    assert commands == [f"compare runs/{parent.name}/*", f"report runs/{parent.name}/*"]
    for command in commands:
        name, pattern = shlex.split(command)
        result = heloco(name, *sorted(tmp_path.glob(pattern)), cwd=tmp_path)
        assert result.code == 0, result.err
    compared = heloco("compare", *folders(parent), "--format", "csv").out
    row = next(csv.DictReader(compared.splitlines()))
    assert (row["run"], row["seeds"], row["arrival"]) == (parent.name.rpartition("-")[0], "3", "8")


def test_two_sweeps_of_one_method_are_named_by_their_folders(tmp_path):
    for name, lr in (("slow", "0.001"), ("fast", "0.01")):
        train(tmp_path / name, "--seeds", "2", "--lr", lr)
    table = heloco("compare", *tmp_path.glob("*/seed-*"), "--format", "csv").out.split("\n\n")[0]
    assert sorted(line.split(",")[0] for line in table.splitlines()[1:]) == ["fast", "slow"]


def test_off_a_terminal_there_is_a_line_for_each_evaluation(tmp_path):
    result = heloco("train", *TINY, *OFTEN, "--seeds", "2", "--out", tmp_path / "runs")
    lines = [line for line in result.out.splitlines() if line.startswith("seed ")]
    expected = [(seed, record["arrival"]) for seed in (0, 1) for record in evals(tmp_path / "runs" / f"seed-{seed}")]
    assert [tuple(map(int, re.findall(r"^seed (\d) +arrival +(\d+)/8 ", line)[0])) for line in lines] == expected


@pytest.mark.parametrize(
    ("execution", "fault"),
    [("sequential", Fault(STEP, 22, signal=signal.SIGINT)), ("stacked", Fault(STACK, 3, signal=signal.SIGTERM))],
)
def test_a_signal_saves_all_and_resume_takes_them_together(execution, fault, tmp_path, nursery, unbroken):
    parent, settings = tmp_path / "runs", (*OFTEN, "--execution", execution)
    result = nursery.run("train", *TINY, *settings, "--seeds", "3", "--out", parent, fault=fault)
    assert result.code == 128 + fault.signal
    arrivals = [len(tape(folder)) for folder in folders(parent)]
    stands = ", ".join(f"seed {seed} at arrival {number}" for seed, number in enumerate(arrivals))
    sentence = f"Stopped and checkpointed: {stands} of 8. `heloco resume {parent}/*` goes on."
    assert result.out.splitlines()[-1] == sentence and 0 < sum(arrivals) < 24
    for folder, number in zip(folders(parent), arrivals, strict=True):
        assert not number or checkpoints(folder)[-1].name == f"arrival-{number:08d}"
    resumed = heloco("resume", *folders(parent))
    assert resumed.code == 0, resumed.err
    for seed, folder in enumerate(folders(parent)):
        assert outcome(folder) == outcome(unbroken(*settings, "--seed", str(seed)))


def test_a_seed_that_diverges_does_not_end_the_others_and_is_not_in_the_mean(tmp_path):
    wild = ("--lr", "1e30", "--weight-decay", "1e30", "--max-refusals", "3")
    result = heloco("train", *TINY, *wild, "--seeds", "2", "--out", tmp_path / "runs")
    assert result.code == 2
    sentences = [line for line in result.err.splitlines() if "ended early" in line]
    assert [sentence.split()[1] for sentence in sentences] == ["seed-0", "seed-1"]
    assert all("The training diverges: lower --lr" in sentence for sentence in sentences)
    assert "Not in the mean, because the run did not reach its end: seed 0, 1." in " ".join(result.out.split())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--seeds", "0"), "--seeds cannot be '0': give the number of seeds, such as 3."),
        (("--seeds", "few"), "--seeds cannot be 'few'"),
        (("--seeds", "2", "--engine", "ray"), "--seeds is for simulations"),
        (("--seeds", "2", "--execution", "stacked", "--compile", "true"), "execution is stacked, but compile is set"),
    ],
)
def test_what_does_not_go_with_seeds_is_refused_before_anything_is_begun(flags, says, tmp_path):
    assert_refused(tmp_path, "train", *TINY, *flags, "--out", tmp_path / "runs", says=says)


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    parent = train(tmp_path / "runs", "--seeds", "1")
    assert_refused(tmp_path, "train", *TINY, "--seeds", "2", "--out", parent, says="exists and is no empty folder")
