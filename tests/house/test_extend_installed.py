"""Rules, weights, shard policies and tasks of packages that pip installed, in processes of their own."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.repository import REPOSITORY
from support.runs import TINY, TINY_MODEL, Done, evals, heloco, tape

pytestmark = pytest.mark.usefixtures("nothing_stays_registered")


MODULE = (
    "from dataclasses import dataclass\n"
    "from torch import Tensor\n"
    "from support.extensions import Fading, build_sums, sign_step\n"
    "from heloco import Method, register_method\n"
    "ahead = Method(name='', rule=sign_step, options={'lookahead': True, 'lr': 0.003}, about='Signed, and ahead.')\n"
    "register_method('sign-ahead', sign_step, options=ahead.options, about=ahead.about)\n"  # as a script does
    "def rotating(worker, round_index, shards):\n"
    "    return (worker + round_index) % len(shards)\n"
)
PROJECT = """
[project]
name = "own-rules"
version = "0.3"
[project.entry-points."heloco.methods"]
sign = "own_rules:sign_step"
sign-ahead = "own_rules:ahead"
broken = "own_rules.missing:nothing"
mla = "own_rules:sign_step"
[project.entry-points."heloco.weights"]
fading = "own_rules:Fading"
[project.entry-points."heloco.shards"]
rotating = "own_rules:rotating"
[project.entry-points."heloco.tasks"]
sums = "own_rules:build_sums"
"""
OWN = ("--method", "sign-ahead", "--weight", "fading", "--weight-power", "2", "--assign", "rotating", "--outer-lr", "0.004")


def install(project: Path, folder: Path) -> Path:
    """`pip install PROJECT` into a folder of its own, without a network."""
    if not (find_spec("pip") and find_spec("setuptools")):  # not imported: setuptools would patch this process
        pytest.skip("pip or setuptools is not installed")
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet")
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", str(folder), str(project)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr
    return folder


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of every kind of thing, some of it unusable."""
    project = tmp_path_factory.mktemp("own-rules")
    (project / "own_rules.py").write_text(MODULE)
    (project / "pyproject.toml").write_text(PROJECT)
    return install(project, tmp_path_factory.mktemp("site-packages"))


def in_process(*arguments: str | Path, path: Path | None = None) -> Done:
    """`heloco ARGUMENTS` in a process with this folder on its path."""
    places = [str(path)] if path else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*places, *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "heloco.cli", *map(str, arguments)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return Done(process.returncode, process.stdout, process.stderr)


