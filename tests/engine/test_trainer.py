"""One run as a stack of the rounds under way: the same tape as one round after the other, and the loop where no stack serves."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import to_builtins
from torch import Tensor, nn

import heloco
from heloco.corpus import prepare, split
from heloco.engine.build import build_parts
from heloco.engine.fleet import PlannedRun, make_member
from heloco.engine.local import Collector, LocalRun, StopRequested, describe
from heloco.engine.stack_limits import WIDEST
from heloco.engine.trainer import StackedTrainer, choose_execution, step_flop
from heloco.errors import UserError
from heloco.inner import SequentialInner
from heloco.records.run_facts import read_facts
from heloco.run import RunConfig, RunFolder, resolve, with_fields
from heloco.synchronizer import Round
from heloco.task import Task
from heloco.task.datasets import DatasetTask
from heloco.task.gpt import preset
from heloco.task.images import ImagesTask
from heloco.task.language import LanguageTask
from support.inner_rounds import mlp, seeded, task_of, with_dropout

pytestmark = pytest.mark.usefixtures("one_thread")


class DoubleLanguage(LanguageTask):
    def build_model(self) -> nn.Module:
        return super().build_model().double()


class DoubleImages(ImagesTask):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.validation = [(pictures.double(), labels) for pictures, labels in self.validation]

    def build_model(self) -> nn.Module:
        return super().build_model().double()

    def batch(self, shard: int, positions: Any) -> Any:
        pictures, labels = super().batch(shard, positions)
        return pictures.double(), labels


def language() -> LanguageTask:
    corpus = prepare("builtin", languages=["auren", "thelis", "vesnar"])
    model = preset("1m", width=16, layers=1, heads=2, context=8, vocab_size=257)
    return DoubleLanguage(corpus, split(corpus, scheme="source", context=8), model, context=8, seed=0, eval_windows=4)


def images() -> ImagesTask:
    return DoubleImages(seed=0, images=40, val_images=4)


class Fickle(nn.Module):
    """Which way its data goes depends on the data, from its `calls`-th call on in train mode."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.calls_left = calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls_left -= self.training
        return self.layer(x) if self.calls_left >= 0 or x.sum() > 0 else self.layer(-x)


def fickle(calls: int = 0) -> DatasetTask:
    return task_of(seeded(lambda: Fickle(calls)), torch.float64)


# a larger ε than usual: gradients that are zero but for rounding (a key's bias) would become whole steps
USUAL = {
    "assign": "flexible",
    "paces": [1, 1, 2, 5],
    "inner_steps": 3,
    "arrivals": 14,
    "eval_every": 4,
    "batch_size": 2,
    "lr": 3e-3,
    "adam_eps": 1e-4,
}
MUON = {"inner_optimizer": "muon", "keep_state": True, "second_moment": "rows", "method": "heloco-adaptive"}
UNEVEN = {"steps": "dylu", "inner_steps": 6, "grace": 0.1}


def config(**settings: Any) -> RunConfig:
    return resolve(with_fields(RunConfig(), {**USUAL, "device": "cpu", **settings}))


def run_of(task: Task, execution: str, **settings: Any) -> tuple[Collector, list[Tensor]]:
    collector = Collector()
    run = LocalRun(task, config(execution=execution, **settings), observers=[collector])
    run.run()
    return collector, list(run.model.state_dict().values())


def assert_close(ours: Any, theirs: Any, rel: float = 2e-4) -> None:
    """Equal, but for the last digits of floats. Muon has few: it computes in bfloat16."""
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert_close(ours[name], theirs[name], rel)
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for mine, yours in zip(ours, theirs, strict=True):
            assert_close(mine, yours, rel)
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, rel=rel, abs=rel / 20)
    else:
        assert ours == theirs


def assert_same_run(ours: tuple[Collector, list[Tensor]], theirs: tuple[Collector, list[Tensor]], rel: float = 2e-4) -> None:
    assert_close(to_builtins(ours[0].tape), to_builtins(theirs[0].tape), rel)
    assert_close(to_builtins(ours[0].evals), to_builtins(theirs[0].evals), rel)
    for mine, yours in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(mine, yours, rtol=1e-3, atol=1e-5)


