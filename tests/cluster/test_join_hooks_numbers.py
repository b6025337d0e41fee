"""The engineer's three lines give exact numbers: those of the outer rule by hand, and without a run those of the plain script."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import heloco
from heloco.cluster.server.service import Service
from heloco.outer.kernels.windows import dense
from heloco.wire import blocks
from heloco.wire.encoder import ContributionEncoder
from heloco.wire.formats import find_format, read_block
from heloco.wire.link_options import LinkOptions
from support.local_link import LocalLink
from support.own_loops import (
    Heard,
    adam,
    assert_same,
    batches,
    example,
    external_runs,
    in_threads,
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


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "e3m0"])
def test_a_loop_encodes_what_it_sends_and_adds_what_the_codes_left_out_by_hand_to_the_bit(serve, name):
    service = serve(inner_steps=3, arrivals=4, wire=name)
    model = net(width=40)
    optimizer = adam(model)
    with heloco.join(LocalLink(service), model, optimizer, tell=quiet) as run:
        for batch in batches():
            step(model, optimizer, batch)
    assert run.ended and run.arrivals == 4

    hand, theta, data = net(width=40), values(net(width=40)), batches()
    rule, inner, format = heloco.HeLoCo(theta, reorient="ramp", weigh="before"), adam(hand), find_format(name)
    encoder = ContributionEncoder(format, LinkOptions(wire=name), seed=0, worker=0)
    for index in range(4):
        start = rule.lookahead()
        with torch.no_grad():
            for p, s in zip(hand.parameters(), start, strict=True):
                p.copy_(s)
        for _ in range(3):
            step(hand, inner, next(data))
        deltas = [s - p.detach() for s, p in zip(start, hand.parameters(), strict=True)]
        codes = encoder.encode(index, deltas, last_accepted=index - 1)
        decoded = [dense(read_block(format, blocks.PSEUDO_GRADIENT, i, codes, d.shape)) for i, d in enumerate(deltas)]
        rule.step(weight=1.0, pseudo_gradients=decoded)
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


@pytest.mark.parametrize("wire", ["fp32", "int4"])
def test_huggingfaces_trainer_takes_part(serve, capsys, wire):
    pytest.importorskip("transformers")
    service = serve(inner_steps=6, arrivals=6, wire=wire)
    trainer = example("hf_trainer").train(LocalLink(service), steps=500)
    callback = next(c for c in trainer.callback_handler.callbacks if isinstance(c, heloco.HeLoCoCallback))
    assert trainer.state.global_step == 36 and callback.joined.ended and callback.joined.arrivals == 6
    lines = tape(service)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5 and all(line["samples"] == 48 for line in lines)
    assert all((2 * line["bytes_up"] < line["bytes_down"]) == (wire == "int4") for line in lines)
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
