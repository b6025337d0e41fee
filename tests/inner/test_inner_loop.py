"""The inner loop against plain torch loops, to the bit where torch allows it."""

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heloco.engine.simulation import Simulation
from heloco.errors import UserError
from heloco.inner import InnerOptions, SequentialInner, learning_rate
from heloco.ledger import Ledger
from heloco.policy import make_choice, make_weight
from heloco.synchronizer import Contribution, Round, Synchronizer
from heloco.task import Task
from heloco.task.datasets import DatasetTask
from support.runs import TINY

pytestmark = pytest.mark.usefixtures("one_thread")


def seeded(make: Any, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def task_of(model: nn.Module, dtype: torch.dtype = torch.float32, samples: int = 64) -> DatasetTask:
    """Two shards of a regression from 4 numbers to 2."""
    draw = torch.Generator().manual_seed(3)
    shards = {}
    for name in ("a", "b"):
        x = torch.randn(samples, 4, generator=draw, dtype=dtype)
        y = torch.randn(samples, 2, generator=draw, dtype=dtype)
        shards[name] = list(zip(x, y, strict=True))
    return DatasetTask(model.to(dtype), lambda m, batch: F.mse_loss(m(batch[0]), batch[1]), shards)


def mlp() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))


def with_dropout() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)))


def with_norm() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))


def round_for(
    task: Task,
    options: InnerOptions,
    *,
    worker: int = 0,
    index: int = 0,
    shard: int = 0,
    steps: int = 5,
    spans: Sequence[tuple[int, int]] | None = None,
    shard_steps: int = 0,
    run_steps: float = 0.0,
    memory: dict[str, Tensor] | None = None,
) -> Round:
    model = task.build_model()
    spans = ((shard_steps * options.windows_per_step, steps * options.windows_per_step),) if spans is None else tuple(spans)
    parameters = [p.detach().clone() + 0.01 * index for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    return Round(worker, index, 0, shard, tuple(spans), steps, shard_steps, run_steps, parameters, buffers, memory)


def cosine(options: InnerOptions, position: float) -> float:
    """The cosine without warm-up, once more."""
    fraction = min(1.0, position / options.schedule_steps)
    return options.lr_min + (options.lr - options.lr_min) * 0.5 * (1 + math.cos(math.pi * fraction))


class Plain:
    """The inner loop in plain torch, with one AdamW for all its rounds."""

    def __init__(self, task: Task, options: InnerOptions) -> None:
        self.task, self.options = task, options
        self.model = task.build_model()
        self.adam = torch.optim.AdamW(
            self.model.parameters(),
            betas=(options.beta1, options.beta2),
            eps=options.adam_eps,
            weight_decay=options.weight_decay,
            fused=True,
        )

    def run(self, handed: Round, positions: Sequence[int], base: float) -> tuple[list[Tensor], list[float]]:
        """(Δ, the losses); `base` is where the round stands on the cosine."""
        with torch.no_grad():
            for p, start in zip(self.model.parameters(), handed.parameters, strict=True):
                p.copy_(start)
        losses = []
        for h, batch in enumerate(np.array(positions).reshape(handed.inner_steps, self.options.batch_size)):
            self.adam.param_groups[0]["lr"] = cosine(self.options, base + h)
            self.adam.zero_grad()
            loss = self.task.loss(self.model, self.task.batch(handed.shard, batch))
            loss.backward()
            if self.options.clip:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
            self.adam.step()
            losses.append(loss.item())
        return [start - p.detach() for start, p in zip(handed.parameters, self.model.parameters(), strict=True)], losses


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def identical(a: Contribution, b: Contribution) -> bool:
    tensors = same(a.pseudo_gradient, b.pseudo_gradient) and same(a.buffers, b.buffers)
    numbers = (a.loss, a.last_loss, a.samples, a.units) == (b.loss, b.last_loss, b.samples, b.units)
    memories = (a.memory or {}).keys() == (b.memory or {}).keys()
    return (
        tensors and numbers and memories and all(torch.equal(t, (b.memory or {})[name]) for name, t in (a.memory or {}).items())
    )


OPTIONS = InnerOptions(batch_size=3, lr=0.05, lr_min=0.001, schedule_steps=12)


# ---- AdamW


def test_a_fresh_adamw_each_round_equals_the_plain_loop_to_the_bit():
    task = task_of(mlp())
    inner = SequentialInner(task, OPTIONS, seed=0)
    for index in range(3):
        handed = round_for(task, OPTIONS, index=index, shard=1, shard_steps=5 * index)
        [ours] = inner.run([handed])
        deltas, losses = Plain(task, OPTIONS).run(handed, range(15 * index, 15 * index + 15), base=5 * index)
        assert same(ours.pseudo_gradient, deltas)
        assert (ours.worker, ours.index, ours.version, ours.memory) == (0, index, 0, None)
        assert ours.loss == pytest.approx(sum(losses) / 5, rel=1e-7)
        assert (ours.last_loss, ours.samples, ours.units) == (losses[-1], 15, 15)


def test_an_adamw_that_is_kept_equals_one_plain_optimizer_over_all_rounds_to_the_bit():
    options = InnerOptions(batch_size=3, lr=0.05, lr_min=0.001, schedule_steps=12, keep_state=True)
    task = task_of(mlp())
    inner, fresh = SequentialInner(task, options, seed=0), SequentialInner(task, OPTIONS, seed=0)
    plain, memory = Plain(task, options), None
    for index in range(3):
        handed = round_for(task, options, index=index, shard_steps=5 * index, memory=memory)
        [ours] = inner.run([handed])
        deltas, _ = plain.run(handed, range(15 * index, 15 * index + 15), base=5 * index)
        assert same(ours.pseudo_gradient, deltas)
        [forgetful] = fresh.run([replace(handed, memory=None)])
        assert same(ours.pseudo_gradient, forgetful.pseudo_gradient) == (index == 0)
        memory = ours.memory
    assert memory is not None
    assert {name.split(".")[1] for name in memory} == {"step", "exp_avg", "exp_avg_sq"}
    assert float(memory["0.step"]) == 15


def test_muon_trains_where_everything_that_adamw_would_move_is_frozen():
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2)))
    model[1].requires_grad_(False)
    options = InnerOptions(batch_size=3, lr=0.05, schedule_steps=12, inner_optimizer="muon")
    task = task_of(model)
    [ours] = SequentialInner(task, options, seed=0).run([round_for(task, options)])
    assert [bool(delta.any()) for delta in ours.pseudo_gradient] == [True, False, False]


