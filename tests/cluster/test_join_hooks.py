"""The engineer's three lines: loops of one's own on real services; the exact numbers, the end of the run, faults, errors."""

import copy
import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn

import heloco
from heloco.cluster.protocol.link import LinkDown
from heloco.cluster.protocol.messages import (
    Acknowledgement,
    BeatAnswer,
    ContributionReport,
    RoundAnswer,
    RoundKey,
    RunInfo,
    Ticket,
)
from heloco.cluster.server.local_link import LocalLink
from heloco.cluster.server.open_run import external_run, new_run
from heloco.cluster.server.service import Service
from heloco.records.events import Abandon
from heloco.records.journal_reader import FOLDER, read_events
from heloco.run import RunConfig, resolve, with_fields
from heloco.task.images import ImagesTask
from support.repository import REPOSITORY

EXAMPLES = REPOSITORY / "examples"
DEADLINE_S = 60.0


def config(**fields: Any) -> RunConfig:
    defaults = {"task": "external", "inner_steps": 3, "arrivals": 4, "paces": [1.0], "method": "heloco-ramp", "device": "cpu"}
    return resolve(with_fields(RunConfig(), defaults | fields))


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    services: list[Service] = []

    def start(folder: str = "run", **fields: Any) -> Service:
        services.append(external_run(config(**fields), tmp_path / folder))
        return services[-1]

    yield start
    for service in services:
        service.close()


class Heard(LocalLink):
    """Keeps what it carried."""

    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.contributions: dict[RoundKey, list[Tensor]] = {}
        self.reports: dict[RoundKey, ContributionReport] = {}
        self.starts: dict[RoundKey, list[Tensor]] = {}
        self.memory: set[int] = set()
        """Where the starts lie."""

    def fetch(self, ticket: Ticket, key: RoundKey, layout: Any, digest: str) -> dict[str, Tensor]:
        start = super().fetch(ticket, key, layout, digest)
        self.starts[key] = [t.clone() for name, t in start.items() if name.startswith("parameter.")]
        self.memory |= {t.untyped_storage().data_ptr() for t in start.values()}
        return start

    def hand_in(self, ticket: Ticket, key: RoundKey, layout: Any, tensors: Any, report: ContributionReport) -> Acknowledgement:
        assert {t.untyped_storage().data_ptr() for t in tensors.values()} <= self.memory, "another copy of the model"
        self.contributions[key] = [t.clone() for name, t in tensors.items() if name.startswith("pseudo_gradient.")]
        self.reports[key] = report
        return super().hand_in(ticket, key, layout, tensors, report)


def tape(service: Service) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (service.state.folder / "tape.jsonl").read_text().splitlines()]


def abandoned(service: Service) -> list[Abandon]:
    return [event for event, _ in read_events(service.state.folder / FOLDER) if isinstance(event, Abandon)]


def outer(service: Service) -> list[Tensor]:
    assert service.state.run is not None
    return [p.detach() for p in service.state.run.synchronizer.parameters]


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def net(seed: int = 0, width: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 1))


