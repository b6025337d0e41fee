"""Machines that evaluate an external run: over HTTPS, and as several ranks."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import heloco
from support.own_loops import DEADLINE_S, adam, batches, external_runs, net, step
from support.runs import evals


def test_over_https_scores_arrive_and_bad_ones_are_refused(tmp_path):
    for part in ("httpx", "starlette", "uvicorn", "cryptography"):
        pytest.importorskip(part)
    from heloco.cluster.server.process import ListenConfig, RunHost

    messages: list[str] = []
    results: Any = iter([1.0, math.nan, {"x" * 101: 1.0}, 4.0])
    with external_runs(tmp_path) as serve:
        service = serve(arrivals=6, eval_every=2)
        host = RunHost(service, ListenConfig("127.0.0.1", 0))
        try:
            model = net()
            optimizer, token = adam(model), host.token("worker")
            with heloco.join(
                host.address, model, optimizer, token=token, tell=messages.append, evaluate=lambda _: next(results)
            ) as run:
                for i, batch in enumerate(batches()):
                    if i in (3, 4):
                        run.report_eval({"loss": 10.0 + i})
                    if i == 5:
                        run.report_eval({f"name {j}": 1.0 for j in range(5_000)})
                    step(model, optimizer, batch)
            service.finish_evaluations()
            lines = evals(tmp_path / "run")
        finally:
            host.close()
    assert [(line["arrival"], line.get("own_steps", 0), line["mean"]["loss"]) for line in lines] == [
        (0, 0, 1.0), (1, 0, 13.0), (1, 1, 14.0), (6, 0, 4.0),
    ]  # fmt: skip
    left_out = [line for line in messages if "is left out" in line]
    assert [line.split(" is left out. ")[0] for line in left_out] == [
        "The evaluation at arrival 2",
        "The evaluation at arrival 4",
    ]
    assert "is not finite" in left_out[0] and "1 to 100 characters" in left_out[1]
    assert len([line for line in messages if line.startswith("The scores were not recorded. ")]) == 1


RANKS = """
import os, sys, pathlib, torch, torch.distributed as dist
from torch import nn
import heloco
from support.local_link import LocalLink
from heloco.cluster.server.open_run import external_run
from heloco.run import RunConfig, resolve, with_fields

folder, rank = pathlib.Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
torch.manual_seed(rank)
inner = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1))
inner[1].register_buffer("mine", torch.full((), float(rank)), persistent=False)
model = nn.parallel.DistributedDataParallel(inner, broadcast_buffers=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
address = "on rank 0"
if rank == 0:
    fields = dict(task="external", inner_steps=2, arrivals=4, eval_every=1, paces=[1.0], device="cpu")
    service = external_run(resolve(with_fields(RunConfig(), fields)), folder / "run")
    address = LocalLink(service)
calls = []


def evaluate(model):
    assert not inner.training
    value = sum(p.detach().double().sum() for p in inner.parameters())
    calls.append(value.item())
    inner[1].mine.add_(5)
    both = value.clone()
    dist.all_reduce(both)
    assert both.item() == 2 * value.item(), "the ranks score different models"
    if len(calls) == 2 and rank == 1:
        raise ValueError("no data here")
    return value + 100 * rank


messages, progress = [], []
generator = torch.Generator().manual_seed(7)
with heloco.join(address, model, optimizer, evaluate=evaluate, tell=messages.append) as run:
    while True:
        progress.append((run.progress, run.steps_left, run.run_arrivals, run.planned_arrivals))
        if run.round == 1:
            run.report_eval(-1.0)
        x = torch.randn(4, 3, generator=generator)
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
assert inner.training and inner[1].mine.item() == rank
if rank == 0:
    service.finish_evaluations()
    print("\\n".join(line for line in messages if "left out" in line))
print(progress)
print(calls)
print([p.tolist() for p in inner.parameters()])
dist.barrier()
sys.stdout.flush()
os._exit(0)  # gloo's own threads may bring the process down in its last moments, on a busy machine
"""


def test_all_ranks_evaluate_and_the_first_one_reports(tmp_path):
    if not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(tmp_path), str(rank)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
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
    assert first_lines[-3:] == second_lines[-3:]  # the same models in the same order, and the same one in the end
    assert second_lines[-3].startswith("[(0.0, 8, 0, 4), (0.125, 7, 0, 4), (0.25, 6, 1, 4), ")
    calls = json.loads(second_lines[-2])
    assert len(calls) == 4 and len(first_lines) == 4
    assert first_lines[0].endswith("is left out. evaluate failed on rank 1 (ValueError: no data here).")
    lines = evals(Path(tmp_path) / "run")
    assert [line["mean"]["loss"] for line in lines if line["mean"]["loss"] != -1] == [calls[0], *calls[2:]]


def test_a_wrapped_model_is_handed_over_as_it_was_given(tmp_path):
    models: list[nn.Module] = []
    with external_runs(tmp_path) as serve:
        from support.local_link import LocalLink

        service = serve(arrivals=1)
        model = nn.DataParallel(net())
        optimizer = adam(model)
        with heloco.join(
            LocalLink(service), model, optimizer, tell=lambda _: None, evaluate=lambda scored: models.append(scored) or 1.0
        ):
            for batch in batches():
                step(model, optimizer, batch)
        service.finish_evaluations()
    assert models and all(each is model for each in models)