def test_a_run_does_not_load_torchs_compiler(tmp_path):
    """It takes as long to import as the rest of torch, and each worker that starts would wait for it."""
    script = f"""if True:
        import sys
        from heloco.cli.main import run
        code = run({["train", *TINY]})
        sys.exit(code or "torch._dynamo" in sys.modules)
    """
    process = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_a_round_does_not_write_to_what_it_was_handed():
    options = InnerOptions(batch_size=3, lr=0.05, schedule_steps=12, keep_state=True)
    task = task_of(with_norm())
    inner = SequentialInner(task, options, seed=0)
    [first] = inner.run([round_for(task, options)])
    handed = round_for(task, options, index=1, memory=first.memory)
    copies = [t.clone() for t in (*handed.parameters, *handed.buffers, *first.memory.values(), *first.buffers)]
    inner.run([handed])
    assert same([*handed.parameters, *handed.buffers, *first.memory.values(), *first.buffers], copies)


def test_the_other_settings_of_adamw_reach_it():
    options = InnerOptions(
        batch_size=3, lr=0.05, lr_min=0.001, schedule_steps=12, beta1=0.5, beta2=0.7, weight_decay=0.3, adam_eps=1e-3
    )
    task = task_of(mlp())
    handed = round_for(task, options)
    [ours] = SequentialInner(task, options, seed=0).run([handed])
    assert same(ours.pseudo_gradient, Plain(task, options).run(handed, range(15), 0)[0])
    assert not same(ours.pseudo_gradient, SequentialInner(task, OPTIONS, seed=0).run([handed])[0].pseudo_gradient)


# ---- the cosine