def batches(seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(10_000):
        x = torch.randn(8, 3, generator=generator)
        yield x, x.sum(1, keepdim=True).sin()
    raise AssertionError("the loop did not end")


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def adam(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> float:
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def quiet(_: str) -> None:
    pass


def example(name: str, without_heloco: bool = False) -> Any:
    """An example as a module; or the script as it was before the marked lines came."""
    text = (EXAMPLES / f"{name}.py").read_text()
    if without_heloco:
        text = text.replace("with heloco.join(address, model, optimizer) as run:  # heloco", "if True:")
        text = "".join(line for line in text.splitlines(keepends=True) if "# heloco" not in line)
        assert not re.search(r"heloco\.\w+\(", text)
    module = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
    return module


def in_threads(*work: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(work)

    def run(i: int) -> None:
        try:
            results[i] = work[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(work))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "a loop hangs"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


# ---- the numbers


@pytest.mark.parametrize("reset", [False, True])
def test_one_machine_gives_what_the_outer_rule_gives_by_hand_to_the_bit(serve, reset):
    service = serve(inner_steps=3, arrivals=4)
    model = net()
    optimizer = adam(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    with heloco.join(LocalLink(service), model, optimizer, reset_optimizer=reset, tell=quiet) as run:
        for batch in batches():
            step(model, optimizer, batch)
            schedule.step()
    assert run.ended and run.arrivals == 4

    hand, theta = net(), values(net())
    rule = heloco.HeLoCo(theta, reorient="ramp", weigh="before")
    inner = adam(hand)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(inner, 20)
    data = batches()
    for _ in range(4):
        start = rule.lookahead()
        with torch.no_grad():
            for p, s in zip(hand.parameters(), start, strict=True):
                p.copy_(s)
        if reset:
            inner.state.clear()
        for _ in range(3):
            step(hand, inner, next(data))
            schedule.step()
        rule.step(weight=1.0, pseudo_gradients=[s - p.detach() for s, p in zip(start, hand.parameters(), strict=True)])
    assert [line["weight"] for line in tape(service)] == [1.0] * 4
    assert_same(outer(service), theta)
    assert_same(values(model), theta)


def test_a_plain_loop_of_nanogpts_shape_on_two_machines(serve):
    service = serve(inner_steps=10, arrivals=14, paces=[1.0, 1.0], min_workers=2, participation=100)
    links = [Heard(service), Heard(service)]
    script = example("plain_loop")
    results = in_threads(*(lambda i=i: script.train(links[i], steps=400, seed=i) for i in range(2)))

    lines = tape(service)
    assert [line["arrival"] for line in lines] == list(range(1, 15)) and service.state.ended.kind == "finished"
    assert {line["worker"] for line in lines} == {0, 1} and len({line["machine"] for line in lines}) == 2
    assert all((line["inner_steps"], line["samples"]) == (10, 160) for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.3
    carried = {key: tensors for link in links for key, tensors in link.contributions.items()}
    for model, losses in results:
        assert len(losses) < 400 and losses[-1] < losses[0] - 0.3
        assert_same(values(model), outer(service))

    first = next(start for link in links for key, start in link.starts.items() if key.worker < 2 and key.version == 0)
    theta = [t.clone() for t in first]
    rule = heloco.HeLoCo(theta, reorient="ramp", weigh="before")
    for line in lines:
        key = (line["worker"], line["round"], line["version"])
        rule.step(weight=line["weight"], pseudo_gradients=carried[key])
        report = next(link.reports[key] for link in links if key in link.reports)
        assert report.loss == line["loss"] and report.last_loss == line["last_loss"]
    assert_same(theta, outer(service))


def test_huggingfaces_trainer_takes_part(serve, capsys):
    pytest.importorskip("transformers")
    service = serve(inner_steps=6, arrivals=6)
    trainer = example("hf_trainer").train(LocalLink(service), steps=500)
    callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, heloco.HeLoCoCallback))
    assert trainer.state.global_step == 36 and callback.joined.ended and callback.joined.arrivals == 6
    lines = tape(service)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5 and all(line["samples"] == 48 for line in lines)
    assert_same(values(trainer.model), outer(service))
    assert not trainer.optimizer.optimizer._optimizer_step_post_hooks
    assert "Left" not in capsys.readouterr().out


# ---- without a run


def test_without_an_address_nothing_changes_to_the_bit(monkeypatch):
    monkeypatch.delenv("HELOCO_ADDRESS", raising=False)
    before, losses = example("plain_loop", without_heloco=True).train(steps=12)
    after, same = example("plain_loop").train(steps=12)
    assert losses == same
    assert_same(values(before), values(after))
    model = net()
    with heloco.join(model=model, optimizer=adam(model)) as run:
        assert (run.worker, run.workers, run.active, run.ended, run.inner_steps, run.waiting) == (0, 1, False, False, 0, "")


def test_without_an_address_the_trainer_is_the_same_to_the_bit(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.delenv("HELOCO_ADDRESS", raising=False)
    script = example("hf_trainer")
    with_callback = script.train(steps=8)
    monkeypatch.setattr(script.heloco, "HeLoCoCallback", lambda _: script.Nothing, raising=False)
    script.Nothing = type("Nothing", (sys.modules["transformers"].TrainerCallback,), {})
    assert_same(values(with_callback.model), values(script.train(steps=8).model))


def test_the_address_may_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("HELOCO_ADDRESS", "nowhere:1")
    model = net()
    with pytest.raises(heloco.UserError, match="'nowhere:1' is not the address"), heloco.join(None, model, adam(model)):
        pass


# ---- the end of the run


def test_when_the_run_ends_the_loop_ends(serve, capsys):
    service = serve(inner_steps=2, arrivals=3)
    model = net()
    optimizer = adam(model)
    steps, after = 0, False
    with heloco.join(LocalLink(service), model, optimizer) as run:
        for batch in batches():
            steps += 1
            try:
                step(model, optimizer, batch)
            except Exception:  # as loops do that skip what fails
                continue
        after = True
    assert steps == 6 and not after and run.ended and not optimizer._optimizer_step_post_hooks
    output_lines = capsys.readouterr().out.splitlines()
    assert output_lines == [
        "Joined this process as worker 0 of 1, 2 steps a round.",
        "The run has ended: all arrivals are in. After 3 contributions from here; its model is loaded.",
    ]


def test_a_loop_that_catches_everything_is_told_again(serve):
    service = serve(inner_steps=2, arrivals=1)
    model = net()
    optimizer = adam(model)
    caught = 0
    with heloco.join(LocalLink(service), model, optimizer, tell=quiet):
        for batch in batches():
            try:
                step(model, optimizer, batch)
            except BaseException as over:
                caught += 1
                if caught == 3:
                    raise over
    assert caught == 3


def test_a_loop_may_go_on_alone(serve):
    service = serve(inner_steps=2, arrivals=1)
    model = net()
    optimizer = adam(model)
    with heloco.join(LocalLink(service), model, optimizer, stop_at_end=False, tell=quiet) as run:
        data = batches()
        for _ in range(2):
            step(model, optimizer, next(data))
        assert run.ended
        assert_same(values(model), outer(service))
        step(model, optimizer, next(data))
    assert not all(map(torch.equal, values(model), outer(service)))
    assert service.state.roster.present == {}


def test_an_ended_run_cannot_be_joined(serve):
    service = serve(inner_steps=1, arrivals=1)
    model = net()
    optimizer = adam(model)
    with heloco.join(LocalLink(service), model, optimizer, tell=quiet):
        for batch in batches():
            step(model, optimizer, batch)
    with pytest.raises(heloco.UserError, match=r"nothing to join at this process\. The run has ended: all arrivals are in"):
        heloco.join(LocalLink(service), model, optimizer).__enter__()
    assert not optimizer._optimizer_step_post_hooks


def test_a_run_that_is_stopped_gives_its_model_to_those_in_the_middle_of_a_round(serve):
    service = serve(inner_steps=2, arrivals=9, beat_s=0.02)
    model = net()
    optimizer = adam(model)
    with heloco.join(LocalLink(service), model, optimizer, tell=quiet) as run:
        data = batches()
        for _ in range(3):
            step(model, optimizer, next(data))
        service.admin.stop("enough")
        for batch in data:
            step(model, optimizer, batch)
    assert run.ended and run.arrivals == 1
    assert_same(values(model), outer(service))


def test_its_model_may_be_out_of_reach(serve):
    class NoFinal(LocalLink):
        def fetch_final(self, *_: Any) -> dict[str, Tensor]:
            raise LinkDown("gone.")

    service, messages = serve(inner_steps=2, arrivals=1), []
    model = net()
    optimizer = adam(model)
    with heloco.join(NoFinal(service), model, optimizer, tell=messages.append):
        for batch in batches():
            step(model, optimizer, batch)
    assert messages[-1].endswith("its model is out of reach, so this machine's own stays.")


# ---- leaving


@pytest.mark.parametrize("how", [None, RuntimeError, KeyboardInterrupt])
def test_leaving_gives_the_round_back_and_takes_the_hooks_away(serve, how, capsys):
    service = serve(inner_steps=5)
    model = net()
    optimizer = adam(model)

    def loop() -> None:
        with heloco.join(LocalLink(service), model, optimizer, name="mine"):
            data = batches()
            for _ in range(7):
                step(model, optimizer, next(data))
            assert [(m.name, m.round[:2]) for m in service.state.roster if m.round] == [("mine", (0, 1))]
            if how:
                raise how

    if how:
        with pytest.raises(how):
            loop()
    else:
        loop()
    assert not optimizer._optimizer_step_post_hooks and service.state.roster.present == {}
    assert len(tape(service)) == 1 and len(abandoned(service)) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "Left this process after 1 contributions; 2 steps of a round that was not done are given up."
    step(model, optimizer, next(batches()))  # an optimizer like any other again


def test_ctrl_c_ends_a_wait_in_the_hook(serve):
    class Away(LocalLink):
        request_count = 0

        def next_round(self, ticket: Ticket, wait_s: float, **options: Any) -> RoundAnswer:
            self.request_count += 1
            if self.request_count == 1:
                return super().next_round(ticket, wait_s, **options)
            if self.request_count == 3:
                signal.raise_signal(signal.SIGINT)
            raise LinkDown("It does not answer.")

    model, messages = net(), []
    optimizer = adam(model)
    with (
        pytest.raises(KeyboardInterrupt),
        heloco.join(Away(serve(inner_steps=1)), model, optimizer, tell=messages.append),
    ):
        step(model, optimizer, next(batches()))
    assert messages[1] == "It does not answer. Trying again." and not optimizer._optimizer_step_post_hooks


def test_patience_ends(serve):
    class Away(LocalLink):
        def describe(self) -> RunInfo:
            raise LinkDown("It does not answer.")

    model = net()
    with pytest.raises(heloco.UserError, match=r"out of reach for 0 s.*Check the address"):
        heloco.join(Away(serve()), model, adam(model), patience_s=0, tell=quiet).__enter__()


# ---- loops of all kinds


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
        with pytest.raises(heloco.UserError, match=r"frozen parameters here \('0.weight' and so on\) are not those of the run"):
            heloco.join(LocalLink(service), other, adam(other), tell=quiet).__enter__()
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


# ---- faults


def test_the_service_is_lost_and_comes_back_and_each_contribution_counts_once(serve):
    """Two answers are lost; the service is closed, in the middle of a round and between two, and its folder opened again."""
    fields = {"inner_steps": 3, "arrivals": 8, "checkpoint_every": 3}

    class Cut(Heard):
        lost = 0

        def hand_in(
            self, ticket: Ticket, key: RoundKey, layout: Any, tensors: Any, report: ContributionReport
        ) -> Acknowledgement:
            answer = super().hand_in(ticket, key, layout, tensors, report)
            if key.round in (2, 4) and self.lost < (key.round // 2):
                self.lost += 1
                if key.round == 4:
                    self.restart()
                raise LinkDown("The answer is lost.")
            return answer

        def restart(self) -> None:
            self.service.close()
            self.service = serve(**fields)

    link, messages = Cut(serve(**fields)), []
    model = net()
    optimizer = adam(model)
    steps = 0
    with heloco.join(link, model, optimizer, tell=messages.append) as run:
        for batch in batches():
            steps += 1
            step(model, optimizer, batch)
            if steps == 4:
                link.restart()
    lines = tape(link.service)
    assert steps == 24 and link.lost == 2 and run.arrivals == 8
    assert [(line["arrival"], line["round"]) for line in lines] == [(i + 1, i) for i in range(8)]
    theta = [t.clone() for t in link.starts[0, 0, 0]]
    rule = heloco.HeLoCo(theta, reorient="ramp", weigh="before")
    for line in lines:
        rule.step(pseudo_gradients=link.contributions[line["worker"], line["round"], line["version"]])
    assert_same(theta, outer(link.service))
    assert messages.count("The answer is lost. Trying again.") == 2 and "The run is back." in messages


def test_two_machines_that_both_bring_a_model_agree_on_one(serve):
    """While the first sends, the second waits; nothing is mixed."""
    service = serve(paces=[1.0, 1.0])
    first, second = net(0), net(1)
    begun, waiting = threading.Event(), threading.Event()

    class Slow(LocalLink):
        def send_model(self, ticket: Ticket, layout: Any, tensors: Any, names: list[str]) -> None:
            upload = self.service.models.upload(ticket, layout)
            upload.write(upload.begin(0), layout.header)
            begun.set()
            assert waiting.wait(DEADLINE_S)
            super().send_model(ticket, layout, tensors, names)

    class Second(LocalLink):
        def send_model(self, ticket: Ticket, layout: Any, tensors: Any, names: list[str]) -> None:
            assert begun.wait(DEADLINE_S)
            try:
                super().send_model(ticket, layout, tensors, names)
            finally:
                waiting.set()

    def take_part(link: LocalLink, model: nn.Module) -> list[Tensor]:
        with heloco.join(link, model, adam(model), tell=quiet):
            return values(model)

    brought = values(first)
    one, other = in_threads(lambda: take_part(Slow(service), first), lambda: take_part(Second(service), second))
    assert_same(one, brought)
    assert_same(other, brought)


# ---- errors


def test_another_model_is_refused_by_the_names_of_its_blocks(serve):
    service = serve()
    model = net()
    with heloco.join(LocalLink(service), model, adam(model), tell=quiet):
        wider, deeper = net(width=6), nn.Sequential(*net(), nn.Linear(1, 1))
        with pytest.raises(heloco.UserError, match=r"parameter '0.weight' is F32 \[6, 3\] and not F32 \[5, 3\]"):
            heloco.join(LocalLink(service), wider, adam(wider)).__enter__()
        with pytest.raises(heloco.UserError, match=r"parameter '3.weight' is not in the model"):
            heloco.join(LocalLink(service), deeper, adam(deeper)).__enter__()
        assert [machine.seat for machine in service.state.roster] == [0]


def test_a_run_with_a_task_of_its_own_takes_the_same_model_and_no_other(tmp_path):
    task = ImagesTask(seed=0, images=16, val_images=4)
    service = new_run(task, config(task="images", inner_steps=1, arrivals=1), tmp_path / "run")
    model, foreign = task.build_model(), net()
    next(model.parameters()).requires_grad_(False)  # the run's own machines send it all the same
    with pytest.raises(heloco.UserError, match="this process does not take this machine: This run trains another model"):
        heloco.join(LocalLink(service), foreign, adam(foreign)).__enter__()
    optimizer = adam(model)
    with heloco.join(LocalLink(service), model, optimizer, tell=quiet) as run:
        for _ in range(2):
            model(task.batch(0, torch.arange(4).numpy())[0]).sum().backward()
            optimizer.step()
    assert run.ended and run.arrivals == 1
    assert_same(values(model), outer(service))
    service.close()


def test_what_cannot_be_joined_is_said(serve):
    model, service = net(), serve()
    link = LocalLink(service)

    def refused(what: str, *about: Any) -> None:
        with pytest.raises(heloco.UserError, match=what):
            heloco.join(*about, tell=quiet).__enter__()

    refused("takes the address first", model, adam(model))
    refused("needs the model and its optimizer", link, model)
    refused("'http://x' is not the address of a run", "http://x", model, adam(model))
    refused("int is not a torch optimizer", link, model, 3)
    refused("moves none of the model's parameters", link, model, adam(net()))
    refused("no trainable parameters", link, net().requires_grad_(False), adam(model))
    lazy = nn.LazyLinear(2)
    refused("send one batch through the model", link, lazy, adam(model))
    refused("'weight' is on the meta device", link, nn.Linear(1, 1, device="meta"), adam(model))
    complex_ = nn.Linear(1, 1, dtype=torch.complex64)
    refused("complex64", link, complex_, adam(complex_))
    broken = copy.deepcopy(model)
    nn.init.constant_(broken[0].bias, math.nan)
    refused("'0.bias' holds NaN or Inf", link, broken, adam(broken))
    assert service.state.run is None and service.state.roster.present == {}


# ---- several processes as one machine

RANKS = """
import os, sys, pathlib, torch, torch.distributed as dist
from torch import nn
import heloco
from heloco.cluster.server.local_link import LocalLink
from heloco.cluster.server.open_run import external_run
from heloco.run import RunConfig, resolve, with_fields

folder, rank = pathlib.Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
torch.manual_seed(rank)
inner = nn.Linear(3, 1)
model = nn.parallel.DistributedDataParallel(inner)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
address = "on rank 0"
if rank == 0:
    fields = dict(task="external", inner_steps=2, arrivals=3, paces=[1.0], device="cpu")
    service = external_run(resolve(with_fields(RunConfig(), fields)), folder / "run")
    address = LocalLink(service)
steps = 0
with heloco.join(address, model, optimizer) as run:
    while True:
        steps += 1
        x = torch.randn(4, 3)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
assert run.ended and steps == 6 and "transformers" not in sys.modules
if rank == 0:
    assert all(torch.equal(a, b) for a, b in zip(inner.parameters(), service.state.run.synchronizer.parameters))
try:
    heloco.join(address, model, optimizer).__enter__()
except (heloco.UserError, heloco.RunStopped) as error:
    print(error)
print([p.tolist() for p in inner.parameters()])
dist.barrier()
sys.stdout.flush()
os._exit(0)  # gloo's own threads may bring the process down in its last moments, on a busy machine
"""


def test_several_ranks_are_one_machine(tmp_path):
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(tmp_path), str(rank)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        (first, e0), (second, e1) = (rank.communicate(timeout=DEADLINE_S) for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], e0 + e1
    first_lines, second_lines = first.splitlines(), second.splitlines()
    assert first_lines[0].startswith("Joined this process as worker 0 of 1") and first_lines[-1] == second_lines[-1]
    assert first_lines[-2].startswith("There is nothing to join") and len(second_lines) == 2
    assert second_lines[-2].startswith("Rank 0 could not go on with the run: UserError: There is nothing to join")


# ---- over the network


def test_an_unmodified_script_joins_over_https_by_its_environment(serve):
    for part in ("httpx", "starlette", "uvicorn", "cryptography"):
        pytest.importorskip(part)
    from heloco.cluster.server.process import ListenConfig, RunHost

    service = serve(inner_steps=4, arrivals=3)
    host = RunHost(service, ListenConfig("127.0.0.1", 0))
    try:
        model = net()
        for right in ("viewer", "admin"):
            with pytest.raises(heloco.UserError, match=f"A {right}'s token does not allow this: it takes worker"):
                heloco.join(host.address, model, adam(model), token=host.token(right)).__enter__()
        environment = os.environ | {"HELOCO_ADDRESS": host.address, "HELOCO_TOKEN": host.token("worker")}
        result = subprocess.run(
            [sys.executable, str(EXAMPLES / "plain_loop.py")], env=environment, capture_output=True, text=True, timeout=DEADLINE_S
        )
        with pytest.raises(heloco.UserError, match="does not accept the token"):
            heloco.join(host.address, model, adam(model), token=other_token(host.token("worker"))).__enter__()
    finally:
        host.close()
    assert result.returncode == 0, result.stderr
    output_lines = result.stdout.splitlines()
    assert output_lines[0] == f"Joined {host.address} as worker 0 of 1, 4 steps a round."
    assert output_lines[-2] == "The run has ended: all arrivals are in. After 3 contributions from here; its model is loaded."
    assert output_lines[-1].startswith("11 steps, the last loss is")
    assert [line["samples"] for line in tape(service)] == [64, 64, 64]


def other_token(token: str) -> str:
    begin, _, end = token.split(".")
    return ".".join((begin, "A" * 43, end))
