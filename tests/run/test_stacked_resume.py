"""`heloco train --execution stacked`: it stops, is killed and resumed as any run is, to the bit on a CPU."""

import json
import signal

import pytest

from support.nursery import Fault
from support.runs import TINY, assert_refused, checkpoints, digests, heloco, outcome, tape, train

STACKED = ("--checkpoint-every", "3", "--eval-every", "2", "--execution", "stacked")
TAPE_LINE = "heloco.run.folder:RunFolder.write_arrival"
SETTINGS = {
    "AdamW": (),
    "kept state": ("--keep-state", "--paces", "1,1,2,2,3"),
    "the best recipe": ("--recipe", "best", "--inner-steps", "6"),
    "a barrier": ("--method", "sync-nesterov", "--arrivals", "12", "--keep-state"),
    "BatchNorm": ("--task", "images", "--batch-size", "8", "--keep-state"),
    "clipped, in bf16": ("--accumulate", "2", "--clip", "0.5", "--precision", "bf16", "--paces", "1,2,3,4,5"),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("arrival", [1, 4, 5, 7])
def test_killed_and_resumed_it_is_the_unbroken_run_to_the_bit(name, arrival, tmp_path, nursery, unbroken):
    settings, folder = (*STACKED, *SETTINGS[name]), tmp_path / "run"
    fault = Fault(TAPE_LINE, arrival, signal=signal.SIGKILL)
    assert nursery.run("train", *TINY, *settings, "--out", folder, fault=fault).code == -signal.SIGKILL
    result = heloco("resume", folder)
    assert result.code == 0, result.err
    assert digests(folder) == digests(unbroken(*settings))


def test_a_signal_makes_a_checkpoint_between_two_stacks(tmp_path, nursery, unbroken):
    folder = tmp_path / "run"
    fault = Fault("heloco.inner.stacked:StackedInner.begin", 2, signal=signal.SIGINT)
    result = nursery.run("train", *TINY, *STACKED, "--out", folder, fault=fault)
    assert result.code == 128 + signal.SIGINT
    arrivals = len(tape(folder))
    assert result.out.splitlines()[-1] == f"Stopped at arrival {arrivals}, checkpointed. `heloco resume {folder}` goes on."
    assert 0 < arrivals < 8 and checkpoints(folder)[-1].name == f"arrival-{arrivals:08d}"
    assert heloco("resume", folder).code == 0
    assert outcome(folder) == outcome(unbroken(*STACKED))


def test_run_json_says_how_the_rounds_were_computed(unbroken):
    for settings, execution in ((STACKED, "stacked"), (STACKED[:4], "sequential")):
        facts = json.loads((unbroken(*settings) / "run.json").read_text())
        assert (facts["execution"], facts["device"]) == (execution, "cpu")


def test_a_run_of_an_earlier_version_goes_on_one_round_after_the_other(tmp_path, nursery, unbroken):
    folder, settings = tmp_path / "run", STACKED[:4]
    fault = Fault(TAPE_LINE, 5, signal=signal.SIGKILL)
    assert nursery.run("train", *TINY, *settings, "--out", folder, fault=fault).code == -signal.SIGKILL
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({k: v for k, v in facts.items() if k not in ("execution", "device")}))
    config = (folder / "config.toml").read_text()
    assert 'execution = "auto"\n' in config
    (folder / "config.toml").write_text(config.replace('execution = "auto"\n', ""))
    assert heloco("resume", folder).code == 0
    assert json.loads((folder / "run.json").read_text())["execution"] == "sequential"
    for name in ("tape.jsonl", "evals.jsonl"):
        assert (folder / name).read_bytes() == (unbroken(*settings) / name).read_bytes()


def test_the_execution_may_change_when_a_run_is_resumed(tmp_path, nursery):
    folder = tmp_path / "run"
    fault = Fault(TAPE_LINE, 5, signal=signal.SIGKILL)
    assert nursery.run("train", *TINY, *STACKED, "--out", folder, fault=fault).code == -signal.SIGKILL
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace('execution = "stacked"', 'execution = "sequential"'))
    assert heloco("resume", folder).code == 0
    assert len(tape(folder)) == 8 and json.loads((folder / "run.json").read_text())["execution"] == "sequential"


@pytest.mark.parametrize("extra", [("--compile",), ("--overlap", "--latency-s", "1")], ids=str)
def test_a_setting_that_a_stack_cannot_honour_leaves_no_folder(extra, tmp_path):
    arguments = ("train", *TINY, *STACKED, *extra, "--out", tmp_path / "run")
    assert_refused(tmp_path, *arguments, says="execution is stacked, but")


def test_real_machines_refuse_it(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text('[run]\nexecution = "stacked"\n')
    assert_refused(tmp_path, "serve", config, says="execution is a setting of simulations")


def test_an_unknown_execution_is_refused(tmp_path):
    arguments = ("train", *TINY, "--execution", "piled", "--out", tmp_path / "run")
    assert_refused(tmp_path, *arguments, says="execution cannot be 'piled'")


def test_a_stacked_run_prints_what_any_run_prints(tmp_path):
    result = heloco("train", *TINY, *STACKED, "--out", tmp_path / "run")
    plain = heloco("train", *TINY, *STACKED[:4], "--out", tmp_path / "plain")
    assert (result.code, result.err) == (plain.code, plain.err) == (0, "")
    assert len(result.out.splitlines()) == len(plain.out.splitlines())
    assert train(tmp_path / "again", *STACKED).exists()
