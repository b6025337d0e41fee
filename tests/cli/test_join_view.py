"""What `heloco join` shows of its machine."""

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from heloco.cli.join_view import LINE_EVERY_S, WAIT_SHOWN_AFTER_S, JoinView, figures
from heloco.cluster.client.activity import MachineActivity, Transfer
from heloco.cluster.client.worker import Worker
from heloco.cluster.server.open_run import new_run
from heloco.engine.build import build_task
from heloco.run import RunConfig, resolve, with_fields
from support.local_link import LocalLink
from support.small_cluster import Clock

NOW = MachineActivity(
    doing="training", wait_kind=None, waits_for="", is_suspended=False, worker=1, round=4, steps=3, inner_steps=10, rounds=5,
    accepted=4, loss=5.25, pace_s=0.0125, arrivals=48, planned_arrivals=120, share=0.25, download=Transfer(4_000_000, 0.5),
    upload=Transfer(4_000_000, 2.0),
)  # fmt: skip
PLAIN = {"force_terminal": False}


def test_a_machine_shows_its_rounds_its_loss_its_share_and_its_transfers():
    assert dict(figures(NOW)) == {
        "loss": "5.250", "step": "0.0125 s", "rounds": "5 (1 refused)", "share": "25%", "sent": "4 MB at 2 MB/s",
        "received": "4 MB at 8 MB/s", "run": "48/120 arrivals",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("now", "texts"),
    [
        (NOW, ["gpu-7, trains", "round 4 of worker 1, step 3 of 10", "loss 5.250", "share 25%", "sent 4 MB at 2 MB/s"]),
        (replace(NOW, doing="waiting", waits_for="a pause", wait_kind="paused"), ["gpu-7, waits for a round", "waits: a pause"]),
        (replace(NOW, is_suspended=True), ["gpu-7, trains", "the run is suspended: this machine keeps its round"]),
        (replace(NOW, doing="joining", worker=None, loss=None, upload=None), ["gpu-7, joins", "no round yet", "sent –"]),
    ],
    ids=["training", "waiting", "suspended", "joining"],
)
def test_on_a_terminal_it_is_a_panel(now, texts):
    screen = io.StringIO()
    view = JoinView("gpu-7", Console(file=screen, force_terminal=True, width=150, color_system=None))
    with view.display(lambda: now):
        view.note_round()
        view.note_request()
    assert all(text in screen.getvalue() for text in texts), screen.getvalue()


def test_elsewhere_a_line_comes_with_the_first_round_and_then_now_and_then(capsys):
    clock = Clock()
    view = JoinView("gpu-7", Console(**PLAIN), clock)
    with view.display(lambda: NOW):
        for clock.now in (0.0, 1.0, LINE_EVERY_S - 1, LINE_EVERY_S, LINE_EVERY_S + 1):
            view.note_round()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0].startswith("Round 4 of worker 1 is in: loss 5.250, step 0.0125 s, ")


def test_a_long_wait_is_told_once_and_a_short_one_not(capsys):
    clock = Clock()
    waiting = replace(NOW, doing="waiting", wait_kind="no-seat", waits_for="all are busy")
    state = [waiting]
    view = JoinView("gpu-7", Console(**PLAIN), clock)
    with view.display(lambda: state[0]):
        for clock.now in (0.0, WAIT_SHOWN_AFTER_S - 1):
            view.note_request()
        view.note_round()  # it got one after all
        for clock.now in (10.0, 12.0, 10.0 + WAIT_SHOWN_AFTER_S, 30.0):
            view.note_request()
        state[0] = replace(waiting, wait_kind="paused", waits_for="somebody paused it")
        for clock.now in (40.0, 50.0, 60.0):
            view.note_request()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Waits")]
    assert lines == ["Waits for a round: all are busy.", "Waits for a round: somebody paused it."]


def test_what_is_shown_is_what_the_machine_does(tmp_path, cache):  # noqa: ARG001
    """A run of two rounds, with a look before each step, after each round and before each request."""
    settings = {
        "preset": "1m", "width": 32, "layers": 1, "heads": 2, "context": 16, "eval_windows": 4, "batch_size": 2,
        "inner_steps": 3, "paces": [1.0], "arrivals": 2, "device": "cpu", "eval_every": 0,
    }  # fmt: skip
    task, config = build_task(resolve(with_fields(RunConfig(), settings)))
    service = new_run(task, config, tmp_path / "run")
    looks: dict[str, list[MachineActivity]] = {"step": [], "round": [], "request": []}
    worker = Worker(task, config, tell=lambda _: None)
    worker.after_round = lambda: looks["round"].append(worker.activity())
    worker.before_request = lambda: looks["request"].append(worker.activity())
    inner_hook = worker.before_step

    def before_step() -> None:
        inner_hook()
        looks["step"].append(worker.activity())

    worker.inner.before_step = before_step
    assert worker.activity().doing == "joining"
    worker.run(LocalLink(service), "m")
    training = [look for look in looks["step"] if look.doing == "training"]
    assert [(look.round, look.steps) for look in training] == [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]
    first, second = looks["round"]
    assert (first.rounds, first.accepted, first.arrivals, first.share) == (1, 1, 1, 1.0)
    assert (second.rounds, second.arrivals, second.planned_arrivals, second.share) == (2, 2, 2, 1.0)
    assert first.loss is not None and math.isfinite(first.loss) and first.pace_s is not None and first.pace_s > 0
    assert first.download is not None and first.upload is not None
    model_bytes = 4 * sum(p.numel() for p in worker.inner.model.parameters())
    assert first.download.bytes > model_bytes and first.upload.bytes > model_bytes and first.upload.bytes_per_s > 0
    assert [look.doing for look in looks["request"]] == ["waiting"] * len(looks["request"])
    service.close()
