"""Models in half precision: θ is float32, machines get roundings; and what cannot be trained is refused at the door."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from heloco.cluster.client.model_blocks import ModelBlocks
from heloco.cluster.gateway.api import checked_layout
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.server.open_run import external_run
from heloco.cluster.server.replay import replay
from heloco.cluster.server.service import Service
from heloco.engine.local import LocalRun, LocalState, StopRequested, describe
from heloco.errors import UserError
from heloco.finite import all_finite
from heloco.methods import METHODS
from heloco.outer import OuterOptimizer
from heloco.records.evaluations import EvaluationRecord
from heloco.records.tape import ArrivalRecord
from heloco.run import RunConfig, RunFolder, checkpoint, resolve, with_fields
from heloco.run.checkpoint import NO_LINES
from heloco.run.export import export_model
from heloco.task.datasets import DatasetTask
from heloco.wire.layout import Layout
from support.local_link import LocalLink
from support.runs import tape
from support.small_cluster import config, join_request, report
from support.synchronizers import SHAPES, arrive, build

HALF = [torch.bfloat16, torch.float16]
half = pytest.mark.parametrize("dtype", HALF, ids=str)
pytestmark = pytest.mark.usefixtures("one_thread")


# ---- the outer rules


def moved(optimizer: OuterOptimizer, arrivals: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    for _ in range(arrivals):
        deltas = [2e-3 * (1 + torch.rand(p.shape, generator=draw)) for p in optimizer.thetas()]
        optimizer.step(weight=0.447, pseudo_gradients=[delta.bfloat16().to(dtype) for delta in deltas])


@half
@pytest.mark.parametrize("method", METHODS)
def test_a_model_in_half_precision_moves_as_its_float32_twin_does(method, dtype):
    """100 arrivals of 2e-3 move weights of 1 by .1: each of them is less than the rounding of a bfloat16."""
    parameters, twins = (
        [nn.Parameter(torch.ones(shape, dtype=d)) for shape in ((50,), (3, 4), (0,))] for d in (dtype, torch.float32)
    )
    ours, theirs = (METHODS[method].build(p, workers=5) for p in (parameters, twins))
    moved(ours, 100, dtype)
    moved(theirs, 100, torch.bfloat16)
    assert twins[0].min() < 0.95
    for p, theta, twin in zip(parameters, ours.thetas(), theirs.thetas(), strict=True):
        assert p.dtype is dtype and torch.equal(theta, twin) and torch.equal(p, twin.to(dtype))
    starts, expected = ours.lookahead(), [start.to(dtype) for start in theirs.lookahead()]
    for number, (start, other) in enumerate(zip(starts, expected, strict=True)):
        assert start.dtype is dtype and torch.equal(start, other)
        assert torch.equal(torch.cat([part.clone().reshape(-1) for part in ours.lookahead_of(number)]), other.reshape(-1))


@half
def test_masters_are_part_of_an_optimizers_state(dtype):
    def fresh() -> OuterOptimizer:
        return METHODS["heloco"].build([nn.Parameter(torch.ones(50, dtype=dtype))], workers=5)

    one, other = fresh(), fresh()
    moved(one, 20, dtype)
    other.param_groups[0]["params"][0].data.copy_(one.param_groups[0]["params"][0])
    other.load_state_dict(one.state_dict())
    for optimizer in (one, other):
        moved(optimizer, 20, dtype)
    assert torch.equal(one.thetas()[0], other.thetas()[0]) and one.thetas()[0].dtype is torch.float32


@half
@pytest.mark.parametrize("method", METHODS)
def test_workers_start_from_roundings_and_may_hand_in_in_half_precision(method, dtype):
    draw = torch.Generator().manual_seed(1)
    start = [torch.randn(shape, generator=draw).to(dtype) for shape in SHAPES]
    ours, theirs = build(method, parameters=[p.clone() for p in start]), build(method, parameters=[p.float() for p in start])
    for number in range(12):
        deltas = [(1e-3 * torch.randn(shape, generator=draw)).to(dtype) for shape in SHAPES]
        rounds = [ours.dispatch(number % 3), theirs.dispatch(number % 3)] if number % 3 not in ours.rounds_under_way else None
        if rounds:
            for p, twin in zip(rounds[0].parameters, rounds[1].parameters, strict=True):
                assert p.dtype is dtype and torch.equal(p, twin.to(dtype))
        arrive(ours, number % 3, deltas)
        arrive(theirs, number % 3, [delta.float() for delta in deltas])
    for theta, twin in zip(ours.thetas, theirs.thetas, strict=True):
        assert torch.equal(theta, twin)


# ---- a simulation


def regression(dtype: torch.dtype) -> DatasetTask:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 4, generator=draw)
    data = list(zip(x.to(dtype), (x @ torch.randn(4, 2, generator=draw)).to(dtype), strict=True))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
    shards = {name: data[i::3] for i, name in enumerate("abc")}
    return DatasetTask(model, lambda m, batch: F.mse_loss(m(batch[0]), batch[1]), shards, validation={"all": data})


def local_run(path: Path, *, new: bool, **settings: Any) -> LocalRun:
    task = regression(torch.bfloat16)
    values = {"paces": [1.0, 1.0, 3.0], "inner_steps": 2, "arrivals": 14, "checkpoint_every": 3, "eval_every": 4, "device": "cpu"}
    resolved = resolve(with_fields(RunConfig(), {**values, **settings}))
    folder = RunFolder.create(path, resolved, describe(task, resolved, task.build_model())) if new else RunFolder.open(path)
    run = LocalRun(task, resolved, folder=folder)
    lines = NO_LINES
    if loaded := folder.load_latest(LocalState):
        run.load(*loaded)
        lines = loaded[0].lines
    folder.start_writing(lines)
    return run


@dataclass
class StopAt:
    """An observer that stops its run."""

    run: LocalRun
    arrivals: int

    def on_arrival(self, _: ArrivalRecord) -> None:
        self.run.stop_requested = self.run.synchronizer.arrivals == self.arrivals

    def on_evaluation(self, _: EvaluationRecord) -> None:
        pass


@pytest.mark.parametrize("method", METHODS)
def test_a_simulation_is_resumed_to_the_bit(method, tmp_path):
    whole = local_run(tmp_path / "whole", new=True, method=method)
    whole.run()
    broken = local_run(tmp_path / "broken", new=True, method=method)
    broken.observers.append(StopAt(broken, arrivals=7))
    with pytest.raises(StopRequested):
        broken.run()
    broken.folder.close()
    resumed = local_run(tmp_path / "broken", new=False, method=method)
    resumed.run()
    assert tape(tmp_path / "broken") == tape(tmp_path / "whole")
    for ours, theirs in zip(resumed.synchronizer.thetas, whole.synchronizer.thetas, strict=True):
        assert torch.equal(ours, theirs) and ours.dtype is torch.float32
    state, tensors = checkpoint.load(tmp_path / "whole" / "checkpoints" / "arrival-00000014", LocalState)
    assert state.arrival == 14
    assert tensors["parameter.0"].dtype is torch.bfloat16 and tensors["outer.0.master"].dtype is torch.float32
    assert torch.equal(tensors["outer.0.master"], whole.synchronizer.thetas[0])
    export_model(RunFolder.open(tmp_path / "whole"), tmp_path / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    for name, p in whole.model.state_dict().items():
        assert exported[name].dtype is torch.bfloat16 and torch.equal(exported[name], p)


# ---- a real run


def real_run(folder: Path, dtype: torch.dtype, arrivals: range, **settings: Any) -> Service:
    """Two machines over a model in half precision, a part of the run."""
    service = external_run(config(arrivals=20, paces=[1.0, 1.0], participation=100, **settings), folder)
    link = LocalLink(service)
    draw = torch.Generator().manual_seed(0)
    model = {"parameter.0": torch.randn(40, 5, generator=draw).to(dtype), "parameter.1": torch.ones(7, dtype=dtype)}
    layout = Layout.from_tensors(model)
    tickets = [link.join(f"m{i}", returning=None, layout=layout).ticket for i in range(2)]
    if service.state.run is None:
        link.send_model(tickets[0], layout, model, ["weight", "bias"])
    for number in arrivals:
        ticket = tickets[number % 2]
        answer = link.next_round(ticket, 0.0)
        start = link.fetch(ticket, answer.key, service.state.starts.layout, answer.start_digest)
        assert {t.dtype for t in start.values()} == {dtype}
        draw.manual_seed(number)
        delta = {f"pseudo_gradient.{i}": 2e-3 * torch.rand(p.shape, generator=draw) for i, p in enumerate(model.values())}
        link.hand_in(ticket, answer.key, service.state.run.contribution_layout, delta, report())
        service.housekeeping.save_if_due(wait=True)
    return service


@half
@pytest.mark.parametrize("method", ["heloco-ramp", "sync-nesterov", "delayed-nesterov"])
def test_a_real_run_in_half_precision_moves_and_is_replayed_and_taken_up_to_the_bit(method, dtype, tmp_path):
    whole = real_run(tmp_path / "whole", dtype, range(20), method=method)
    assert whole.state.ended.kind == "finished"
    final = whole.state.starts.write_final(whole.state.run.final_model())
    thetas = [theta.clone() for theta in whole.state.run.synchronizer.thetas]
    whole.close()
    assert 1 - float(thetas[1].mean()) > 0.005
    assert torch.equal(load_file(final)["parameter.1"], thetas[1].to(dtype))
    replay_result = replay(RunFolder.open(tmp_path / "whole"), None)
    assert (replay_result.lines, replay_result.difference) == (20, None)

    real_run(tmp_path / "broken", dtype, range(9), method=method).close()
    taken_up = real_run(tmp_path / "broken", dtype, range(9, 20), method=method)
    for ours, theirs in zip(taken_up.state.run.synchronizer.thetas, thetas, strict=True):
        assert ours.dtype is torch.float32 and torch.equal(ours, theirs)
    taken_up.close()
    assert [line["digest"] for line in tape(tmp_path / "broken")] == [line["digest"] for line in tape(tmp_path / "whole")]
    assert json.loads((tmp_path / "whole" / "run.json").read_text())["dtypes"] == [str(dtype).removeprefix("torch.")] * 2


# ---- what cannot be trained

UNTRAINABLE = [torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]
untrainable = pytest.mark.parametrize("dtype", UNTRAINABLE, ids=str)
SENTENCE = "only parameters in float64, float32, bfloat16 or float16 can be trained."


def with_a_block_of(dtype: torch.dtype) -> nn.Module:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(3))
    model.odd = nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=False)
    return model


@untrainable
@pytest.mark.parametrize("method", METHODS)
def test_outer_rules_refuse_parameters_that_cannot_be_trained(method, dtype):
    with pytest.raises(UserError, match=f"block 1 is {dtype}: {SENTENCE}"):
        METHODS[method].build(with_a_block_of(dtype).parameters(), workers=2)
    optimizer = METHODS[method].build([nn.Parameter(torch.ones(3))], workers=2)
    with pytest.raises(ValueError, match=f"block 1 is {dtype}"):
        optimizer.add_param_group({"params": [torch.zeros(2, dtype=dtype)]})
    assert len(optimizer.param_groups) == 1


@untrainable
def test_named_parameters_are_refused_by_their_names(dtype):
    with pytest.raises(ValueError, match=f"odd is {dtype}"):
        METHODS["mla"].rule(with_a_block_of(dtype).named_parameters())


@untrainable
def test_a_task_refuses_them_by_name(dtype):
    with pytest.raises(UserError, match=f"The parameter 'odd' is {dtype}: {SENTENCE}"):
        DatasetTask(with_a_block_of(dtype), lambda *_: torch.zeros(()), {"a": [1]})


@untrainable
def test_a_model_with_them_cannot_join_but_they_may_be_frozen(dtype):
    with pytest.raises(UserError, match=f"The parameter 'odd' is {dtype}: {SENTENCE}"):
        ModelBlocks(with_a_block_of(dtype), include_all=True)
    assert list(ModelBlocks(with_a_block_of(dtype), include_all=False).parameters) == ["weight"]


@pytest.mark.parametrize("dtype", ["I64", "I8", "BOOL"])
def test_a_run_takes_no_model_with_them(dtype, tmp_path):
    entries = (("parameter.0", "F32", (3,)), ("parameter.1", dtype, (2,)), ("buffer.0", dtype, (2,)))
    service = external_run(config(), tmp_path / "run")
    layout = checked_layout(entries)
    ticket = service.members.join(join_request("m", layout=entries)).ticket
    with pytest.raises(Refused, match=r"^parameter\.1 is torch\..*" + SENTENCE) as refused:
        service.models.upload(ticket, layout)
    assert refused.value.code is RefusalCode.LAYOUT
    service.close()


@pytest.mark.parametrize("shape", [[2**31, 2**31], [2**39, 2**39, 0], [0, 2**62], [1 << 39, 1 << 22, 2], [2**20] * 4])
def test_a_shape_whose_size_overflows_is_malformed(shape):
    with pytest.raises(ValueError, match="not a list of names"):
        Layout.from_json([["parameter.0", "F32", shape]])
    with pytest.raises(Refused) as refused:
        checked_layout((("parameter.0", "F32", tuple(shape)),))
    assert refused.value.code is RefusalCode.MALFORMED


# ---- finite means finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_healthy_tensors_of_any_size_are_finite(dtype):
    draw = torch.Generator().manual_seed(0)
    embedding = torch.randn(50_257, 768, generator=draw).mul_(0.05).to(dtype)
    assert all_finite([embedding, torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)])
    assert not all_finite([embedding, torch.tensor(math.nan)])


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64], ids=str)
@pytest.mark.parametrize("size", [1, 7, 100_003])
def test_any_number_that_is_not_finite_is_found(dtype, poison, size):
    for place in {0, size // 2, size - 1}:
        tensor = torch.ones(size, dtype=dtype)
        assert all_finite([tensor])
        tensor[place] = complex(1.0, poison) if dtype.is_complex else poison
        assert not all_finite([torch.ones(2), tensor])
        assert not all_finite([torch.stack([tensor, torch.ones_like(tensor)]).t()])


def test_whole_numbers_and_nothing_are_finite():
    empty: list[Tensor] = []
    assert all_finite(empty) and all_finite([torch.empty(0), torch.tensor([1, 2]), torch.tensor(True)])


def test_the_check_allocates_nothing_to_speak_of():
    tensor = torch.ones(4_000_000, dtype=torch.float16)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        assert all_finite([tensor])
    events = profile.profiler.kineto_results.events()
    assert max((event.nbytes() for event in events if event.name() == "[memory]"), default=0) < 100_000
