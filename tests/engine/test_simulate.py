"""`heloco.simulate` from end to end: every method learns, the same seed gives the same bits, and importing heloco is light."""

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import heloco
from heloco.engine.schedule import schedule
from heloco.errors import RunStopped, UserError
from heloco.methods import METHODS
from heloco.task.datasets import DatasetTask
from heloco.task.images import STYLES, ImagesTask

BRIEF = {"recipe": "plain", "inner_steps": 2, "arrivals": 7, "eval_every": 3, "device": "cpu"}
TINY_GPT = {"width": 16, "layers": 1, "heads": 2, "context": 16, "eval_windows": 4, "batch_size": 2}


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def images() -> ImagesTask:
    return ImagesTask(seed=0, images=600, val_images=100)


def regression() -> DatasetTask:
    """Three shards of a small regression in float64."""
    draw = torch.Generator().manual_seed(0)
    shards = {}
    for name in "abc":
        x = torch.randn(40, 4, generator=draw, dtype=torch.float64)
        shards[name] = list(zip(x, x @ torch.randn(4, 2, generator=draw, dtype=torch.float64), strict=True))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    return DatasetTask(model, lambda m, batch: F.mse_loss(m(batch[0]), batch[1]), shards, validation=shards)


def tensors(model: nn.Module) -> list[Tensor]:
    return list(model.state_dict().values())


def same(ours: nn.Module, theirs: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(ours), tensors(theirs), strict=True))


def finite(result: heloco.Result) -> bool:
    return all(t.isfinite().all() for t in tensors(result.model)) and all(math.isfinite(line.loss) for line in result.tape)


# ---- every method


FIRST = ("heloco-adaptive", "delayed-nesterov", "sync-nesterov")


@pytest.mark.parametrize("method", [pytest.param(name, marks=() if name in FIRST else pytest.mark.long) for name in METHODS])
def test_every_method_learns_the_images(method, images):
    result = heloco.simulate(
        images,
        recipe="plain",
        method=method,
        paces=(1, 1, 2, 2, 2),
        inner_steps=10,
        arrivals=30,
        batch_size=16,
        lr=1e-3,
        eval_every=0,
        device="cpu",
    )
    first, last = result.evals
    assert finite(result)
    assert (first.arrival, last.arrival, last.inner_steps, last.units) == (0, 30, 300, 4800)
    assert list(last.scores) == list(STYLES)
    assert first.mean["loss"] == pytest.approx(math.log(6), abs=0.05)
    assert result.loss == last.mean["loss"] < first.mean["loss"] - 0.15
    assert last.mean["accuracy"] > first.mean["accuracy"] + 0.1


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_on_the_built_in_languages(method):
    result = heloco.simulate(method=method, **BRIEF, **TINY_GPT)
    assert finite(result)
    assert [line.arrival for line in result.tape] == [1, 2, 3, 4, 5, 6, 7]
    assert [line.arrival for line in result.evals] == [0, 3, 6, 7]
    assert [line.units for line in result.evals] == [n * 2 * 2 * 16 for n in (0, 3, 6, 7)]
    assert list(result.evals[0].scores) == result.config.input.languages == ["arzhan", "auren", "thelis", "vesnar", "zumeri"]
    assert result.evals[0].mean["loss"] == pytest.approx(math.log(257), rel=0.1)
    assert all(set(score) == {"loss", "bits_per_byte"} for score in result.evals[-1].scores.values())


@pytest.mark.parametrize(
    "settings",
    [
        {"assign": "flexible"},
        {"assign": "liu"},
        {"steps": "dylu"},
        {"keep_state": True},
        {"drop": "zero", "drop_above": 1},
        {"drop": "skip", "drop_above": 1},
        {"weight": "share"},
        {"weight": "polynomial", "weight_exponent": 1.0},
        {"lr_position": "run", "warmup": 3},
        {"clip": 0.1, "accumulate": 2},
        {"grace": 0.5},
    ],
    ids=str,
)
def test_every_setting_makes_a_difference_and_no_trouble(settings):
    common = {"recipe": "plain", "paces": (1, 2, 6), "arrivals": 12, "inner_steps": 6, "device": "cpu"}
    plain = heloco.simulate(regression(), **common)
    other = heloco.simulate(regression(), **common, **settings)
    assert finite(other)
    assert not same(plain.model, other.model)


def test_without_settings_a_run_takes_the_best_recipe_and_learns():
    sizes = {"width": 32, "layers": 1, "heads": 2, "context": 32, "eval_windows": 8}
    result, plain = (
        heloco.simulate(inner_steps=10, arrivals=60, eval_every=0, device="cpu", **recipe, **sizes)
        for recipe in ({}, {"recipe": "plain"})
    )
    assert result.config.outer.method == "heloco-adaptive" and result.config.inner.inner_optimizer == "muon"
    assert [line.inner_steps for line in result.tape[:5]] == [3, 10, 10, 5, 2]  # DyLU: after 9, 10, 10, 10 and 12 s
    assert sum(line.inner_steps for line in result.tape) < sum(line.inner_steps for line in plain.tape)
    assert result.loss < plain.loss < result.evals[0].mean["loss"]


