"""The synchronizer: a state machine without clock, file, thread or network.

    dispatch(worker) -> Round          what a worker is to do, from which parameters, on which data
    receive(Contribution) -> Arrival   what was made of what it handed back

Engines drive it: a virtual clock in a simulation, real workers on a cluster. It keeps the outer parameters and momentum (in the
outer rule), the buffers, who holds which round, and the ledger of the data. Its memory does not grow with the number of workers.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor

from heloco.ledger import Ledger, Span
from heloco.outer import NotFinite, Outcome, OuterOptimizer
from heloco.policy import Choose, Drop, NormGuard, Standing, Weight


@dataclass(slots=True)
class Round:
    """One worker's H inner steps: handed out by the synchronizer, the same whoever runs it."""

    worker: int
    index: int
    """The worker's rounds before this one that were accepted or refused."""
    version: int
    """The outer step at dispatch, s_i."""
    shard: int
    spans: tuple[Span, ...]
    inner_steps: int
    shard_steps: int
    """Inner steps handed out on this shard before this round: where a schedule positioned by shard stands."""
    run_steps: float
    """Inner steps accepted in the whole run before this round, over the number of workers: a schedule positioned by run."""
    parameters: list[Tensor] = field(default_factory=list, repr=False)
    """What the worker starts from. Shared between rounds: never written to."""
    buffers: list[Tensor] = field(default_factory=list, repr=False)
    memory: dict[str, Tensor] | None = field(default=None, repr=False)
    """What the worker keeps from its last round (its optimizer's state). It stays with the worker; engines only carry it."""


@dataclass(slots=True)
class Contribution:
    """What a worker hands back."""

    worker: int
    index: int
    version: int
    pseudo_gradient: list[Tensor] = field(default_factory=list, repr=False)
    buffers: list[Tensor] = field(default_factory=list, repr=False)
    loss: float | None = None
    """Mean training loss over the round."""
    last_loss: float | None = None
    samples: int = 0
    units: int = 0
    """What the task counts: tokens, or examples."""
    memory: dict[str, Tensor] | None = field(default=None, repr=False)


NOT_FINITE = "the pseudo-gradient holds NaN or Inf"
Verdict = Literal["applied", "zeroed", "skipped", "refused", "gathered"]


@dataclass(slots=True)
class Arrival:
    """What the synchronizer made of a contribution."""

    verdict: Verdict
    arrival: int
    """Accepted contributions so far, this one included."""
    outer_step: int
    """Outer steps so far, this one included."""
    worker: int
    round: int
    version: int
    staleness: int
    weight: float
    shard: int
    spans: tuple[Span, ...]
    inner_steps: int
    released: tuple[int, ...]
    """Workers that may start again now."""
    reason: str = ""
    outcomes: list[Outcome] = field(default_factory=list, repr=False)
    movements: list[float] = field(default_factory=list, repr=False)


