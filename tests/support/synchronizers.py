"""Synchronizers over a model of two small blocks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from heloco.books import Books
from heloco.ledger import Ledger
from heloco.methods import METHODS
from heloco.policy import Drop, NormGuard, make_choice, make_weight
from heloco.rounds import Arrival, Contribution, Round
from heloco.synchronizer import Synchronizer

F64 = torch.float64


SHAPES = ((4,), (2, 3))


WORKERS = 3


def initial(dtype: torch.dtype = F64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(7)
    return [torch.randn(shape, generator=draw, dtype=dtype) for shape in SHAPES]


def build(
    method: str = "heloco",
    *,
    workers: int = WORKERS,
    parameters: list[Tensor] | None = None,
    buffers: list[Tensor] | None = None,
    drop: Drop | None = None,
    guard: NormGuard | None = None,
    weight: str = "",
    planned_arrivals: int = 0,
    **knobs: Any,
) -> Synchronizer:
    chosen = METHODS[method]
    return Synchronizer(
        chosen.build(initial() if parameters is None else parameters, workers=workers, **knobs),
        inner_steps=[2] * workers,
        windows_per_step=5,
        ledger=Ledger([1000] * workers),
        choose_shard=make_choice("fixed", workers=workers, shards=workers, seed=0),
        weight=make_weight(weight or chosen.weight),
        planned_arrivals=planned_arrivals,
        drop=drop,
        guard=guard,
        barrier=chosen.barrier,
        buffers=buffers or [],
    )


def answer(worker_round: Round, deltas: list[Tensor], buffers: list[Tensor] | None = None) -> Contribution:
    return Contribution(
        worker_round.worker,
        worker_round.index,
        worker_round.version,
        deltas,
        worker_round.buffers if buffers is None else buffers,
    )


def random_deltas(draw: torch.Generator, shapes: tuple[tuple[int, ...], ...] = SHAPES) -> list[Tensor]:
    return [torch.randn(shape, generator=draw, dtype=F64) for shape in shapes]


def close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def same(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def momenta(synchronizer: Synchronizer) -> list[Tensor]:
    assert synchronizer.outer is not None
    return [synchronizer.outer.state[p]["momentum_buffer"] for p in synchronizer.parameters]


@dataclass
class Snapshot:
    books: Books
    tensors: dict[str, Tensor]


def snapshot(synchronizer: Synchronizer) -> Snapshot:
    """A copy of the whole state."""
    return Snapshot(synchronizer.books(), {name: tensor.clone() for name, tensor in synchronizer.tensors().items()})


def arrive(synchronizer: Synchronizer, worker: int, deltas: list[Tensor]) -> Arrival:
    for each in range(WORKERS):
        if each not in synchronizer.rounds_under_way and each not in synchronizer.waiting:
            synchronizer.dispatch(each)
    round_under_way = synchronizer.rounds_under_way[worker]
    return synchronizer.receive(Contribution(worker, round_under_way.index, round_under_way.version, deltas))
