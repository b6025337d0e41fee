"""Runs whose contributions are not finite: refused on the tape, resumed to the bit, stopped with the folder whole."""

import contextlib
import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from heloco.engine.local import Collector, LocalRun, LocalState, describe
from heloco.errors import RunStopped
from heloco.records.tape import ArrivalRecord
from heloco.run import RunConfig, RunFolder, resolve, with_fields
from heloco.seeds import derive
from heloco.task.datasets import DatasetTask
from support.runs import TINY, checkpoints, evals, heloco, outcome, tape


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
        def on_arrival(self, record: ArrivalRecord) -> None:
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

        def on_arrival(self, _: object) -> None:
            self.lines_to_go -= 1
            if not self.lines_to_go:
                raise Crash

        def on_evaluation(self, _: object) -> None:
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
