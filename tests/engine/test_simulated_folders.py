"""What `heloco.simulate` hands back and leaves: its repr, its warnings, and the folder that `out` names."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import heloco
from heloco.errors import RunStopped, UserError
from heloco.task.datasets import DatasetTask
from support.runs import evals, outcome, tape
from support.runs import heloco as heloco_command

pytestmark = pytest.mark.usefixtures("one_thread")


def regression() -> DatasetTask:
    """Three shards of a small regression."""
    draw = torch.Generator().manual_seed(0)
    shards = {name: [(x, x.sum(0, keepdim=True)) for x in torch.randn(40, 4, generator=draw)] for name in "abc"}
    model = nn.Linear(4, 1)
    nn.init.zeros_(model.weight)
    return DatasetTask(model, lambda m, batch: F.mse_loss(m(batch[0]), batch[1]), shards, validation=shards)


def test_a_result_has_a_short_repr(tmp_path):
    result = heloco.simulate(regression(), paces=(1, 2, 6), arrivals=12, inner_steps=2, device="cpu")
    assert (
        repr(result)
        == f"<heloco.Result: heloco-adaptive, 12 arrivals in {result.evals[-1].time_s:g} virtual s, loss {result.loss:.4g}>"
    )
    silent = DatasetTask(nn.Linear(1, 1), lambda m, batch: m(batch).mean(), {"only": [torch.ones(1)] * 4})
    out = tmp_path / "run"
    text = repr(heloco.simulate(silent, recipe="plain", paces=[1], arrivals=2, inner_steps=1, device="cpu", out=out))
    assert text == f"<heloco.Result: heloco-ramp, 2 arrivals in 2 virtual s, in {out}>"


def test_rates_far_above_their_defaults_are_warned_of_by_their_arguments():
    with pytest.warns(UserWarning) as caught:
        heloco.simulate(regression(), paces=(1, 2, 6), arrivals=2, inner_steps=1, lr=0.7, device="cpu")
    [warning] = caught
    assert str(warning.message).startswith("lr is 0.7, 109 times the default 0.0064 of muon") and warning.filename == __file__
    assert str(warning.message).endswith("lr is the rate of the inner steps, outer_lr that of the outer method.")


# ---- the folder that `out` names

SETTINGS = {"preset": "1m", "width": 32, "layers": 1, "heads": 2, "context": 16, "eval_windows": 4, "inner_steps": 2,
            "arrivals": 8, "batch_size": 2, "lr": 0.003, "paces": [1, 1, 6, 6, 6]}  # fmt: skip


def test_out_writes_the_folder_that_train_writes(unbroken, tmp_path, one_thread):  # noqa: ARG001
    out = tmp_path / "runs" / "mine"
    result = heloco.simulate(recipe="plain", out=out, **SETTINGS)
    assert result.path == out and outcome(out) == outcome(unbroken())
    assert [line["loss"] for line in tape(out)] == [line.loss for line in result.tape]
    assert "finished" in heloco_command("resume", out).out
    with pytest.raises(UserError, match=r"The run folder .* exists: choose another out, or `heloco resume "):
        heloco.simulate(recipe="plain", out=out, **SETTINGS)


def test_reports_and_comparisons_take_runs_of_a_task_of_ones_own(tmp_path):
    pytest.importorskip("plotly", reason="plotly is not installed")
    folders = [tmp_path / method for method in ("mla", "heloco-ramp")]
    for folder in folders:
        result = heloco.simulate(
            regression(), method=folder.name, paces=(1, 2, 6), arrivals=12, inner_steps=2, device="cpu", out=str(folder)
        )
        assert result.loss == evals(folder)[-1]["mean"]["loss"]
    result = heloco_command("compare", *folders, "--format", "csv")
    assert result.code == 0 and result.out.count("heloco-ramp,") == 2
    assert heloco_command("report", *folders, "--out", tmp_path / "report.html").code == 0
    assert heloco_command("export", folders[0]).code == 0
    assert "DatasetTask" in heloco_command("eval", folders[0]).sentence


def test_a_run_that_stops_leaves_a_whole_folder_that_is_free_again(tmp_path):
    with pytest.raises(RunStopped), pytest.warns(UserWarning, match="lr is 1e"):
        heloco.simulate(recipe="plain", out=tmp_path / "run", **SETTINGS | {"lr": 1e30, "max_refusals": 2})
    assert [line["verdict"] for line in tape(tmp_path / "run")][-2:] == ["refused", "refused"]
    assert "contributions in a row" in heloco_command("resume", tmp_path / "run").sentence  # not: another process is writing
