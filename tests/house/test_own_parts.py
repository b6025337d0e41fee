"""What a rule sees of an arrival, functions and classes in the place of names, and inner optimizers from outside."""
# ruff: noqa: ARG005

import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

import heloco as package
from heloco.engine.fleet import PlannedRun, make_member
from heloco.errors import UserError
from heloco.methods import METHODS
from heloco.policy import ArrivalCounts
from heloco.run import RunConfig, resolve, with_fields
from support.extensions import Block, Fading, sign_step, simulated
from support.inner_rounds import mlp, task_of
from support.runs import TINY, heloco, outcome

pytestmark = pytest.mark.usefixtures("nothing_stays_registered")


# ---- what a rule knows of the arrival


def stale_step(theta: Tensor, m: Tensor, delta: Tensor, rho: float, counts: ArrivalCounts, *, lr: float = 0.1) -> Block:
    """A step that is shorter the staler the contribution is."""
    return theta - lr * rho / (1 + counts.staleness) * delta, m


def test_a_rule_can_see_the_staleness_of_an_arrival():
    seen: list[ArrivalCounts] = []

    def looking(theta: Tensor, m: Tensor, delta: Tensor, rho: float, counts: ArrivalCounts, *, lr: float = 0.1) -> Block:
        seen.append(counts)
        return stale_step(theta, m, delta, rho, counts, lr=lr)

    result = simulated(method=looking)
    counts = seen[:: len(result.tape[0].blocks.case)]  # it is called for each block
    assert [each.staleness for each in counts] == [line.staleness for line in result.tape]
    assert [each.arrivals for each in counts] == [1, 2, 3, 4, 5, 6] and max(each.staleness for each in counts) > 0
    for line in result.tape:
        for moved, norm in zip(line.blocks.movement, line.blocks.pseudo_gradient_norm, strict=True):
            assert moved == pytest.approx(0.1 * line.weight / (1 + line.staleness) * norm, rel=1e-3)
    assert METHODS["looking"].knobs() == {"lr": 0.1}


# ---- functions and classes in the place of names


def test_simulate_takes_functions_and_classes_where_it_takes_names():
    package.register_method("sign", sign_step)
    package.register_weight("fading", Fading)
    by_name = simulated(method="sign", weight="fading", weight_power=2.0, outer_lr=0.004)
    by_value = simulated(method=sign_step, weight=Fading, weight_power=2.0, outer_lr=0.004)
    assert by_value.tape == by_name.tape
    assert (by_value.config.outer.method, by_value.config.outer.weight) == ("sign_step", "Fading")
    assert {line.weight for line in simulated(weight=lambda counts: 0.5 / counts.workers).tape} == {0.5 / 3}
    assert {line.weight for line in simulated(weight=Fading(power=0.0)).tape} == {1.0}
    assert {line.shard for line in simulated(assign=lambda worker, round_index, shards: 1).tape} == {1}
    assert simulated(method=METHODS["mla"]).tape == simulated(method="mla").tape
    method = package.Method(name="ahead", rule=sign_step, options={"lookahead": True})
    assert simulated(method=method).config.outer.knobs["lookahead"] is True


def test_what_simulate_cannot_use_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="The rule wrong must take θ, m, Δ and ρ"):

        def wrong(theta: Tensor) -> Tensor:
            return theta

        simulated(method=wrong)
    with pytest.raises(UserError, match="method cannot be 7"):
        simulated(method=7)


# ---- inner optimizers


def test_an_inner_optimizer_of_ones_own_does_the_inner_steps():
    def plain_sgd(model: torch.nn.Module, options: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=options.weight_decay)

    settings = {"lr": 0.01, "keep_state": True, "paces": [1, 1, 2]}
    ours, theirs = simulated(inner_optimizer=plain_sgd, **settings), simulated(inner_optimizer="sgd", **settings)
    assert [line.loss for line in ours.tape] == pytest.approx([line.loss for line in theirs.tape], rel=1e-5)
    package.register_inner_optimizer("radam", torch.optim.RAdam)
    assert simulated(inner_optimizer="radam", lr=0.001).config.inner.inner_optimizer == "radam"
    assert "radam" in heloco("train", "--help").out


def test_the_best_recipe_works_with_it():
    package.register_inner_optimizer("radam", torch.optim.RAdam)
    result = simulated(inner_optimizer="radam", lr=0.001, recipe="best")
    assert result.config.inner.keep_state and not result.config.inner.second_moment


def test_what_an_inner_optimizer_must_not_do_is_said():
    with pytest.raises(UserError, match="There is no default learning rate for the inner optimizer RAdam: give lr"):
        simulated(inner_optimizer=torch.optim.RAdam, lr=0)
    with pytest.raises(UserError, match="gave None: it must give a torch"):
        simulated(inner_optimizer=lambda model, options: None, lr=0.01)
    with pytest.raises(UserError, match="leaves out the parameter"):
        simulated(inner_optimizer=lambda model, options: torch.optim.SGD(list(model.parameters())[:1], lr=options.lr), lr=0.01)
    with pytest.raises(UserError, match="inner_optimizer is RAdam, and a stack has only those that are built in"):
        simulated(inner_optimizer=torch.optim.RAdam, lr=0.001, execution="stacked")


def test_a_study_says_that_it_cannot_have_one():
    package.register_inner_optimizer("radam", torch.optim.RAdam)
    config = resolve(with_fields(RunConfig(), {"inner_optimizer": "radam", "lr": 0.001, "paces": [1.0, 1.0]}))
    with pytest.raises(UserError, match=r"A study computes many runs as one stack .* cannot have the inner optimizer radam"):
        make_member(0, PlannedRun("one", task_of(mlp()), config))


def test_a_run_goes_on_with_the_state_of_its_own_optimizer(tmp_path):
    """As a run in a folder does: stopped half-way and resumed, it is the unbroken one to the bit."""
    package.register_inner_optimizer("radam", torch.optim.RAdam)
    flags = (*TINY, "--inner-optimizer", "radam", "--keep-state", "--checkpoint-every", "1", "--paces", "1,1,2")
    for name in ("whole", "half"):
        assert heloco("train", *flags, "--out", tmp_path / name).code == 0
    for last in sorted((tmp_path / "half" / "checkpoints").iterdir())[-1:]:
        shutil.rmtree(last)
    assert heloco("resume", tmp_path / "half").code == 0
    assert outcome(tmp_path / "half") == outcome(tmp_path / "whole")
