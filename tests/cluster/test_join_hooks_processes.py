"""Joined loops in processes of their own: several ranks as one machine, and a script that joins over HTTPS."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import heloco
from heloco.cluster.server.service import Service
from support.own_loops import DEADLINE_S, EXAMPLES, adam, external_runs, net, tape


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    with external_runs(tmp_path) as start:
        yield start


# ---- several processes as one machine

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
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(tmp_path), str(rank)],
            env=environment,
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
