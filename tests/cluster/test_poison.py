"""One bad machine among good ones, in a run with the settings that users get: what it hands in does not ruin the run."""

import math

import pytest
import torch
from torch import Tensor

from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.records.events import Receive
from heloco.records.journal_reader import FOLDER, read_events
from support.small_cluster import Clock, Hand, delta, opened

ROUNDS = 12
HONEST = 0.1


def scaled(factor: float, seed: int) -> dict[str, Tensor]:
    return {name: value * factor if name.startswith("pseudo") else value for name, value in delta(seed, HONEST).items()}


def with_buffers(seed: int, mean: float, count: int) -> dict[str, Tensor]:
    return delta(seed, HONEST) | {"buffer.0": torch.full((3,), mean), "buffer.1": torch.tensor(count)}


POISONS = {
    "1e15 times as large": lambda seed: scaled(1e15, seed),
    "1e30 times as large": lambda seed: scaled(1e30, seed),
    "one block 1e9 times as large": lambda seed: (
        delta(seed, HONEST) | {"pseudo_gradient.1": delta(seed, 1e9)["pseudo_gradient.1"]}
    ),
    "buffers of 1e38": lambda seed: with_buffers(seed, 1e38, seed),
    "buffers of -1e9": lambda seed: with_buffers(seed, -1e9, seed),
    "a counter of 2⁶²": lambda seed: with_buffers(seed, 0.5, 1 << 62),
}


def after_a_run(folder, poison=None, first=ROUNDS, **settings):
    """Parameters and buffers after three machines have worked in turn. `poison`: what the third hands in, from round `first`."""
    service = opened(folder, Clock(), **{"arrivals": 1000, **settings})
    machines = [Hand(service, name) for name in ("good", "better", "bad")]
    for number in range(ROUNDS):
        for machine in machines:
            is_bad = poison is not None and machine.name == "bad" and number >= first
            seed = 10 * number + machines.index(machine)
            try:
                machine.take()
                machine.hand_in(poison(seed) if is_bad else delta(seed, HONEST))
            except Refused as refused:  # after the fifth contribution that could not be squared
                assert is_bad and refused.code is RefusalCode.BARRED
    run = service.state.run
    tensors = [t.clone() for t in (*run.synchronizer.thetas, *run.synchronizer.buffers)]
    service.close()
    return tensors


@pytest.mark.parametrize("first", [0, ROUNDS // 2], ids=["from the start", "later"])
@pytest.mark.parametrize("kind", POISONS)
def test_the_model_stays_where_the_good_machines_bring_it(tmp_path, kind, first):
    healthy = after_a_run(tmp_path / "healthy")
    poisoned_tensors = after_a_run(tmp_path / "poisoned", POISONS[kind], first)
    for ours, theirs in zip(healthy, poisoned_tensors, strict=True):
        if ours.is_floating_point():
            assert theirs.isfinite().all()
            assert (theirs - ours).norm() <= 20 * HONEST * math.sqrt(ROUNDS * ours.numel()), (ours, theirs)
        else:
            assert theirs <= 1000


def test_without_the_guard_one_contribution_ruins_it(tmp_path):
    """So the guard is what holds, and can be switched off."""
    tensors = after_a_run(tmp_path / "run", POISONS["1e15 times as large"], ROUNDS - 1, norm_limit="off")
    assert tensors[0].abs().max() > 1e10


def test_what_was_cut_is_told_and_what_is_refused_is_told_too(tmp_path):
    for policy, verdict in (("clip", "applied"), ("refuse", "refused")):
        service = opened(tmp_path / policy, Clock(), norm_policy=policy, arrivals=1000)
        machines = [Hand(service, name) for name in ("good", "better", "bad")]
        for number in range(ROUNDS):
            for machine in machines:
                machine.take()
                ack = machine.hand_in(delta(number, HONEST))
        bad = machines[-1]
        for poison in (scaled(1e15, 1), with_buffers(1, 1e9, 1)):
            bad.take()
            ack = bad.hand_in(poison)
            assert ack.verdict == verdict and "× the usual" in ack.reason
        service.close()
        received = [event for event, _ in read_events(tmp_path / policy / FOLDER) if isinstance(event, Receive)]
        assert [event.machine for event in received[-2:]] == [bad.id, bad.id]
