"""Loops of all kinds that join a run: accumulation, several optimizers, odd and frozen models, late rounds, NaN, losses."""

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn

import heloco
from heloco.cluster.protocol.messages import BeatAnswer, Ticket
from heloco.cluster.server.service import Service
from support.local_link import LocalLink
from support.own_loops import (
    DEADLINE_S,
    Heard,
    abandoned,
    adam,
    assert_same,
    batches,
    external_runs,
    loss_of,
    net,
    outer,
    quiet,
    step,
    tape,
    values,
)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    with external_runs(tmp_path) as start:
        yield start


def test_accumulation_and_skipped_steps_count_as_the_optimizer_counts(serve):
    """A GradScaler that finds an overflow does not step: nor does the round."""
    service = serve(inner_steps=3, arrivals=2)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    stepped, skipped, calls = 0, 0, 0
    optimizer.register_step_pre_hook(lambda *_: optimizer_calls.append(1))
    optimizer_calls: list[int] = []
    with heloco.join(LocalLink(service), model, optimizer, tell=quiet) as run:
        for i, batch in enumerate(batches()):
            scaler.scale(loss_of(model, batch)).backward()
            if i % 2 == 0:
                continue
            calls += 1
            if calls % 3 == 0:
                next(model.parameters()).grad.fill_(math.inf)
                skipped += 1
            else:
                stepped += 1
            assert run.round == len(optimizer_calls) // 3
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert (stepped, skipped) == (6, 2) and len(optimizer_calls) == 6 and len(tape(service)) == 2


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_several_optimizers_each_must_have_stepped(serve, order):
    service = serve(inner_steps=2, arrivals=2)
    model = net()
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizers = [torch.optim.SGD(weights, lr=1e-2), torch.optim.Adam(others, lr=1e-2)]
    loops = 0
    with heloco.join(LocalLink(service), model, optimizers, tell=quiet):
        for batch in batches():
            loops += 1
            loss_of(model, batch).backward()
            for i in order:
                optimizers[i].step()
                optimizers[i].zero_grad()
    assert loops == 4 and not any(o._optimizer_step_post_hooks for o in optimizers)


