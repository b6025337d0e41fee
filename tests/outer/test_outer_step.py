"""How a step takes its pseudo-gradients: missing ones, a closure's, those handed over, and blocks that move in memory."""

import subprocess
import sys

import pytest
import torch

from heloco.outer import HeLoCo
from support.equations import F64, assert_same, feed, grouped, momenta, run
from support.outer_rules import RULES, arrivals, every_rule, parameters


@every_rule
def test_parameters_without_a_pseudo_gradient_are_left_alone(rule: str) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = RULES[rule](ours)
    deltas = arrivals(ours, 3)
    for delta in deltas:
        feed(ours, delta)
        ours[0].grad = ours[6].grad = None
        optimizer.step()
    expected = run(RULES[rule](theirs[1:6]), theirs[1:6], [d[1:6] for d in deltas])
    assert_same([p.detach() for p in ours[1:6]], expected)
    assert_same([ours[0].detach(), ours[6].detach()], [theirs[0].detach(), theirs[6].detach()])
    assert not optimizer.state.get(ours[0])
    assert len(optimizer.outcomes) == len(optimizer.movements) == 6
    assert_same(optimizer.lookahead()[:1], [theirs[0].detach()])


@every_rule
def test_a_step_without_any_pseudo_gradient_does_nothing(rule: str) -> None:
    params = parameters()
    optimizer = RULES[rule](params)
    optimizer.step()
    assert_same([p.detach() for p in params], [p.detach() for p in parameters()])
    assert optimizer.outcomes == optimizer.movements == []


@every_rule
def test_the_closure_is_called_with_gradients_on_and_its_loss_returned(rule: str) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = RULES[rule](ours)

    def closure() -> float:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in ours)
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == float(sum((p.detach() ** 2).sum() for p in theirs))
    assert_same([p.detach() for p in ours], run(RULES[rule](theirs), theirs, [[2 * p.detach() for p in theirs]]))


def test_step_returns_nothing_without_a_closure_and_leaves_the_pseudo_gradient() -> None:
    params = parameters()
    [deltas] = arrivals(params, 1)
    feed(params, deltas)
    assert HeLoCo(params).step(weight=0.3) is None
    assert_same([p.grad for p in params if p.grad is not None], deltas)


@every_rule
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_pseudo_gradients_can_be_handed_over_instead(rule: str, dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    optimizer, reference = RULES[rule](grouped(ours, [{}, {"lr": 0.1}])), RULES[rule](grouped(theirs, [{}, {"lr": 0.1}]))
    order, calls = [p for group in optimizer.param_groups for p in group["params"]], []
    optimizer.register_step_post_hook(lambda *_: calls.append(len(calls)))
    gradient = torch.ones_like(ours[0])
    ours[0].grad = gradient.clone()
    for deltas in arrivals(ours, 4):
        before = dict(zip(ours, deltas, strict=True))
        copies = [delta.clone() for delta in deltas]
        optimizer.step(weight=0.6, pseudo_gradients=[before[p] for p in order])
        assert_same(deltas, copies)
        assert_same([p.detach() for p in ours], run(reference, theirs, [deltas], weight=0.6))
        assert_same(momenta(optimizer, ours), momenta(reference, theirs))
        assert (optimizer.outcomes, optimizer.movements) == (reference.outcomes, reference.movements)
    assert calls == [0, 1, 2, 3]  # what torch hangs on to a step goes on
    assert ours[0].grad is not None and all(p.grad is None for p in ours[1:])
    assert_same([ours[0].grad], [gradient])


@every_rule
def test_pseudo_gradients_are_brought_to_the_precision_of_the_parameters(rule: str) -> None:
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    optimizer, reference = RULES[rule](ours), RULES[rule](theirs)
    for deltas in arrivals(parameters(), 3):
        mixed = [delta.bfloat16() if i % 2 else delta for i, delta in enumerate(deltas)]
        optimizer.step(pseudo_gradients=mixed)
        assert_same([p.detach() for p in ours], run(reference, theirs, [[delta.float() for delta in mixed]]))


@every_rule
def test_pseudo_gradients_of_other_shapes_are_refused_and_change_nothing(rule: str) -> None:
    params = parameters()
    optimizer = RULES[rule](params)
    [deltas] = arrivals(params, 1)
    for wrong in (deltas[:-1], [*deltas, deltas[0]], [deltas[0].t(), *deltas[1:]], [deltas[0].reshape(-1), *deltas[1:]]):
        with pytest.raises(ValueError, match="of the parameters' shapes"):
            optimizer.step(pseudo_gradients=wrong)
    assert_same([p.detach() for p in params], [p.detach() for p in parameters()])
    assert not optimizer.state


@every_rule
def test_a_parameter_that_lies_otherwise_from_one_step_to_the_next_is_followed(rule: str) -> None:
    """The same tensor over other memory, and over the same memory in another order."""
    square = torch.arange(9, dtype=torch.float32).reshape(3, 3)
    ours, theirs = ([torch.nn.Parameter(square.clone()), torch.nn.Parameter(torch.ones(4))] for _ in range(2))
    left, right = RULES[rule](ours), RULES[rule](theirs, **{"fused": False} if rule == "nesterov" else {})
    for t, deltas in enumerate(arrivals(ours, 4)):
        run(left, ours, [deltas], weight=0.5)
        run(right, theirs, [deltas], weight=0.5)
        torch.testing.assert_close(ours[0].detach(), theirs[0].detach(), rtol=1e-5, atol=1e-5)
        if t == 0:
            ours[0].data = ours[0].data.clone()
        else:
            for p in (ours[0], theirs[0]):
                p.data = p.data.t() if p is ours[0] else p.data.t().contiguous()


def test_an_outer_optimizer_does_not_bring_torchs_compiler_in():
    """It would take 150 MB and a second in every synchronizer."""
    script = """
import sys
import torch
from heloco.methods import METHODS
parameters = [torch.nn.Parameter(torch.ones(3))]
for method in METHODS.values():
    outer = method.build(parameters, workers=2)
    outer.step(weight=0.5, pseudo_gradients=[torch.ones(3)])
print("torch._dynamo" in sys.modules)
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "False"