@pytest.mark.parametrize(
    ("position", "expected"),
    [
        (0, 1.0),
        (25, 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2),
        (50, 0.55),
        (75, 0.1 + 0.9 * (1 - math.sqrt(0.5)) / 2),
        (100, 0.1),
        (101, 0.1),
        (10**9, 0.1),
        (12.5, 0.1 + 0.9 * (1 + math.cos(math.pi / 8)) / 2),
    ],
)
def test_the_cosine_falls_from_lr_to_lr_min_and_stays(position, expected):
    assert learning_rate(InnerOptions(lr=1.0, lr_min=0.1, schedule_steps=100), position) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("position", "expected"), [(0, 0.1), (4, 0.5), (9, 1.0), (10, 1.0), (55, 0.55), (100, 0.1), (500, 0.1)])
def test_a_warm_up_rises_linearly_before_the_cosine(position, expected):
    options = InnerOptions(lr=1.0, lr_min=0.1, schedule_steps=100, warmup=10)
    assert learning_rate(options, position) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("position", "base"), [("shard", 7), ("run", 2.5)])
def test_a_round_stands_on_the_cosine_by_its_shard_or_by_the_run(position, base):
    options = InnerOptions(batch_size=3, lr=0.05, lr_min=0.001, schedule_steps=12, lr_position=position)
    task = task_of(mlp())
    handed = round_for(task, options, shard_steps=7, run_steps=2.5)
    [ours] = SequentialInner(task, options, seed=0).run([handed])
    assert same(ours.pseudo_gradient, Plain(task, options).run(handed, range(21, 36), base)[0])


def positions_of_rounds(paces: Sequence[float], *, barrier: bool = False) -> list[tuple[int, float]]:
    """(steps done on the shard, progress of the run) of every round of a simulation."""
    workers = len(paces)
    synchronizer = Synchronizer(
        None,
        inner_steps=[7] * workers,
        windows_per_step=2,
        ledger=Ledger([1000] * workers),
        choose_shard=make_choice("fixed", workers=workers, shards=workers, seed=0),
        weight=make_weight("average"),
        barrier=barrier,
    )
    simulation, positions = Simulation(synchronizer, paces_s=paces, arrivals=30), []
    while not simulation.finished:
        if simulation.advance() is None and not simulation.finished:
            handed = simulation.next_needed()
            positions.append((handed.shard_steps, handed.run_steps))
            simulation.give(Contribution(handed.worker, handed.index, handed.version))
    return positions


