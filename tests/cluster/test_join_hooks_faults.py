"""What goes wrong for a joined loop: a service that is lost, two models at once, and what cannot be joined."""

import copy
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heloco
from heloco.cluster.protocol.link import LinkDown
from heloco.cluster.protocol.messages import Acknowledgement, ContributionReport, RoundKey, Ticket
from heloco.cluster.server.open_run import new_run
from heloco.cluster.server.service import Service
from heloco.task.images import ImagesTask
from support.local_link import LocalLink
from support.own_loops import (
    DEADLINE_S,
    Heard,
    adam,
    assert_same,
    batches,
    config,
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