class Odd(nn.Module):
    """Tied parameters, a mask of −∞, a cache, a counter that is replaced and not written to, BatchNorm, bfloat16."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b, self.norm = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3)
        self.b.weight = self.a.weight
        self.low = nn.Linear(3, 1, bias=False, dtype=torch.bfloat16)
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.cache = x.detach()
        self.forwards = self.forwards + 1
        return self.low(self.norm(self.b(self.a(x))).bfloat16()).float()


def test_an_odd_model_travels_whole(serve):
    service = serve(inner_steps=2, arrivals=3)
    model = Odd(0)
    model.norm.eval()
    start = values(model)
    optimizer = adam(model)
    link = Heard(service)
    compiled = torch.compile(model, backend="eager")
    with heloco.join(link, compiled, optimizer, tell=quiet):
        assert not model.norm.training and model.training
        for batch in batches():
            step(compiled, optimizer, batch)
    meta = json.loads((service.state.folder / "run.json").read_text())
    assert [block["name"] for block in meta["blocks"]] == ["a.weight", "norm.weight", "norm.bias", "low.weight"]
    assert meta["buffers"] == ["mask", "forwards", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert_same(link.starts[0, 0, 0], start)
    assert {t.dtype for t in outer(service)} == {torch.float32, torch.bfloat16}
    assert_same(values(model), outer(service))
    assert model.forwards == 6 and torch.equal(model.mask, torch.tensor([0.0, -math.inf])) and model.cache.shape == (8, 3)


def test_a_second_machine_takes_the_first_ones_model_and_buffers(serve):
    service = serve(paces=[1.0, 1.0])
    first, second = Odd(0), Odd(1)
    first.forwards += 7
    with (
        heloco.join(LocalLink(service), first, adam(first), tell=quiet) as one,
        heloco.join(LocalLink(service), second, adam(second), tell=quiet) as other,
    ):
        assert (one.worker, other.worker, one.workers) == (0, 1, 2)
        assert_same(values(first), values(second))
        assert second.forwards == 7


def test_frozen_parameters_stay_at_home_and_must_be_the_same_everywhere(serve):
    service = serve(paces=[1.0, 1.0, 1.0], inner_steps=1)

    def half(seed: int) -> nn.Sequential:
        model = net(seed)
        model[0].requires_grad_(False)
        return model

    first, same, other = half(0), half(0), half(1)
    optimizer = adam(first)
    link = Heard(service)
    with heloco.join(link, first, optimizer, tell=quiet) as run:
        step(first, optimizer, next(batches()))
        assert run.arrivals == 1 and [tuple(t.shape) for t in link.contributions[0, 0, 0]] == [(1, 5), (1,)]
        with heloco.join(LocalLink(service), same, adam(same), tell=quiet):
            assert_same(values(first), values(same))
        with pytest.raises(heloco.UserError, match=r"^The frozen parameter '0.weight' and 1 others here is not that of the run"):
            heloco.join(LocalLink(service), other, adam(other), tell=quiet).__enter__()
        with torch.no_grad():
            same[0].bias[0] += 1
        with pytest.raises(heloco.UserError, match=r"^The frozen parameter '0.bias' here is not that of the run"):
            heloco.join(LocalLink(service), same, adam(same), tell=quiet).__enter__()
        wider = nn.Sequential(*half(0), nn.Identity())
        wider[3].register_parameter("scale", nn.Parameter(torch.ones(2), requires_grad=False))
        listed = (
            r"the list of the 3 frozen parameters here \('0.weight', '0.bias', '3.scale'\) is U8 \[3, 16\] and not U8 \[2, 16\]"
        )
        with pytest.raises(heloco.UserError, match=f"This run trains another model: here, {listed}"):
            heloco.join(LocalLink(service), wider, adam(wider), tell=quiet).__enter__()
        first[0].requires_grad_(True)
        with pytest.raises(heloco.UserError, match=r"'0\.weight' was frozen when the run was joined and is trained"):
            step(first, optimizer, next(batches()))


def test_a_round_that_comes_too_late_is_given_up_for_a_fresh_one(serve):
    class Late(LocalLink):
        late = False

        def beat(self, ticket: Ticket, steps: int) -> BeatAnswer:
            return structs.replace(super().beat(ticket, steps), too_stale=self.late)

    service, messages = serve(inner_steps=1_000_000, beat_s=0.01), []
    link, model = Late(service), net()
    optimizer = adam(model)
    with heloco.join(link, model, optimizer, tell=messages.append) as run:
        start = values(model)
        link.late = True
        until = time.monotonic() + DEADLINE_S
        while run.round == 0 and time.monotonic() < until:
            step(model, optimizer, next(batches()))
        link.late = False
        assert run.round == 1 and len(messages) == 2 and "too late to be used" in messages[1]
        assert_same(values(model), start)
    assert abandoned(service)[0].text == "its contribution would arrive too late to be used"


def test_rounds_that_come_to_nan_are_given_up_and_at_last_the_machine(serve):
    service, messages = serve(inner_steps=1, arrivals=9, beat_s=0.02), []
    model = net()
    optimizer = adam(model)
    good = next(batches())
    bad = (good[0], good[1] * math.nan)
    with heloco.join(LocalLink(service), model, optimizer, tell=messages.append) as run:
        step(model, optimizer, bad)
        assert "came to NaN or Inf" in messages[-1] and not optimizer.state
        step(model, optimizer, good)
        assert run.arrivals == 1 and all(t.isfinite().all() for t in values(model))
        with pytest.raises(heloco.RunStopped, match="3 rounds in a row came to NaN"):
            for _ in range(3):
                step(model, optimizer, bad)
    assert len(tape(service)) == 1


def test_reported_losses_stand_on_the_tape_as_the_rounds_mean(serve):
    service = serve(inner_steps=2, arrivals=3)
    model = net()
    optimizer = adam(model)
    losses = iter([1.0, torch.tensor(2.0), math.nan, 4.0])
    with heloco.join(LocalLink(service), model, optimizer, tell=quiet) as run:
        for batch in batches():
            run.report(next(losses, None), samples=4)
            step(model, optimizer, batch)
    assert [(x["loss"], x["last_loss"], x["samples"]) for x in tape(service)] == [(1.5, 2.0, 8), (None, 4.0, 8), (None, None, 8)]