def test_for_equal_workers_and_behind_a_barrier_the_two_positions_coincide():
    for positions in (positions_of_rounds([1] * 5), positions_of_rounds([1, 1, 2, 6, 6], barrier=True)):
        assert [by_shard for by_shard, _ in positions] == [by_run for _, by_run in positions] == [7 * (i // 5) for i in range(30)]


def test_for_unequal_workers_the_fast_ones_shard_runs_ahead_of_the_run():
    positions = positions_of_rounds([1, 6, 6, 6, 6])
    assert max(by_shard for by_shard, _ in positions) == 119
    assert max(by_run for _, by_run in positions) < 7 * 30 / 5 == 42


# ---- options of a step


def test_clipping_equals_the_plain_loop_and_makes_a_difference():
    options = InnerOptions(batch_size=3, lr=0.05, lr_min=0.001, schedule_steps=12, clip=0.05)
    task = task_of(mlp())
    handed = round_for(task, options)
    [ours] = SequentialInner(task, options, seed=0).run([handed])
    assert same(ours.pseudo_gradient, Plain(task, options).run(handed, range(15), 0)[0])
    assert not same(ours.pseudo_gradient, SequentialInner(task, OPTIONS, seed=0).run([handed])[0].pseudo_gradient)


def test_accumulated_micro_batches_equal_the_large_batch():
    task = task_of(seeded(lambda: nn.Linear(4, 2)), torch.float64)
    large = InnerOptions(batch_size=8, lr=0.05, lr_min=0.001, schedule_steps=12)
    small = InnerOptions(batch_size=2, accumulate=4, lr=0.05, lr_min=0.001, schedule_steps=12)
    ours, theirs = (SequentialInner(task, o, seed=0).run([round_for(task, o)])[0] for o in (small, large))
    assert small.windows_per_step == large.windows_per_step == 8
    for a, b in zip(ours.pseudo_gradient, theirs.pseudo_gradient, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
    assert (ours.samples, ours.units) == (theirs.samples, theirs.units) == (40, 40)


def test_bf16_runs_under_autocast_close_to_fp32_and_hands_back_fp32():
    task = task_of(mlp())
    handed = round_for(task, OPTIONS, steps=1)
    bf16 = InnerOptions(batch_size=3, lr=0.05, lr_min=0.001, schedule_steps=12, precision="bf16")
    [half], [full] = (SequentialInner(task, o, seed=0).run([handed]) for o in (bf16, OPTIONS))
    assert all(d.dtype == torch.float32 and d.isfinite().all() for d in half.pseudo_gradient)
    assert half.loss != full.loss
    assert half.loss == pytest.approx(full.loss, rel=2**-6)  # three roundings to 8 bits, squared


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch's own
@pytest.mark.skipif(compiler() is None, reason="torch.compile needs a C++ compiler, and there is none")
def test_a_compiled_model_runs_and_agrees():
    task = task_of(seeded(lambda: nn.Linear(4, 2)))
    handed = round_for(task, OPTIONS, steps=2)
    compiled = InnerOptions(batch_size=3, lr=0.05, lr_min=0.001, schedule_steps=12, compile=True)
    inner = SequentialInner(task, compiled, seed=0)
    [ours], [theirs] = inner.run([handed]), SequentialInner(task, OPTIONS, seed=0).run([handed])
    assert type(inner.compiled_model) is not type(inner.model)
    for a, b in zip(ours.pseudo_gradient, theirs.pseudo_gradient, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)


# ---- buffers


def test_batch_norms_buffers_go_both_ways():
    task = task_of(with_norm())
    inner = SequentialInner(task, OPTIONS, seed=0)
    handed = round_for(task, OPTIONS, steps=1)
    handed.buffers = [torch.full((8,), 5.0), torch.full((8,), 3.0), torch.tensor(41)]
    [ours] = inner.run([handed])
    with torch.no_grad():
        features = F.linear(task.batch(0, np.arange(3))[0], *handed.parameters[:2])
        mean, variance = features.mean(0), features.var(0)
    torch.testing.assert_close(ours.buffers[0], 0.9 * torch.full((8,), 5.0) + 0.1 * mean)
    torch.testing.assert_close(ours.buffers[1], 0.9 * torch.full((8,), 3.0) + 0.1 * variance)
    assert ours.buffers[2] == 42
    assert handed.buffers[0].eq(5).all()
    copies = [b.clone() for b in ours.buffers]
    inner.run([round_for(task, OPTIONS, index=1)])
    assert same(ours.buffers, copies)  # a contribution is the worker's own, whatever runs next


def test_a_model_that_was_left_in_evaluation_mode_trains_all_the_same():
    task = task_of(with_dropout())
    inner, other = SequentialInner(task, OPTIONS, seed=0), SequentialInner(task, OPTIONS, seed=0)
    other.model.eval()
    handed = round_for(task, OPTIONS)
    assert identical(inner.run([handed])[0], other.run([handed])[0])


# ---- randomness


@pytest.mark.parametrize("make", [mlp, with_dropout, with_norm])
def test_a_round_run_twice_gives_the_same_contribution_to_the_bit(make):
    task = task_of(make())
    options = InnerOptions(batch_size=3, lr=0.05, lr_min=0.001, schedule_steps=12, keep_state=True)
    inner = SequentialInner(task, options, seed=0)
    handed = round_for(task, options, worker=2, index=4)
    [first] = inner.run([handed])
    _, repeat = inner.run([round_for(task, options, worker=1, shard=1), handed])  # another round in between
    [elsewhere] = SequentialInner(task, options, seed=0).run([handed])
    assert identical(first, repeat)
    assert identical(first, elsewhere)


def test_dropout_depends_on_the_seed_the_worker_and_the_round_and_on_nothing_else():
    task = task_of(with_dropout())

    def deltas(*, seed: int = 0, worker: int = 0, index: int = 0, global_seed: int = 0) -> list[Tensor]:
        handed = round_for(task, OPTIONS)
        handed.worker, handed.index = worker, index
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(global_seed)
            return SequentialInner(task, OPTIONS, seed=seed).run([handed])[0].pseudo_gradient

    base = deltas()
    assert same(base, deltas(global_seed=123))
    assert not same(base, deltas(seed=1))
    assert not same(base, deltas(worker=1))
    assert not same(base, deltas(index=1))


def test_the_global_generator_is_left_as_it_was():
    task = task_of(with_dropout())
    before = torch.get_rng_state()
    SequentialInner(task, OPTIONS, seed=0).run([round_for(task, OPTIONS)])
    assert torch.equal(torch.get_rng_state(), before)


# ---- data


def test_spans_in_several_pieces_are_one_stream_of_positions():
    task = task_of(mlp())
    spans = ((40, 4), (0, 1), (61, 10))  # the last goes on into the second epoch
    handed = round_for(task, OPTIONS, spans=spans)
    [ours] = SequentialInner(task, OPTIONS, seed=0).run([handed])
    positions = [40, 41, 42, 43, 0, 61, 62, 63, 64, 65, 66, 67, 68, 69, 70]
    assert same(ours.pseudo_gradient, Plain(task, OPTIONS).run(handed, positions, 0)[0])
    assert ours.samples == 15


def test_rounds_come_back_in_the_order_they_went():
    task = task_of(mlp())
    rounds = [round_for(task, OPTIONS, worker=w, index=i, shard=w) for w, i in ((1, 0), (0, 2), (1, 1))]
    contributions = SequentialInner(task, OPTIONS, seed=0).run(rounds)
    assert [(c.worker, c.index) for c in contributions] == [(1, 0), (0, 2), (1, 1)]
    alone = [SequentialInner(task, OPTIONS, seed=0).run([handed])[0] for handed in rounds]
    assert all(identical(a, b) for a, b in zip(contributions, alone, strict=True))


class Stop(Exception):
    pass


def test_what_before_step_raises_ends_the_round_and_leaves_no_trace():
    task = task_of(with_dropout())
    options = InnerOptions(batch_size=3, lr=0.05, lr_min=0.001, schedule_steps=12, keep_state=True)
    handed = round_for(task, options)
    [undisturbed] = SequentialInner(task, options, seed=0).run([handed])
    calls = []

    def before_step() -> None:
        calls.append(len(calls))
        if len(calls) == 3:
            raise Stop

    inner = SequentialInner(task, options, seed=0, before_step=before_step)
    generator = torch.get_rng_state()
    with pytest.raises(Stop):
        inner.run([handed])
    assert torch.equal(torch.get_rng_state(), generator)
    assert calls == [0, 1, 2]
    assert identical(inner.run([handed])[0], undisturbed)
    assert len(calls) == 3 + handed.inner_steps


# ---- settings


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"batch_size": 0}, "batch_size is 0: give a number ≥ 1."),
        ({"accumulate": 0}, "accumulate is 0: give a number ≥ 1."),
        ({"lr": -1.0}, "lr is -1.0: give a finite number ≥ 0."),
        ({"lr_min": math.nan}, "lr_min is nan: give a finite number ≥ 0."),
        ({"clip": math.inf}, "clip is inf: give a finite number ≥ 0."),
        ({"beta1": 1.0}, "beta1 is 1.0: it must lie in [0, 1)."),
        ({"lr_position": "worker"}, "lr_position is 'worker': choose shard or run."),
        ({"precision": "fp16"}, "precision is 'fp16': choose fp32 or bf16."),
    ],
)
def test_settings_outside_their_range_are_answered_with_a_sentence(settings, sentence):
    with pytest.raises(UserError) as error:
        InnerOptions(**settings)
    assert str(error.value) == sentence


def test_the_defaults_are_the_papers():
    o = InnerOptions()
    assert (o.lr, o.lr_min, o.beta1, o.beta2, o.weight_decay, o.batch_size) == (2e-4, 1e-6, 0.9, 0.999, 0.01, 2)
    assert (o.warmup, o.clip, o.precision, o.keep_state, o.lr_position) == (0, 0.0, "fp32", False, "shard")