class Synchronizer:
    """`outer` is None for a schedule without training: then only the books are kept."""

    def __init__(
        self,
        outer: OuterOptimizer | None,
        *,
        inner_steps: Sequence[int],
        windows_per_step: int,
        ledger: Ledger,
        choose_shard: Choose,
        weight: Weight,
        drop: Drop | None = None,
        guard: NormGuard | None = None,
        barrier: bool = False,
        buffers: Sequence[Tensor] = (),
    ) -> None:
        self.outer = outer
        self.workers = len(inner_steps)
        self.inner_steps = list(inner_steps)
        self.windows_per_step = windows_per_step
        self.ledger = ledger
        self.choose_shard = choose_shard
        self.weight = weight
        self.drop = drop or Drop()
        self.guard = guard or NormGuard()
        self.barrier = barrier
        self.buffers = [b.detach().clone() for b in buffers]
        self.outer_step = 0
        self.arrivals = 0
        self.steps_accepted = 0
        self.refused_in_a_row = 0
        self.rounds_of = [0] * self.workers
        self.arrivals_of = [0] * self.workers
        self.held: dict[int, Round] = {}
        """The round each worker holds, without its tensors."""
        self._gathered: list[Tensor] = []
        self._gathered_buffers: list[Tensor] = []
        self._gathered_workers: list[int] = []
        self._start: list[Tensor] | None = None

    @property
    def parameters(self) -> list[Tensor]:
        return [] if self.outer is None else [p for group in self.outer.param_groups for p in group["params"]]

    @property
    def waiting(self) -> tuple[int, ...]:
        """Workers that handed in and wait at the barrier for the others."""
        return tuple(self._gathered_workers)

    # ---- dispatch

    def dispatch(self, worker: int, *, with_start: bool = True) -> Round:
        """`with_start=False`: without tensors, for an engine that takes them one by one (`start`)."""
        if worker in self.held:
            raise ValueError(
                f"worker {worker} already holds round {self.held[worker].index}: it must return or abandon it first."
            )
        index, steps = self.rounds_of[worker], self.inner_steps[worker]
        shard = self.choose_shard(worker, index, self.ledger.pages)
        shard_steps = self.ledger.pages[shard].steps
        spans = self.ledger.take(shard, steps * self.windows_per_step, steps)
        run_steps = self.steps_accepted / self.workers
        held = Round(worker, index, self.outer_step, shard, spans, steps, shard_steps, run_steps)
        self.held[worker] = held
        if self.outer is None or not with_start:
            return held
        if self._start is None:  # one look-ahead model for all that start at this outer step
            self._start = self.outer.lookahead()
        return replace(held, parameters=self._start, buffers=list(self.buffers))

    def start(self, names: Iterable[str]) -> Iterator[Tensor]:
        """What a worker starts from now, in the order of these names (parameter.0, …, buffer.0, …), large parameters in flat
        slices: no second model in memory."""
        for name in names:
            kind, _, number = name.partition(".")
            if kind == "buffer":
                yield self.buffers[int(number)]
            elif self.outer is not None:
                yield from self.outer.lookahead_of(int(number))

    def abandon(self, worker: int) -> None:
        """A worker is gone or gave up: its data goes back to the ledger, its round counts for nothing."""
        held = self.held.pop(worker)
        self.ledger.give_back(held.shard, held.spans, held.inner_steps)
        self.rounds_of[worker] += 1

    # ---- receive

    def receive(self, contribution: Contribution) -> Arrival:
        worker = contribution.worker
        held = self.held.get(worker)
        if held is None or (held.index, held.version) != (contribution.index, contribution.version):
            raise ValueError(
                f"worker {worker} handed in round {contribution.index} of version {contribution.version}, "
                f"but holds {'none' if held is None else f'round {held.index} of version {held.version}'}."
            )
        staleness = self.outer_step - held.version
        standing = Standing(staleness, self.arrivals_of[worker] + 1, self.arrivals + 1, self.workers)
        weight = self.weight(standing)
        verdict, reason = self._guarded(contribution, staleness, weight)
        if verdict == "refused":
            return self._refuse(held, staleness, reason)
        del self.held[worker]
        self.refused_in_a_row = 0
        self.rounds_of[worker] += 1
        self.arrivals_of[worker] += 1
        self.arrivals += 1
        self.steps_accepted += held.inner_steps
        released = (worker,) if not self.barrier else self._open_barrier() if verdict == "applied" else ()
        stepped = self.outer is not None and verdict in ("applied", "zeroed")
        return Arrival(
            verdict, self.arrivals, self.outer_step, worker, held.index, held.version, staleness, weight,
            held.shard, held.spans, held.inner_steps, released, reason,
            self.outer.outcomes if stepped and self.outer else [], self.outer.movements if stepped and self.outer else [],
        )  # fmt: skip

    def _refuse(self, held: Round, staleness: int, reason: str) -> Arrival:
        self.abandon(held.worker)
        self.refused_in_a_row += 1
        return Arrival(
            "refused", self.arrivals, self.outer_step, held.worker, held.index, held.version, staleness, 0.0,
            held.shard, held.spans, held.inner_steps, (held.worker,), reason,
        )  # fmt: skip

    def _guarded(self, contribution: Contribution, staleness: int, weight: float) -> tuple[Verdict, str]:
        """What does not fit, or is far larger than usual, does not come near the parameters."""
        if self.outer is None:
            return self._apply(contribution, staleness, weight)
        if reason := self._mismatch(contribution):
            return "refused", reason
        if not self.guard.on:
            return self._apply(contribution, staleness, weight)
        norm = math.hypot(*_fetched(torch._foreach_norm(list(contribution.pseudo_gradient), 2, dtype=torch.float64)))
        if not math.isfinite(norm):
            return "refused", NOT_FINITE
        scale = self.guard.scale(norm)
        if scale == 1:
            return self._apply(contribution, staleness, weight)
        told = f"its norm, {norm:.4g}, is more than {self.guard.limit:g} × the usual one"
        if scale == 0:
            return "refused", told
        smaller = replace(contribution, pseudo_gradient=[d * scale for d in contribution.pseudo_gradient])
        verdict, reason = self._apply(smaller, staleness, weight)
        return verdict, f"{reason}; {told}: clipped" if reason else f"{told}: clipped"

    def _apply(self, contribution: Contribution, staleness: int, weight: float) -> tuple[Verdict, str]:
        if self.barrier:
            return self._gather(contribution, weight)
        decision = self.drop(staleness)
        stale = f"staleness {staleness} is above {self.drop.above}"
        if decision == "skip":
            return "skipped", stale
        if self.outer is not None:
            if not self._step(contribution.pseudo_gradient, 0.0 if decision == "zero" else weight):
                return "refused", NOT_FINITE
            self._mix_buffers(contribution.buffers, 0.0 if decision == "zero" else 1 / self.workers)
        self.outer_step += 1
        return ("zeroed", stale) if decision == "zero" else ("applied", "")

    def _mismatch(self, contribution: Contribution) -> str:
        for ours, theirs, what in (
            (self.parameters, contribution.pseudo_gradient, "pseudo-gradient does"),
            (self.buffers, contribution.buffers, "buffers do"),
        ):
            if list(map(_shape, ours)) != list(map(_shape, theirs)):
                return f"the {what} not have the model's shapes"
        if not _fit(self.buffers, contribution.buffers):
            return "the buffers hold NaN or Inf"
        return ""

    def _step(self, pseudo_gradient: Sequence[Tensor], weight: float) -> bool:
        """One outer step; False, and nothing has changed, where the pseudo-gradient is not finite."""
        assert self.outer is not None
        try:
            self.outer.step(weight=weight, pseudo_gradients=pseudo_gradient)
        except NotFinite:
            return False
        self._start = None
        return True

    def _mix_buffers(self, arrived: Sequence[Tensor], share: float) -> None:
        """Buffers (BatchNorm's statistics, say) move towards the worker's by its share; counters take the larger value."""
        if share:
            for i, (ours, theirs) in enumerate(zip(self.buffers, arrived, strict=True)):  # new tensors: rounds hold the old ones
                self.buffers[i] = _mixed(ours, theirs, share)

    # ---- barrier (synchronous) mode

    def _gather(self, contribution: Contribution, weight: float) -> tuple[Verdict, str]:
        """Adds ρΔ to the sum; the last of the workers makes the outer step with it."""
        self._gathered_workers.append(contribution.worker)
        if self.outer is not None:
            share = max(1.0, weight * self.workers)
            if not _squarable(contribution.pseudo_gradient, self.parameters, share):
                self._gathered_workers.pop()
                return "refused", NOT_FINITE
            self._gather_tensors(contribution, weight)
        if len(self._gathered_workers) < self.workers:
            return "gathered", ""
        if self.outer is not None:
            finite = self._step(self._gathered, 1.0)
            assert finite, "each contribution was checked as it came in"
            self._mix_buffers(self._gathered_buffers, 1.0)
        self.outer_step += 1
        return "applied", ""

    def _gather_tensors(self, contribution: Contribution, weight: float) -> None:
        if not self._gathered:
            own = zip(self.parameters, contribution.pseudo_gradient, strict=True)
            self._gathered = [d.to(p.device, p.dtype) * weight for p, d in own]
            self._gathered_buffers = [b.clone() for b in contribution.buffers]
            return
        for total, delta in zip(self._gathered, contribution.pseudo_gradient, strict=True):
            total.add_(delta.to(total.device, total.dtype), alpha=weight)
        share = 1 / len(self._gathered_workers)  # the mean so far moves by 1/2, 1/3, …: what is equal everywhere stays to the bit
        self._gathered_buffers = [_mixed(b, a, share) for b, a in zip(self._gathered_buffers, contribution.buffers, strict=True)]

    def _open_barrier(self) -> tuple[int, ...]:
        self._gathered, self._gathered_buffers, self._gathered_workers = [], [], []
        return tuple(range(self.workers))

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain values (`books`) and named tensors (`tensors`)."""
        books: dict[str, Any] = {
            "outer_step": self.outer_step,
            "arrivals": self.arrivals,
            "steps_accepted": self.steps_accepted,
            "refused_in_a_row": self.refused_in_a_row,
            "rounds_of": list(self.rounds_of),
            "arrivals_of": list(self.arrivals_of),
            "gathered_workers": list(self._gathered_workers),
            "norms": list(self.guard.recent),
            "ledger": self.ledger.state_dict(),
            "held": [
                [h.worker, h.index, h.version, h.shard, h.spans, h.inner_steps, h.shard_steps, h.run_steps]
                for h in self.held.values()
            ],
            "outer": [],
        }
        tensors: dict[str, Tensor] = {}
        for kind, group in self._tensor_lists().items():
            tensors |= {f"{kind}.{i}": t for i, t in enumerate(group)}
        for i, p in enumerate(self.parameters):
            state = self.outer.state.get(p, {}) if self.outer else {}
            tensors |= {f"outer.{i}.{name}": value for name, value in state.items() if isinstance(value, Tensor)}
            books["outer"].append({name: value for name, value in state.items() if not isinstance(value, Tensor)})
        return {"books": books, "tensors": tensors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        books, tensors = state["books"], state["tensors"]
        for name in ("outer_step", "arrivals", "steps_accepted", "refused_in_a_row"):
            setattr(self, name, books[name])
        self.rounds_of, self.arrivals_of = list(books["rounds_of"]), list(books["arrivals_of"])
        self._gathered_workers = list(books["gathered_workers"])
        self.guard.remember(books.get("norms", ()))
        self.ledger.load_state_dict(books["ledger"])
        self.held = {h[0]: Round(h[0], h[1], h[2], h[3], tuple((a, b) for a, b in h[4]), *h[5:8]) for h in books["held"]}

        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        of_block: dict[int, list[str]] = {}
        for name in tensors:
            if name.startswith("outer."):
                of_block.setdefault(int(name.split(".", 2)[1]), []).append(name)

        def numbered(kind: str) -> list[Tensor]:
            count = sum(1 for name in tensors if name.startswith(f"{kind}."))
            return [tensors[f"{kind}.{i}"].to(device, copy=True) for i in range(count)]

        self.buffers, self._gathered = numbered("buffer"), numbered("gathered")
        self._gathered_buffers = numbered("gathered_buffer")
        self._start = None
        with torch.no_grad():
            for i, (p, plain) in enumerate(zip(self.parameters, books["outer"], strict=True)):
                p.copy_(tensors[f"parameter.{i}"])
                assert self.outer is not None
                kept = {n.split(".", 2)[2]: tensors[n].to(p.device, copy=True) for n in of_block.get(i, ())}
                self.outer.state[p] = {**kept, **plain}

    def _tensor_lists(self) -> dict[str, list[Tensor]]:
        return {
            "parameter": [p.detach() for p in self.parameters],
            "buffer": self.buffers,
            "gathered": self._gathered,
            "gathered_buffer": self._gathered_buffers,
        }


_shape = attrgetter("shape")


def _squarable(deltas: Sequence[Tensor], parameters: Sequence[Tensor], share: float) -> bool:
    """Whether all blocks are finite, and small enough for an outer rule to square the sum of all workers' blocks like them."""
    norms = _fetched(torch._foreach_norm(list(deltas), 2, dtype=torch.float64)) if deltas else []
    most = [torch.finfo(torch.promote_types(p.dtype, torch.float32)).max for p in parameters]
    return all(x * share < 0.5 * math.sqrt(y) for x, y in zip(norms, most, strict=True))  # a NaN is not below anything


def _fit(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether all buffers are finite, but for what is infinite in ours too (a mask of −∞, say)."""
    pairs = [(x, y.to(x.device)) for x, y in zip(ours, theirs, strict=True)]
    return all(_fetched([(y.isfinite() | (y == x)).all() for x, y in pairs]))


def _fetched(numbers: Sequence[Tensor]) -> list[float]:
    """Tensors of one number each, with one transfer from their device for all of them."""
    return [float(x) for x in torch.stack([n.to(numbers[0].device) for n in numbers]).tolist()] if numbers else []


def _mixed(ours: Tensor, theirs: Tensor, share: float) -> Tensor:
    """A buffer moved towards the other one by `share`; counters take the larger value, infinite entries the finite one."""
    theirs = theirs.to(ours.device)
    if not (ours.is_floating_point() or ours.is_complex()):
        return torch.maximum(ours, theirs)
    mixed = torch.lerp(ours, theirs.to(ours.dtype), share)
    return torch.where(theirs.isfinite(), torch.where(ours.isfinite(), mixed, theirs), ours)
