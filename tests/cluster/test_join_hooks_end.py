"""How a joined loop ends: the run ends, the loop leaves, or somebody interrupts it."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import heloco
from heloco.cluster.protocol.link import LinkDown
from heloco.cluster.protocol.messages import RoundAnswer, RunInfo, Ticket
from heloco.cluster.server.service import Service
from support.local_link import LocalLink
from support.own_loops import abandoned, adam, assert_same, batches, external_runs, net, outer, quiet, step, tape, values


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    with external_runs(tmp_path) as start:
        yield start


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


@pytest.mark.parametrize("error", [None, RuntimeError, KeyboardInterrupt])
def test_leaving_gives_the_round_back_and_takes_the_hooks_away(serve, error, capsys):
    service = serve(inner_steps=5)
    model = net()
    optimizer = adam(model)

    def loop() -> None:
        with heloco.join(LocalLink(service), model, optimizer, name="mine"):
            data = batches()
            for _ in range(7):
                step(model, optimizer, next(data))
            assert [(m.name, m.round[:2]) for m in service.state.roster if m.round] == [("mine", (0, 1))]
            if error:
                raise error

    if error:
        with pytest.raises(error):
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
