"""The inner loop against plain torch loops, to the bit where torch allows it."""

import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from heloco.errors import UserError
from heloco.inner import InnerOptions, SequentialInner
from support.inner_rounds import OPTIONS, Plain, mlp, round_for, seeded, task_of, with_norm
from support.runs import TINY
from support.synchronizers import same

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- AdamW


def test_a_fresh_adamw_each_round_equals_the_plain_loop_to_the_bit():
    task = task_of(mlp())
    inner = SequentialInner(task, OPTIONS, seed=0)
    for index in range(3):
        worker_round = round_for(task, OPTIONS, index=index, shard=1, shard_steps=5 * index)
        [ours] = inner.run([worker_round])
        deltas, losses = Plain(task, OPTIONS).run(worker_round, range(15 * index, 15 * index + 15), base=5 * index)
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
        worker_round = round_for(task, options, index=index, shard_steps=5 * index, memory=memory)
        [ours] = inner.run([worker_round])
        deltas, _ = plain.run(worker_round, range(15 * index, 15 * index + 15), base=5 * index)
        assert same(ours.pseudo_gradient, deltas)
        [forgetful] = fresh.run([replace(worker_round, memory=None)])
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
    worker_round = round_for(task, options, index=1, memory=first.memory)
    copies = [t.clone() for t in (*worker_round.parameters, *worker_round.buffers, *first.memory.values(), *first.buffers)]
    inner.run([worker_round])
    assert same([*worker_round.parameters, *worker_round.buffers, *first.memory.values(), *first.buffers], copies)


def test_the_other_settings_of_adamw_reach_it():
    options = InnerOptions(
        batch_size=3, lr=0.05, lr_min=0.001, schedule_steps=12, beta1=0.5, beta2=0.7, weight_decay=0.3, adam_eps=1e-3
    )
    task = task_of(mlp())
    worker_round = round_for(task, options)
    [ours] = SequentialInner(task, options, seed=0).run([worker_round])
    assert same(ours.pseudo_gradient, Plain(task, options).run(worker_round, range(15), 0)[0])
    assert not same(ours.pseudo_gradient, SequentialInner(task, OPTIONS, seed=0).run([worker_round])[0].pseudo_gradient)


# ---- options of a step


def test_clipping_equals_the_plain_loop_and_makes_a_difference():
    options = InnerOptions(batch_size=3, lr=0.05, lr_min=0.001, schedule_steps=12, clip=0.05)
    task = task_of(mlp())
    worker_round = round_for(task, options)
    [ours] = SequentialInner(task, options, seed=0).run([worker_round])
    assert same(ours.pseudo_gradient, Plain(task, options).run(worker_round, range(15), 0)[0])
    assert not same(ours.pseudo_gradient, SequentialInner(task, OPTIONS, seed=0).run([worker_round])[0].pseudo_gradient)


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
    worker_round = round_for(task, OPTIONS, steps=1)
    bf16 = InnerOptions(batch_size=3, lr=0.05, lr_min=0.001, schedule_steps=12, precision="bf16")
    [half], [full] = (SequentialInner(task, o, seed=0).run([worker_round]) for o in (bf16, OPTIONS))
    assert all(d.dtype == torch.float32 and d.isfinite().all() for d in half.pseudo_gradient)
    assert half.loss != full.loss
    assert half.loss == pytest.approx(full.loss, rel=2**-6)  # three roundings to 8 bits, squared


def compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


@pytest.mark.filterwarnings("ignore:.*script_method.*:DeprecationWarning")  # torch's own
@pytest.mark.skipif(compiler() is None, reason="torch.compile needs a C++ compiler, and there is none")
def test_a_compiled_model_runs_and_agrees():
    task = task_of(seeded(lambda: nn.Linear(4, 2)))
    worker_round = round_for(task, OPTIONS, steps=2)
    compiled = InnerOptions(batch_size=3, lr=0.05, lr_min=0.001, schedule_steps=12, compile=True)
    inner = SequentialInner(task, compiled, seed=0)
    [ours], [theirs] = inner.run([worker_round]), SequentialInner(task, OPTIONS, seed=0).run([worker_round])
    assert inner.is_compiled
    for a, b in zip(ours.pseudo_gradient, theirs.pseudo_gradient, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)


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
