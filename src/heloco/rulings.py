"""What the synchronizer decides about a contribution before it counts it, and the norms that it remembers for that."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from heloco.buffers import shorten
from heloco.policy import Judgement, NormHistory
from heloco.policy.norms import KEPT
from heloco.rounds import ArrivalCode, Contribution, Verdict


@dataclass(frozen=True, slots=True)
class Ruling:
    """The verdict on a contribution: the part of an `Arrival` that is decided first."""

    verdict: Verdict
    code: ArrivalCode = ""
    reason: str = ""
    clipped: float = 1.0


@dataclass(frozen=True, slots=True)
class Judgements:
    """The norm guard's judgements of a contribution: of its blocks, and of its buffers."""

    blocks: Judgement = field(default_factory=Judgement)
    buffers: Judgement = field(default_factory=Judgement)

    @property
    def is_outlier(self) -> bool:
        """Whether a norm of the blocks or of the buffers is above its bound."""
        return self.blocks.is_outlier or self.buffers.is_outlier

    @property
    def sentence(self) -> str:
        """For people: which norm is how far above its bound. The blocks' comes first, and it is empty if no norm is."""
        return (self.blocks if self.blocks.is_outlier else self.buffers).sentence

    def buffers_of(self, contribution: Contribution, ours: Sequence[Tensor]) -> Sequence[Tensor]:
        """The worker's buffers as far as they are trusted. If its Δ was an outlier, its buffers may be spoiled too: then ours."""
        if self.blocks.is_outlier:
            return ours
        if not self.buffers.scales:
            return contribution.buffers
        return list(map(shorten, ours, contribution.buffers, self.buffers.scales))

    def ruling(self, verdict: Verdict) -> Ruling:
        """The ruling on a contribution that is used, scaled down or unchanged."""
        if not self.is_outlier:
            return Ruling(verdict)
        clipped = min(self.blocks.smallest_scale, self.buffers.smallest_scale)
        return Ruling(verdict, "norm", f"{self.sentence}: clipped", clipped)


class TooLarge(Exception):
    """The norm guard refuses the contribution. Only the guard's history has changed."""


def norms_as_tensor(history: NormHistory) -> Tensor:
    """A tensor (worker, row, norm), with zeros for rows that do not exist yet."""
    rows = history.rows()
    table = torch.zeros(len(rows), KEPT, 1 + len(history.sizes), dtype=torch.float64)
    for worker, worker_rows in enumerate(rows):
        if worker_rows:
            table[worker, : len(worker_rows)] = torch.tensor(worker_rows, dtype=torch.float64)
    return table


def norms_from_tensor(table: Tensor | None, template: NormHistory) -> NormHistory:
    """The history in a checkpoint; empty if that was written without a guard."""
    history = NormHistory(len(template.rows()), template.sizes)
    if table is not None:
        history.load([[row for row in worker_rows if row[0] > 0] for worker_rows in table.tolist()])
    return history