@pytest.fixture
def wave_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rounds each stack was given."""
    sizes: list[int] = []
    original = StackedTrainer.run

    def run(self: StackedTrainer, rounds: list[Round]) -> Any:
        sizes.append(len(rounds))
        return original(self, rounds)

    monkeypatch.setattr(StackedTrainer, "run", run)
    return sizes


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (language, {}),
        (language, {"keep_state": True, **UNEVEN}),
        (language, MUON),
        (language, {**MUON, **UNEVEN, "clip": 0.5, "accumulate": 2}),
        (language, {"method": "sync-nesterov", "wire": "int4", "up_mbit_s": [1.0], "latency_s": [0.5]}),
        (images, {}),
        (images, {"keep_state": True, **UNEVEN}),
        (lambda: task_of(mlp(), torch.float64), {"inner_optimizer": "sgd", "drop": "skip", "drop_above": 1}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "-".join(value) or "plain",
)
def test_a_run_as_a_stack_has_the_tape_of_one_round_after_the_other(
    make: Callable[[], Task], settings: dict[str, Any], wave_sizes: list[int]
) -> None:
    stacked = run_of(make(), "stacked", **settings)
    assert max(wave_sizes) > 1 and sum(wave_sizes) >= 14
    rel = 2e-2 if "inner_optimizer" in settings else 2e-4
    assert_same_run(stacked, run_of(make(), "sequential", **settings), rel)


def test_the_same_stacks_give_the_same_bits() -> None:
    first, second = (run_of(task_of(with_dropout()), "stacked", **MUON) for _ in range(2))
    assert first[0] == second[0] and all(map(torch.equal, first[1], second[1]))
    assert first[0] != run_of(task_of(with_dropout()), "stacked", **MUON, seed=1)[0]


def test_the_global_generator_is_left_as_it_is() -> None:
    before = torch.get_rng_state()
    run_of(task_of(with_dropout()), "stacked")
    assert torch.equal(before, torch.get_rng_state())


def test_more_workers_than_fit_into_a_stack_share_it(monkeypatch: pytest.MonkeyPatch, wave_sizes: list[int]) -> None:
    settings = {"paces": [1, 1, 2, 1, 1, 3, 1], "arrivals": 30}
    monkeypatch.setitem(WIDEST, "cpu", 3)
    stacked = run_of(language(), "stacked", **settings)
    assert max(wave_sizes) == 3
    assert_same_run(stacked, run_of(language(), "sequential", **settings))


def test_a_rounds_bits_do_not_depend_on_the_others_in_the_stack() -> None:
    parts = build_parts(images(), config(paces=[1, 1, 1, 1, 1], keep_state=True))
    rounds = [parts.synchronizer.dispatch(worker) for worker in range(5)]
    together, trainer = StackedTrainer(parts).run(rounds), StackedTrainer(parts)
    for among in ([3], [4, 1], [0, 2, 3, 4]):
        for contribution in trainer.run([rounds[worker] for worker in among]):
            expected = together[contribution.worker]
            assert contribution.worker == expected.worker and contribution.loss == expected.loss
            for ours, theirs in zip(contribution.pseudo_gradient, expected.pseudo_gradient, strict=True):
                assert torch.equal(ours, theirs)
            assert all(map(torch.equal, contribution.buffers, expected.buffers))


class StopAt:
    """An observer that stops its run."""

    def __init__(self, run: LocalRun, arrivals: int) -> None:
        self.run, self.arrivals = run, arrivals

    def on_arrival(self, _: Any) -> None:
        self.run.stop_requested = self.run.synchronizer.arrivals == self.arrivals

    def on_evaluation(self, _: Any) -> None:
        pass


def test_a_stop_is_heeded_before_the_next_stack(wave_sizes: list[int], tmp_path: Path) -> None:
    task, settings = task_of(mlp()), config(execution="stacked")
    run = LocalRun(task, settings)
    run.folder = RunFolder.create(tmp_path / "run", settings, describe(task, settings, run.model, execution=run.execution))
    run.folder.start_writing()
    run.observers = [StopAt(run, 5)]
    with pytest.raises(StopRequested):
        run.run()
    run.folder.close()
    latest = run.folder.latest()
    assert latest is not None and latest.name == "arrival-00000005" and sum(wave_sizes) < 14


# ---- where no stack serves


def stacked_so_far(task: Task, folder: Path | None = None, **settings: Any) -> tuple[LocalRun, Collector]:
    """A run that is resumed after its beginning, as on a GPU: the config leaves the execution open."""
    collector, settled = Collector(), config(**settings)
    run = LocalRun(task, settled, observers=[collector], begun_as="stacked")
    if folder is not None:
        run.folder = RunFolder.create(folder, settled, describe(task, settled, run.model, execution=run.execution))
        run.folder.start_writing()
    return run, collector


def test_where_the_data_decide_the_way_the_loop_serves_and_a_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, collector = stacked_so_far(fickle(), tmp_path / "run")
    assert read_facts(tmp_path / "run" / "run.json").execution == "stacked"
    run.run()
    line = capsys.readouterr().err
    assert line.startswith("heloco: this model cannot be computed as a stack (vmap: ") and line.count("\n") == 1
    assert read_facts(tmp_path / "run" / "run.json").execution == "sequential"
    expected, parameters = run_of(fickle(), "sequential")
    assert collector == expected and all(map(torch.equal, run.model.state_dict().values(), parameters))


def test_a_failure_in_the_middle_of_a_run_loses_nothing(capsys: pytest.CaptureFixture[str], wave_sizes: list[int]) -> None:
    task = fickle(calls=8)  # two stacks of three steps are done, and the third fails
    run, collector = stacked_so_far(task, keep_state=True)
    run.run()
    assert len(wave_sizes) == 3 and capsys.readouterr().err.count("\n") == 1
    expected = run_of(fickle(), "sequential", keep_state=True)
    assert [line.arrival for line in collector.tape] == [line.arrival for line in expected[0].tape]
    assert [line.spans for line in collector.tape] == [line.spans for line in expected[0].tape]


def test_a_stack_that_was_asked_for_and_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match=r"^execution is stacked, but this model cannot be .* \(vmap: .*leave it out"):
        run_of(fickle(), "stacked")


def test_an_error_of_the_task_shows_as_it_is() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:  # noqa: ARG001
        raise ZeroDivisionError("of the task")

    task = DatasetTask(mlp(), loss, {"a": [(torch.randn(4), torch.randn(2))] * 4})
    with pytest.raises(ZeroDivisionError, match="of the task"):
        stacked_so_far(task)[0].run()


def half() -> DatasetTask:
    return task_of(mlp(), torch.bfloat16)


def frozen() -> DatasetTask:
    model = mlp()
    next(model.parameters()).requires_grad_(False)
    return task_of(model)


@pytest.mark.parametrize(
    ("make", "settings", "says"),
    [
        (lambda: task_of(mlp()), {"compile": True}, "compile is set"),
        (lambda: task_of(mlp()), {"overlap": True, "latency_s": [1.0]}, "overlap is set"),
        (half, {}, "is torch.bfloat16"),
        (frozen, {}, "needs no gradient"),
    ],
)
def test_what_a_stack_would_not_honour_is_refused_before_the_run(
    make: Callable[[], Task], settings: dict[str, Any], says: str
) -> None:
    run = LocalRun(make(), config(execution="stacked", **settings))
    with pytest.raises(UserError, match=rf"^execution is stacked, but .*{says}.*: leave one of them out\.$"):
        run.run()


@pytest.mark.parametrize(("name", "settings"), [("execution", {"execution": "sequential"}), ("overlap", {"overlap": True})])
def test_a_study_refuses_what_its_stack_cannot_honour(name: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"^{name} is set, but a study computes .*: leave it out"):
        make_member(0, PlannedRun("one", task_of(mlp()), config(**settings)))


def test_auto_is_one_round_after_the_other_on_a_cpu_and_goes_on_as_it_began() -> None:
    parts = build_parts(task_of(mlp()), config())
    assert choose_execution(parts, None) == choose_execution(parts, "sequential") == "sequential"
    assert choose_execution(parts, "stacked") == "stacked"
    chosen = build_parts(task_of(mlp()), config(execution="sequential"))
    assert choose_execution(chosen, "stacked") == "sequential"


@pytest.mark.parametrize(
    ("memory", "flop", "settings", "execution"),
    [
        (1e12, 1e9, {}, "stacked"),
        (1e12, 1e9, {"keep_state": True, "paces": [1]}, "stacked"),
        (1e12, 1e9, {"compile": True}, "sequential"),
        (1e12, 1e9, {"overlap": True}, "sequential"),
        (1e12, 1e12, {}, "sequential"),
        (1e12, 1e12, {"execution": "stacked"}, "stacked"),
        (1e3, 1e9, {}, "sequential"),
    ],
    ids=str,
)
def test_auto_takes_a_stack_on_a_gpu_where_that_serves(
    memory: float, flop: float, settings: dict[str, Any], execution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("heloco.engine.trainer.free_memory", lambda _: memory)
    monkeypatch.setattr("heloco.engine.trainer.step_flop", lambda _: flop)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    parts = build_parts(task_of(mlp()), config(**settings))
    assert choose_execution(replace(parts, device=torch.device("cuda")), None) == execution


def test_the_operations_of_a_step_are_those_of_its_products() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    parts = build_parts(task_of(model), config(batch_size=5, accumulate=2))
    before = [b.clone() for b in parts.model.buffers()]
    assert step_flop(parts) == 2 * 3 * 5 * 2 * (4 * 8 + 8 * 2)
    assert all(map(torch.equal, before, parts.model.buffers()))


def test_execution_does_not_decide_what_a_run_is() -> None:
    assert config().digest() == config(execution="stacked").digest() == config(execution="sequential").digest()


def test_simulate_takes_it_too(wave_sizes: list[int]) -> None:
    result = heloco.simulate(
        task_of(mlp()), execution="stacked", arrivals=6, paces=(1, 2), device="cpu", recipe="plain", assign="flexible"
    )
    assert len(result.tape) == 6 and wave_sizes[0] == 2


def test_a_sequential_round_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, nothing but the round that the clock waits for is computed."""
    counts: list[int] = []
    original = SequentialInner.run

    def run(self: SequentialInner, rounds: list[Round]) -> Any:
        counts.append(len(rounds))
        return original(self, rounds)

    monkeypatch.setattr(SequentialInner, "run", run)
    run_of(task_of(mlp()), "auto")
    assert counts == [1] * 14