@pytest.fixture(scope="module")
def trained(installed: Path, tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:  # noqa: ARG001
    """The folder of a run with a rule, a weight and a shard policy of the package."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    result = in_process("train", *TINY, *OWN, "--out", folder, path=installed)
    assert result.code == 0, result.err
    return folder


def test_heloco_train_finds_what_a_package_offers(trained):
    config, meta = (trained / "config.toml").read_text(), json.loads((trained / "run.json").read_text())
    for line in ('method = "sign-ahead"', "outer_lr = 0.004", "lookahead = true", 'weight = "fading"', "weight_power = 2.0"):
        assert line in config.splitlines()
    assert meta["plugins"] == {
        "method sign-ahead": "own-rules 0.3", "arrival weight fading": "own-rules 0.3", "shard policy rotating": "own-rules 0.3",
    }  # fmt: skip
    lines = tape(trained)
    assert [line["weight"] for line in lines] == pytest.approx([(1 - t / 16) ** 2 for t in range(1, 9)])
    assert [line["shard"] for line in lines] == [(line["worker"] + line["round"]) % 5 for line in lines]


def test_the_commands_describe_it_and_say_what_cannot_be_used(installed):
    result = in_process("methods", path=installed)
    assert "sign-ahead\n    Signed, and ahead." in result.out and "--lookahead true" in result.out
    assert "The method 'broken' of own-rules 0.3 cannot be used: ModuleNotFoundError" in result.err
    assert "own-rules 0.3 offers the method 'mla', which is built in: it is not used." in result.err
    broken = in_process("train", *TINY, "--method", "broken", path=installed)
    assert broken.code == 2 and "The method 'broken' of own-rules 0.3 cannot be used" in broken.sentence


def test_what_a_script_registers_is_not_the_packages(installed):
    """Even under a name that the package offers."""
    script = (
        "import heloco\nfrom heloco.methods import METHODS\nfrom heloco.policy import SHARD_POLICIES\n"
        "before = SHARD_POLICIES.origin('rotating')\n"
        "heloco.register_method('sign-ahead', lambda theta, m, delta, rho, *, lr=0.5: (theta - lr * rho * delta, m))\n"
        "heloco.register_shards('rotating', lambda worker, round, shards: 0)\n"
        "print(before, [METHODS.origin('sign-ahead'), SHARD_POLICIES.origin('rotating')])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(installed), *sys.path])}
    process = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert process.stdout == "own-rules 0.3 ['', '']\n", process.stderr


def test_a_run_is_resumed_with_the_package_and_without_it_says_what_to_install(trained, installed):
    last = trained / "checkpoints" / "arrival-00000008"
    for name in ("SHA256SUMS", "state.json"):  # the last checkpoint is lost: the run goes on from the one before
        (last / name).unlink(missing_ok=True)
    for path in sorted(last.iterdir()):
        path.unlink()
    last.rmdir()
    before = tape(trained)
    missing = heloco("resume", trained)
    assert missing.code == 2
    assert missing.sentence.startswith(f"The run in {trained} uses the ")
    assert missing.sentence.endswith(", which is not installed here: install own-rules 0.3.")
    assert in_process("resume", trained, path=installed).code == 0
    assert tape(trained) == before
    assert heloco("eval", trained, "--json").code == 0, "an evaluation needs no outer rule"
    assert heloco("report", trained, "--out", trained.parent / "report.html").code == 0


def test_a_study_uses_it(installed, tmp_path):
    (tmp_path / "mine.toml").write_text(
        'like = "table1"\n[small]\narrivals = 4\ninner_steps = 1\n[rows]\n"1,2" = { paces = [1, 1, 1, 1, 2] }\n'
        '[methods]\nsign = {}\nslow = { method = "sign", outer_lr = 0.001, weight = "fading", assign = "rotating" }\n'
        '[[tables]]\nkind = "losses"\ntitle = "Final loss"\n'
    )
    out = tmp_path / "results"
    result = in_process("study", tmp_path / "mine.toml", "--scale", "small", "--seeds", "1", "--out", out, path=installed)
    assert result.code == 0, result.err
    kept = [json.loads(path.read_text())["settings"] for path in (out / "runs").glob("*.json")]
    assert {settings["assign"] for settings in kept} == {"fixed", "rotating"} and len(kept) == 2
    assert "There is no method 'sign' here" in heloco("study", tmp_path / "mine.toml", "--scale", "small").sentence


LISTENING = ("--host", "127.0.0.1", "--port", "0")
HERE = ("--ray", "off", *LISTENING, "--workers", "2")
OWN_TASK = (
    "--recipe", "plain", "--task", "sums", "--method", "mla", "--batch-size", "2", "--inner-steps", "2", "--arrivals", "4",
    "--device", "cpu",
)  # fmt: skip


def test_the_packages_task_is_trained_studied_and_served(installed, tmp_path):
    trained = tmp_path / "trained"
    result = in_process("train", *OWN_TASK, "--paces", "1,2", "--out", trained, path=installed)
    assert result.code == 0, result.err
    assert json.loads((trained / "run.json").read_text())["plugins"] == {"task sums": "own-rules 0.3"}
    (tmp_path / "mine.toml").write_text(
        'like = "table1"\n[settings]\ntask = "sums"\n[small]\narrivals = 4\ninner_steps = 1\n'
        '[rows]\n"1,2" = { paces = [1, 2] }\n[methods]\nmla = {}\n'
        '[[tables]]\nkind = "losses"\ntitle = "Final loss"\n'
        '[[figures]]\nname = "loss"\ntitle = "Loss"\npanels = ["rows"]\nlines = "methods"\n'
    )
    results = tmp_path / "results"
    studied = in_process("study", tmp_path / "mine.toml", "--scale", "small", "--seeds", "1", "--out", results, path=installed)
    assert studied.code == 0, studied.err
    tables = (results / "mine" / "tables.md").read_text()
    assert "Mean validation loss at the end." in tables and "token" not in tables
    for part in ("uvicorn", "starlette", "httpx", "cryptography"):
        pytest.importorskip(part, reason=f"{part} is not installed")
    served = in_process("serve", "--out", tmp_path / "served", *OWN_TASK[2:], *HERE, path=installed)
    assert served.code == 0, (served.out, served.err)
    assert len(tape(tmp_path / "served")) == 4


SERVED = (*TINY_MODEL, "--batch-size", "2", "--inner-steps", "2", "--arrivals", "12", "--device", "cpu", *OWN)


def test_a_served_run_uses_it_and_is_replayed_with_it(installed, tmp_path):
    for part in ("uvicorn", "starlette", "httpx", "cryptography"):
        pytest.importorskip(part, reason=f"{part} is not installed")
    folder = tmp_path / "run"
    result = in_process("serve", "--out", folder, *SERVED, *HERE, path=installed)
    assert result.code == 0, (result.out, result.err)
    assert len(tape(folder)) == 12 and "sign-ahead" in (folder / "config.toml").read_text()
    assert [line["arrival"] for line in evals(folder)][-1] == 12
    replayed = in_process("replay", folder, path=installed)
    assert replayed.code == 0 and "All are the same, to the bit." in replayed.out, replayed.err
    for command in (("replay", folder), ("serve", folder, *HERE), ("rollback", folder, "--to", "6")):
        refused = heloco(*command)
        assert refused.code == 2 and refused.sentence.endswith("which is not installed here: install own-rules 0.3."), command


EXAMPLE = REPOSITORY / "examples" / "own_rule"
EXAMPLE_SERVED = ("--batch-size", "2", "--inner-steps", "2", "--arrivals", "6", "--device", "cpu", "--method", "sign")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """examples/own_rule/ as it is, installed."""
    folder = tmp_path_factory.mktemp("example")
    return install(shutil.copytree(EXAMPLE, folder / "own_rule"), folder / "site-packages")


def test_the_example_is_trained_studied_and_served(example, tmp_path):
    """About twenty lines of Python, and a pyproject.toml."""
    lines = [line for line in (EXAMPLE / "own_rule.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 20
    folder, results = tmp_path / "run", tmp_path / "results"
    trained = in_process("train", *TINY, "--method", "sign", "--outer-lr", "0.004", "--out", folder, path=example)
    assert trained.code == 0, trained.err
    assert json.loads((folder / "run.json").read_text())["plugins"] == {"method sign": "own-rule 0.1"}
    assert "outer_lr = 0.004" in (folder / "config.toml").read_text() and len(tape(folder)) == 8
    (tmp_path / "mine.toml").write_text(
        'like = "table1"\n[small]\narrivals = 4\ninner_steps = 1\n[rows]\n"1,2" = { paces = [1, 1, 1, 1, 2] }\n'
        '[methods]\nsign = {}\n[[tables]]\nkind = "losses"\ntitle = "Final loss"\n'
    )
    study = ("study", tmp_path / "mine.toml", "--scale", "small", "--seeds", "1", "--out", results)
    studied = in_process(*study, path=example)
    assert studied.code == 0, studied.err
    assert len(list((results / "runs").glob("*.json*"))) == 1
    for part in ("uvicorn", "starlette", "httpx", "cryptography"):
        pytest.importorskip(part, reason=f"{part} is not installed")
    served = in_process("serve", "--out", tmp_path / "served", *TINY_MODEL, *EXAMPLE_SERVED, *HERE, path=example)
    assert served.code == 0, (served.out, served.err)
    assert [line["verdict"] for line in tape(tmp_path / "served")] == ["applied"] * 6


def test_rays_processes_find_the_example(example, tmp_path):
    """The synchronizer, which has the rule, is then in a process that Ray starts."""
    for part in ("ray", "uvicorn", "starlette", "httpx", "cryptography"):
        pytest.importorskip(part, reason=f"{part} is not installed")
    folder = tmp_path / "run"
    on_ray = ("--ray", "auto", *LISTENING, "--workers", "1")
    served = in_process("serve", "--out", folder, *TINY_MODEL, *EXAMPLE_SERVED, *on_ray, path=example)
    assert served.code == 0, (served.out, served.err)
    assert [line["verdict"] for line in tape(folder)] == ["applied"] * 6
    assert json.loads((folder / "run.json").read_text())["plugins"] == {"method sign": "own-rule 0.1"}
