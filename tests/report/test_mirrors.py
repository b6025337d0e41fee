"""--log: the numbers arrive in TensorBoard, Weights & Biases, Trackio and MLflow, and nowhere is anything lost for it."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from heloco.cli.main import run
from heloco.records.evaluations import EvaluationRecord
from heloco.records.tape import ArrivalRecord
from heloco.report.mirrors import Mirroring
from support.runs import TINY


class Kept:
    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.lines.append((step, numbers))

    def close(self) -> None:
        pass


def tape(folder: Path, name: str = "tape.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "plain"
    assert run(["train", *TINY, "--out", str(folder)]) == 0
    return folder


def test_what_is_passed_on_is_what_the_tape_says(plain: Path) -> None:
    mirror = Kept()
    mirroring = Mirroring(mirror)
    for line in tape(plain):
        mirroring.on_arrival(msgspec.convert(line, ArrivalRecord))
    for line in tape(plain, "evals.jsonl"):
        mirroring.on_evaluation(msgspec.convert(line, EvaluationRecord))
    arrivals, evals = tape(plain), tape(plain, "evals.jsonl")
    assert [step for step, _ in mirror.lines] == [line["arrival"] for line in arrivals + evals]
    for (_, numbers), line in zip(mirror.lines, arrivals, strict=False):
        assert numbers["arrival/staleness"] == numbers[f"worker {line['worker']}/staleness"] == line["staleness"]
        assert numbers[f"worker {line['worker']}/training loss"] == line["loss"]
        assert sum(v for name, v in numbers.items() if name.startswith("correction/")) == pytest.approx(1)
    for (_, numbers), line in zip(mirror.lines[len(arrivals) :], evals, strict=True):
        assert numbers["validation/loss"] == line["mean"]["loss"]
        assert {n: v["loss"] for n, v in line["scores"].items()} == {
            name.removeprefix("validation loss/"): v for name, v in numbers.items() if name.startswith("validation loss/")
        }


def test_refused_contributions_and_missing_losses_are_left_out(plain: Path) -> None:
    mirror = Kept()
    Mirroring(mirror).on_arrival(msgspec.convert(tape(plain)[0] | {"verdict": "refused"}, ArrivalRecord))
    [first, *_] = tape(plain, "evals.jsonl")
    missing = first | {"arrival": 3, "time_s": 1.0, "mean": {"loss": None}, "scores": {"de": {"loss": None}}}
    Mirroring(mirror).on_evaluation(msgspec.convert(missing, EvaluationRecord))
    assert mirror.lines == [(3, {"validation/virtual time in s": 1.0})]


def test_tensorboard(tmp_path: Path, plain: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert run(["train", *TINY, "--out", str(tmp_path / "run"), "--log", "tensorboard"]) == 0
    assert (tmp_path / "run" / "tape.jsonl").read_text() == (plain / "tape.jsonl").read_text()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    losses = {event.step: float(event.tensor_proto.float_val[0]) for event in events.Tensors("validation/loss")}
    assert losses == pytest.approx({line["arrival"]: line["mean"]["loss"] for line in tape(plain, "evals.jsonl")}, rel=1e-6)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    yield


def test_wandb(tmp_path: Path, plain: Path, offline: None) -> None:  # noqa: ARG001
    pytest.importorskip("wandb", reason="wandb is not installed")
    assert run(["train", *TINY, "--out", str(tmp_path / "run"), "--log", "wandb"]) == 0
    assert (tmp_path / "run" / "tape.jsonl").read_text() == (plain / "tape.jsonl").read_text()
    [log_file] = (tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb")
    until = time.monotonic() + 60  # its own process may still be writing
    while b"validation/loss" not in log_file.read_bytes():
        assert time.monotonic() < until, "the losses never came"
        time.sleep(0.05)


def test_trackio(tmp_path: Path, plain: Path, offline: None) -> None:  # noqa: ARG001
    pytest.importorskip("trackio", reason="trackio is not installed")
    command = [sys.executable, "-m", "heloco.cli", "train", *TINY, "--out", str(tmp_path / "run"), "--log", "trackio"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)  # in a process of its own: it keeps global state
    assert (tmp_path / "run" / "tape.jsonl").read_text() == (plain / "tape.jsonl").read_text()
    query = "import trackio.sqlite_storage as s, json; print(json.dumps(s.SQLiteStorage.get_logs('heloco', 'run')))"
    output = subprocess.run([sys.executable, "-c", query], check=True, capture_output=True, text=True, timeout=60).stdout
    losses = [line["validation/loss"] for line in json.loads(output.splitlines()[-1]) if "validation/loss" in line]
    assert losses == pytest.approx([line["mean"]["loss"] for line in tape(plain, "evals.jsonl")])


@pytest.fixture
def mlflow_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A folder that MLflow writes to; its small package knows no databases."""
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    store = (tmp_path / "mlflow").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return store


def test_mlflow(tmp_path: Path, plain: Path, mlflow_store: str) -> None:
    from mlflow import MlflowClient

    assert run(["train", *TINY, "--out", str(tmp_path / "run"), "--log", "mlflow"]) == 0
    assert (tmp_path / "run" / "tape.jsonl").read_text() == (plain / "tape.jsonl").read_text()
    client = MlflowClient(mlflow_store)
    experiment = client.get_experiment_by_name("heloco")
    assert experiment is not None
    [logged_run] = client.search_runs([experiment.experiment_id])
    assert (logged_run.info.run_name, logged_run.info.status) == ("run", "FINISHED")
    assert logged_run.data.params["outer.method"] == "heloco-ramp" and logged_run.data.params["run.seed"] == "0"
    history = client.get_metric_history(logged_run.info.run_id, "validation/loss")
    assert {metric.step: metric.value for metric in history} == {
        line["arrival"]: line["mean"]["loss"] for line in tape(plain, "evals.jsonl")
    }
    history = client.get_metric_history(logged_run.info.run_id, "arrival/staleness")
    assert sorted((metric.step, metric.value) for metric in history) == [
        (line["arrival"], line["staleness"]) for line in tape(plain)
    ]


def test_the_seeds_of_a_run_are_runs_of_their_own(tmp_path: Path, mlflow_store: str) -> None:
    from mlflow import MlflowClient

    assert run(["train", *TINY, "--out", str(tmp_path / "mine"), "--log", "mlflow", "--seeds", "2"]) == 0
    client = MlflowClient(mlflow_store)
    experiment = client.get_experiment_by_name("heloco")
    assert experiment is not None
    losses = {each.info.run_name: each.data.metrics["validation/loss"] for each in client.search_runs([experiment.experiment_id])}
    assert losses == {
        f"mine/seed-{seed}": tape(tmp_path / "mine" / f"seed-{seed}", "evals.jsonl")[-1]["mean"]["loss"] for seed in (0, 1)
    }


def test_trackio_follows_one_run_at_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: True)
    assert run(["train", *TINY, "--out", str(tmp_path / "run"), "--log", "trackio", "--seeds", "2"]) == 2
    assert "--log trackio follows one run at a time" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_an_unknown_or_missing_log_is_refused_before_anything_is_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["train", *TINY, "--out", str(tmp_path / "run"), "--log", "tensorbord"]) == 2
    assert "did you mean 'tensorboard'" in capsys.readouterr().err and not (tmp_path / "run").exists()
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert run(["train", *TINY, "--out", str(tmp_path / "run"), "--log", "wandb"]) == 2
    assert "pip install wandb" in capsys.readouterr().err and not (tmp_path / "run").exists()
