"""What must not grow with a run: the synchronizer's memory, and what a restart reads."""

import gc
import shutil
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import pytest

from heloco.cluster.server.service import Service
from support.small_cluster import Clock, Hand, delta, opened

MACHINES = 4
SETTINGS = {"paces": [1.0] * MACHINES, "arrivals": 1_000_000, "checkpoint_every": 50, "inner_steps": 1}
FIRST, THEN, WINDOWS = 500, 100, 6
"""Arrivals: until all that is remembered of the last ones is there, and after that, so many times at most."""
GROWTH_LIMIT = 40 * THEN


def contribute(service: Service, machines: list[Hand], arrivals: int) -> None:
    """Each machine in turn takes a round and hands it in."""
    for number in range(arrivals):
        machine = machines[number % len(machines)]
        machine.take()
        machine.hand_in(delta(number % 50, 1e-3))
        service.housekeeping.tick()
        service.housekeeping.save_if_due(wait=True)


def held_bytes() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def restart_reads(folder: Path, copy: Path, digest: str) -> int:
    """Bytes that a restart reads of what a kill would leave now."""
    shutil.copytree(folder, copy)
    before = bytes_read()
    service = opened(copy, Clock(), **SETTINGS)
    read_size = bytes_read() - before
    assert service.state.run is not None and service.state.run.digest() == digest
    service.close()
    return read_size


def bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def growth(folder: Path) -> tuple[list[int], int]:
    """Bytes held more after each hundred arrivals until they are few, and bytes a restart reads more after all of them."""
    service = opened(folder / "run", Clock(), **SETTINGS)
    run = service.state.run
    assert run is not None
    machines = [Hand(service, f"machine-{i}") for i in range(MACHINES)]
    tracemalloc.start(1)
    contribute(service, machines, FIRST)
    first_read_size = restart_reads(folder / "run", folder / "first", run.digest())
    memory_sizes = [held_bytes()]
    for _ in range(WINDOWS):
        contribute(service, machines, THEN)
        memory_sizes.append(held_bytes())
        if memory_sizes[-1] - memory_sizes[-2] < GROWTH_LIMIT:
            break
    tracemalloc.stop()
    last_read_size = restart_reads(folder / "run", folder / "then", run.digest())
    service.close()
    return [after - before for before, after in pairwise(memory_sizes)], last_read_size - first_read_size


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="the system does not tell what a process reads")
def test_memory_and_what_a_restart_reads_do_not_grow_with_arrivals(tmp_path):
    # In a process of its own: threads and caches that earlier tests left would be counted as well.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
        memory_growths, read_growth = alone.submit(growth, tmp_path).result()
    assert min(memory_growths) < GROWTH_LIMIT  # what is kept of each arrival would show each time
    assert read_growth < 8 * len(memory_growths) * THEN
