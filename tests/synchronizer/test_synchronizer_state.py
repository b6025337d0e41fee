"""The synchronizer's state continues to the bit in a fresh one, and its memory is bounded."""

import gc
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from heloco.methods import METHODS
from heloco.policy import Drop, NormGuard
from heloco.synchronizer import Contribution, Synchronizer
from support.states import through_json
from support.synchronizers import F64, WORKERS, build, random_deltas, snapshot

# ---- state


def drive(synchronizer: Synchronizer, draw: torch.Generator, arrivals: int) -> list[tuple[Any, ...]]:
    """The workers take turns with a limp, in rounds of changing length; every eleventh contribution is bad. Returns what was made
    of each."""
    history = []
    while len(history) < arrivals:
        n = synchronizer.arrivals + sum(synchronizer.rounds_of)
        for worker in range(WORKERS):
            if worker not in synchronizer.rounds_under_way and worker not in synchronizer.waiting:
                synchronizer.inner_steps[worker] = 1 + (n + worker) % 3  # as on real machines under DyLU
                synchronizer.dispatch(worker)
        ready = sorted(synchronizer.rounds_under_way)
        worker = ready[(n * n) % len(ready)]
        current_round = synchronizer.rounds_under_way[worker]
        deltas = random_deltas(draw)
        if n % 11 == 10:
            deltas[0][0] = torch.nan
        buffers = [torch.randn(2, generator=draw, dtype=F64), torch.tensor(n)]
        arrival = synchronizer.receive(Contribution(worker, current_round.index, current_round.version, deltas, buffers))
        history.append(
            (arrival.verdict, worker, arrival.round, arrival.version, arrival.staleness, arrival.weight, arrival.spans)
        )
    return history


@pytest.mark.parametrize("cut", [0, 1, 4, 5, 6, 13])
@pytest.mark.parametrize("method", METHODS)
def test_loaded_into_a_fresh_one_the_state_continues_to_the_bit(method, cut):
    def fresh() -> Synchronizer:
        buffers = [torch.zeros(2, dtype=F64), torch.tensor(0)]
        drop = None if METHODS[method].barrier else Drop("zero", max_staleness=4)
        weight = METHODS[method].weight_for("flexible")
        return build(method, buffers=buffers, drop=drop, guard=NormGuard(1.5), weight=weight, planned_arrivals=40)

    draw = torch.Generator().manual_seed(9)
    first = fresh()
    history = drive(first, draw, cut)
    at_cut = draw.get_state()
    saved = snapshot(first)
    history += drive(first, draw, 14)

    second = fresh()
    for p in second.parameters:
        p.data.fill_(torch.nan)  # what the state does not bring would show
    second.load(through_json(saved.books), saved.tensors)
    draw.set_state(at_cut)
    assert drive(second, draw, 14) == history[cut:]
    ours, theirs = snapshot(first), snapshot(second)
    assert ours.books == theirs.books
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(tensor, theirs.tensors[name]) for name, tensor in ours.tensors.items())


class ReadOnAccess(Mapping[str, Tensor]):
    """Tensors that are made anew on each access, as those of a file are. Counts those that are in memory at once."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._in_memory: weakref.WeakSet[Tensor] = weakref.WeakSet()
        self.most_in_memory = 0

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name].clone()
        self._in_memory.add(tensor)
        self.most_in_memory = max(self.most_in_memory, len(self._in_memory))
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


@pytest.mark.parametrize("method", ["heloco-ramp", "delayed-nesterov", "sync-nesterov"])
def test_a_state_is_loaded_block_by_block(method):
    first, second = (build(method, buffers=[torch.zeros(2, dtype=F64), torch.tensor(0)]) for _ in range(2))
    drive(first, torch.Generator().manual_seed(9), 7)
    saved = snapshot(first)
    tensors = ReadOnAccess(saved.tensors)
    second.load(saved.books, tensors)
    assert len(tensors) >= 6 and tensors.most_in_memory <= 2
    assert all(torch.equal(tensor, snapshot(second).tensors[name]) for name, tensor in saved.tensors.items())


def test_the_cuts_above_lie_within_a_barrier_and_within_a_delay():
    draw = torch.Generator().manual_seed(9)
    synchronizer = build("sync-nesterov", buffers=[torch.zeros(2, dtype=F64), torch.tensor(0)])
    drive(synchronizer, draw, 5)
    assert len(synchronizer.books().gathered_workers) == 2
    assert "gathered.0" in synchronizer.tensors()
    draw.manual_seed(9)
    synchronizer = build("delayed-nesterov", buffers=[torch.zeros(2, dtype=F64), torch.tensor(0)])
    drive(synchronizer, draw, 5)
    assert synchronizer.books().outer[0] == {"arrivals": 5}  # of 3: two in the sum
    assert synchronizer.tensors()["outer.0.pseudo_gradient_sum"].any()


# ---- memory


def held_bytes(thing: object) -> int:
    """The tensor memory that can be reached from an object, each storage once."""
    ids: set[int] = set()
    storages: dict[int, int] = {}
    queue = [thing]
    while queue:
        item = queue.pop()
        if id(item) in ids or isinstance(item, type | types.ModuleType | types.FunctionType | types.BuiltinFunctionType):
            continue
        ids.add(id(item))
        if isinstance(item, Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        queue.extend(gc.get_referents(item))
    return sum(storages.values())


@pytest.mark.parametrize(("method", "copies"), [("heloco", 3), ("mla", 3), ("async-nesterov", 3), ("sync-nesterov", 4)])
@pytest.mark.parametrize("workers", [2, 50])
def test_memory_is_a_multiple_of_the_model_whatever_the_number_of_workers(method, copies, workers):
    """Parameters, momentum and one start for all; behind a barrier the sum as well. Staleness makes no difference."""
    size = 1000
    synchronizer = build(method, workers=workers, parameters=[torch.zeros(size)])

    def round_of(worker: int) -> tuple[int, int]:
        worker_round = synchronizer.dispatch(worker)  # the worker has the tensors; here they are let go
        return worker_round.index, worker_round.version

    under_way = {worker: round_of(worker) for worker in range(workers)}
    for worker in [*range(workers), *range(workers // 2)]:
        index, version = under_way[worker]
        arrival = synchronizer.receive(Contribution(worker, index, version, [torch.ones(size)]))
        for released in arrival.released:
            under_way[released] = round_of(released)
    assert len(synchronizer.rounds_under_way) == (workers if method != "sync-nesterov" else workers - workers // 2)
    assert held_bytes(synchronizer) == copies * size * 4
