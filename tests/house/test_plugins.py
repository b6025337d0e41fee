"""`--plugin`: a file or module of the user's own, in every command and in the processes that commands start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.runs import TINY, TINY_MODEL, Done, tape

PLUGIN = """
import torch
import heloco

def sign_step(theta, m, delta, rho, counts, *, lr=0.01, boost=1.0):
    "Signed descent."
    return theta - lr * boost / (1 + counts.staleness) * delta.sign(), m

heloco.register_method("sign", sign_step)
heloco.register_weight("halved", lambda counts: 0.5 / counts.workers)
heloco.register_shards("rotating", lambda worker, round, shards: (worker + round) % len(shards))
heloco.register_inner_optimizer("radam", torch.optim.RAdam)
"""
OWN = ("--method", "sign", "--boost", "2", "--weight", "halved", "--assign", "rotating", "--inner-optimizer", "radam")


def in_process(*arguments: str | Path, cwd: Path, **environment: str) -> Done:
    """`heloco ARGUMENTS` in a process that starts in this folder."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-m", "heloco.cli", *map(str, arguments)]
    process = subprocess.run(command, env=variables, cwd=cwd, capture_output=True, text=True, timeout=300)
    return Done(process.returncode, process.stdout, process.stderr)


@pytest.fixture
def place(tmp_path: Path, cache: Path) -> Path:  # noqa: ARG001
    (tmp_path / "my_rules.py").write_text(PLUGIN)
    return tmp_path


def test_a_file_beside_the_user_is_enough_for_train_and_resume(place):
    result = in_process("train", *TINY, *OWN, "--plugin", "./my_rules.py", "--out", "run", cwd=place)
    assert result.code == 0, result.err
    lines = tape(place / "run")
    assert {line["weight"] for line in lines} == {0.1}
    assert [line["shard"] for line in lines] == [(line["worker"] + line["round"]) % 5 for line in lines]
    plugins = json.loads((place / "run" / "run.json").read_text())["plugins"]
    assert plugins["method sign"] == f"--plugin {place / 'my_rules.py'}" and len(plugins) == 4
    refused = in_process("resume", "run", cwd=place)
    assert refused.code == 2 and f"give --plugin {place / 'my_rules.py'}." in refused.sentence
    resumed = in_process("resume", "--plugin=my_rules.py", "run", cwd=place)
    assert resumed.code == 0 and "is finished" in resumed.out, resumed.err


def test_its_knobs_are_flags_and_the_commands_describe_it(place):
    assert "--boost X" in in_process("--plugin", "my_rules.py", "train", "--help", cwd=place).out
    assert "sign\n    Signed descent." in in_process("methods", "--plugin", "my_rules.py", cwd=place).out


def test_an_installed_module_can_be_named_and_so_can_the_environment(place):
    for flags, environment in ((("--plugin", "my_rules"), {}), ((), {"HELOCO_PLUGINS": "my_rules"})):
        path = os.pathsep.join([str(place), *sys.path])
        result = in_process("schedule", "--method", "sign", *flags, cwd=place, PYTHONPATH=path, **environment)
        assert result.code == 0 and "worker" in result.out, result.err


STUDY = """
like = "table1"
[rows]
"1,2" = { paces = [1, 2] }
[methods]
sign = { method = "sign", boost = 2.0 }
[small]
preset = "1m"
width = 16
layers = 1
heads = 2
context = 16
arrivals = 4
inner_steps = 2
languages = ["auren", "thelis"]
[[tables]]
kind = "losses"
title = "Final loss"
"""


def test_a_study_finds_it(place):
    (place / "mine.toml").write_text(STUDY)
    result = in_process("study", "mine.toml", "--scale", "small", "--seeds", "1", "--plugin", "my_rules.py", cwd=place)
    assert result.code == 0, result.err
    assert [r["method"] for r in json.loads((place / "results-small" / "mine" / "mine.json").read_text())["records"]] == ["sign"]


def test_a_served_run_and_its_workers_find_it(place):
    """The rule is the synchronizer's, and the inner optimizer the workers'."""
    flags = (*TINY_MODEL, "--arrivals", "4", "--inner-steps", "2", "--batch-size", "2", "--lr", "0.001")
    served = in_process(
        "serve", *flags, "--paces", "1,1", "--method", "sign", "--inner-optimizer", "radam", "--workers", "2", "--ray", "off",
        "--host", "127.0.0.1", "--port", "0", "--out", "run", "--plugin", "my_rules.py", cwd=place,
    )  # fmt: skip
    assert served.code == 0, (served.out, served.err)
    assert [line["arrival"] for line in tape(place / "run")] == [1, 2, 3, 4]


TASK = """
from support.extensions import build_sums
import heloco

heloco.register_task("sums", build_sums)
"""


def test_a_machine_that_joins_needs_the_plugin_with_the_task(place, programs):
    (place / "my_task.py").write_text(TASK)
    flags = ("--task", "sums", "--arrivals", "4", "--inner-steps", "2", "--batch-size", "2", "--lr", "0.01", "--seats", "1")
    plugins = (place / "my_rules.py", place / "my_task.py")
    both = [word for plugin in plugins for word in ("--plugin", str(plugin))]
    served = programs.serve(place / "run", *flags, "--method", "sign", *both)
    without = programs.join(served).end()
    assert without.code == 2 and "There is no task 'sums' here" in without.sentence and "--plugin" in without.sentence
    joined = programs.join(served, "--plugin", str(plugins[1])).end()
    assert joined.code == 0 and "all arrivals are in" in joined.out, "the rule is the synchronizer's alone"
    assert served.program.end().code == 0
    assert [line["arrival"] for line in tape(place / "run")] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("content", "flags", "says"),
    [
        ("1 / 0", ("--plugin", "wrong.py"), "cannot be imported: ZeroDivisionError"),
        ("", ("--plugin", "no_such_module"), "The plugin no_such_module cannot be imported: ModuleNotFoundError"),
        ("", ("--plugin", "nowhere.py"), "nowhere.py cannot be imported: FileNotFoundError"),
        ("", ("--plugin",), "--plugin needs the name of a module, or a file such as ./my_rules.py."),
        ("import heloco\nheloco.register_weight('base', max)", ("--plugin", "wrong.py"), "weight 'base' is built in"),
    ],
)
def test_what_cannot_be_imported_is_said_in_a_sentence(content, flags, says, place):
    (place / "wrong.py").write_text(content)
    result = in_process("train", *TINY, *flags, cwd=place)
    assert result.code == 2 and says in result.sentence, result.err
    assert not (place / "runs").exists()