@pytest.mark.parametrize(
    ("workers", "rounds", "gain"), [(64, 10, 0.4), pytest.param(512, 8, 0.3, marks=pytest.mark.long)], ids=str
)
def test_many_workers_are_stable_out_of_the_box(workers, rounds, gain):
    """After the first quarter no evaluation is far above the lowest before."""
    sizes = {"width": 16, "layers": 1, "heads": 2, "context": 16, "batch_size": 2, "inner_steps": 2, "eval_windows": 8}
    result = heloco.simulate(workers=workers, arrivals=rounds * workers, eval_every=workers, device="cpu", **sizes)
    losses = [record.mean["loss"] for record in result.evals]
    for i in range(len(losses) // 4, len(losses)):
        assert losses[i] < min(losses[:i]) + 0.3
    assert losses[-1] < losses[0] - gain


# ---- against the schedule and against a loop by hand


@pytest.mark.parametrize("method", ["heloco", "sync-nesterov"])
def test_the_tapes_times_are_those_of_the_schedule(method):
    paces = (0.1, 0.3, 0.7)
    settings = {"inner_steps": 3, "arrivals": 20, "grace": 1 / 6, "device": "cpu"}
    result = heloco.simulate(regression(), recipe="plain", method=method, paces=paces, **settings)
    planned = schedule(paces_s=paces, inner_steps=[3] * 3, arrivals=20, barrier=METHODS[method].barrier, grace_s=0.05)
    ours = [(line.time_s, line.worker, line.version, line.staleness) for line in result.tape]
    assert ours == [(time_s, a.worker, a.version, a.staleness) for time_s, a in planned]


def test_the_synchronous_method_is_diloco_written_by_hand():
    """Three workers, four rounds of five AdamW steps, torch's SGD over the mean of their pseudo-gradients."""
    task = regression()
    result = heloco.simulate(
        task,
        recipe="plain",
        method="sync-nesterov",
        paces=(1, 2, 6),
        inner_steps=5,
        arrivals=12,
        batch_size=4,
        lr=0.01,
        lr_min=0.01,
        device="cpu",
    )
    outer_model = task.build_model()
    outer = torch.optim.SGD(outer_model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for r in range(4):
        models = []
        for worker in range(3):
            model = task.build_model()
            model.load_state_dict(outer_model.state_dict())
            adam = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
            for h in range(5):
                adam.zero_grad()
                first = 20 * r + 4 * h
                task.loss(model, task.batch(worker, np.arange(first, first + 4))).backward()
                adam.step()
            models.append(model)
        for p, *ends in zip(outer_model.parameters(), *(model.parameters() for model in models), strict=True):
            p.grad = p.detach() - torch.stack([end.detach() for end in ends]).mean(0)
        outer.step()
    for ours, theirs in zip(result.model.parameters(), outer_model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_one_worker_without_momentum_at_rate_one_is_plain_training():
    """η = 1, μ = 0, ρ = 1: the outer model is the worker's own, round after round."""
    task = regression()
    result = heloco.simulate(
        task, recipe="plain", method="mla", paces=[1], outer_lr=1.0, momentum=0.0, inner_steps=5, arrivals=3, batch_size=4,
        lr=0.01, lr_min=0.01, keep_state=True, device="cpu",
    )  # fmt: skip
    model = task.build_model()
    adam = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    for step in range(15):
        adam.zero_grad()
        shard, first = step // 5, 4 * (step % 5)  # a worker with three shards takes them in turn
        task.loss(model, task.batch(shard, np.arange(first, first + 4))).backward()
        adam.step()
    for ours, theirs in zip(result.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


# ---- deterministic


def on_images(seed: int) -> heloco.Result:
    return heloco.simulate("images", seed=seed, batch_size=4, **BRIEF)


def on_languages(seed: int) -> heloco.Result:
    return heloco.simulate(seed=seed, assign="flexible", keep_state=True, **BRIEF, **TINY_GPT)


@pytest.mark.parametrize("run", [on_images, on_languages])
def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(run):
    first = run(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)  # whatever the global generator holds
        repeat = run(1)
    other = run(2)
    assert first.tape == repeat.tape
    assert first.evals == repeat.evals
    assert same(first.model, repeat.model)
    assert first.tape != other.tape
    assert not same(first.model, other.model)


def test_the_adaptive_method_at_its_neutral_values_is_heloco_ramp_to_the_bit(images):
    settings = {
        "recipe": "plain",
        "paces": (1, 2, 5),
        "arrivals": 12,
        "inner_steps": 2,
        "batch_size": 4,
        "outer_lr": 0.7,
        "eval_every": 4,
    }
    neutral = heloco.simulate(images, method="heloco-adaptive", weight_correlation=0.0, **settings)
    ramp = heloco.simulate(images, method="heloco-ramp", **settings)
    assert neutral.evals == ramp.evals and neutral.tape == ramp.tape
    assert all(map(torch.equal, neutral.model.parameters(), ramp.model.parameters()))
    other = heloco.simulate(images, method="heloco-adaptive", **settings)
    assert other.evals != ramp.evals


def test_a_simulation_leaves_the_global_generators_as_they_were():
    ours, numpys = torch.get_rng_state(), np.random.get_state()[1].copy()
    heloco.simulate(regression(), paces=(1, 2, 6), arrivals=4, inner_steps=2, device="cpu")
    assert torch.equal(torch.get_rng_state(), ours)
    assert (np.random.get_state()[1] == numpys).all()


# ---- what it hands back


def test_the_result_is_the_outer_model_with_its_buffers(images):
    result = heloco.simulate(images, batch_size=4, **BRIEF)
    assert images.evaluate(result.model) == result.evals[-1].scores
    assert dict(result.model.named_buffers())["1.num_batches_tracked"] > 0


def test_the_users_own_task_and_model():
    task = regression()
    result = heloco.simulate(task, paces=(1, 1, 6), arrivals=60, inner_steps=10, lr=0.01, device="cpu")
    assert isinstance(result.model, nn.Sequential)
    assert list(result.evals[0].scores) == ["a", "b", "c"]
    assert result.loss < 0.8 * result.evals[0].mean["loss"]


def test_a_task_without_validation_has_no_loss_to_tell():
    task = DatasetTask(nn.Linear(1, 1), lambda m, batch: m(batch).mean(), {"only": [torch.ones(1)] * 4})
    assert heloco.simulate(task, paces=[1], arrivals=2, inner_steps=1, device="cpu").loss is None


def test_a_run_whose_contributions_are_all_refused_stops_and_says_so():
    class Hopeless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight * x).sqrt()  # of −1

    task = DatasetTask(Hopeless(), lambda m, batch: m(batch).mean(), {"only": [-torch.ones(1)] * 4})
    with pytest.raises(RunStopped) as stopped:
        heloco.simulate(task, paces=[1], arrivals=20, inner_steps=1, max_refusals=3, device="cpu")
    assert str(stopped.value) == (
        "3 contributions in a row were refused, the last (worker 0) because "
        "the pseudo-gradient has no finite norm. "
        "The training diverges: lower lr or outer_lr, or clip with clip."
    )


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"inner_step": 3}, "There is no setting 'inner_step'; did you mean 'inner_steps'?"),
        ({"method": "diloco"}, "There is no method 'diloco' here; did you mean 'heloco'?"),
        ({"method": "mla", "k_s": 1.0}, "mla has no knob 'k_s'; known: lr, momentum, lookahead."),
        ({"task": "image"}, "There is no task 'image' here; did you mean 'images'?"),
        ({"paces": [1, 2, 3, 4], "task": regression(), "assign": "fixed"},
         '4 workers but only 3 shards: give as many shards as workers, fewer paces, or assign="flexible".'),
    ],
    ids=lambda value: "" if isinstance(value, str) else "+".join(value),
)  # fmt: skip
def test_a_wrong_setting_is_answered_with_a_sentence(settings: dict[str, Any], sentence):
    with pytest.raises(UserError) as error:
        heloco.simulate(**settings)
    assert str(error.value).startswith(sentence)


# ---- import


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a new process has after running the code."""
    report = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    process = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True)
    return set(process.stdout.split())


HEAVY = {"ray", "fastapi", "datasets", "transformers", "matplotlib", "tokenizers", "rich", "pandas", "tiktoken", "pyarrow"}


def test_importing_heloco_pulls_in_torch_and_nothing_heavier():
    loaded = loaded_by("import heloco; heloco.HeLoCo; heloco.simulate")
    assert {"torch", "heloco"} <= loaded
    assert not loaded & HEAVY


def test_importing_the_name_alone_does_not_even_need_torch():
    assert not loaded_by("import heloco; heloco.__version__; heloco.UserError") & {"torch", "numpy", *HEAVY}


def test_every_public_name_is_there():
    for name in heloco.__all__:
        assert getattr(heloco, name) is not None
    assert set(heloco.__all__) == set(dir(heloco))
    with pytest.raises(AttributeError, match="module 'heloco' has no attribute 'HeLoco'"):
        heloco.HeLoco  # noqa: B018
