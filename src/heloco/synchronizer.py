"""The synchronizer: a state machine without clock, file, thread or network.

    dispatch(worker) -> Round          a worker's next round: its start, its data, its number of steps
    receive(Contribution) -> Arrival   applies, drops or refuses a contribution

Engines drive it: a virtual clock in a simulation, real workers on a cluster. It keeps the outer parameters and momentum (in the
outer rule), the buffers, the rounds under way, and the ledger of the data. Its memory does not grow with the number of workers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from heloco.barrier import Barrier, can_be_added
from heloco.books import Books, Reservation, RoundUnderWay
from heloco.buffers import are_usable, distances, largest, mix
from heloco.ledger import Ledger
from heloco.outer import NotFinite, OuterOptimizer, ScaleBlocks
from heloco.outer.kernels import Numbers
from heloco.outer.kernels.windows import Block, Release
from heloco.policy import ArrivalCounts, Choose, Drop, Judgement, NormGuard, NormHistory, Weight
from heloco.rounds import NOT_FINITE, Arrival, Contribution, Round, Verdict
from heloco.rulings import Judgements, Ruling, TooLarge, norms_as_tensor, norms_from_tensor
from heloco.wire import blocks

__all__ = ["NOT_FINITE", "Arrival", "Contribution", "Round", "Synchronizer", "Verdict"]


class Synchronizer:
    """The outer state of a run. `outer` is None for a schedule without training: then there are no tensors. `planned_arrivals`
    is the length of the run: rounds and weights depend on how far it is. 0: not known."""

    def __init__(
        self,
        outer: OuterOptimizer | None,
        *,
        inner_steps: Sequence[int],
        windows_per_step: int,
        ledger: Ledger,
        choose_shard: Choose,
        weight: Weight,
        planned_arrivals: int = 0,
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
        self.planned_arrivals = planned_arrivals
        self.drop = drop or Drop()
        self.guard = guard or NormGuard()
        self.barrier = barrier
        self.buffers = [b.detach().clone() for b in buffers]
        self.outer_step = 0
        self.arrivals = 0
        self.refused_in_a_row = 0
        self.rounds_of = [0] * self.workers
        self.arrivals_of = [0] * self.workers
        self.steps_of = [0] * self.workers
        """Inner steps of each worker's accepted contributions."""
        self.rounds_under_way: dict[int, RoundUnderWay] = {}
        """The round each worker holds, without its tensors."""
        self.reserved: dict[int, Reservation] = {}
        """The data of the next round of each worker that does not wait for its start."""
        self.norms = NormHistory(self.workers, [p.numel() for p in self.parameters])
        self._distances = NormHistory(self.workers, [1] * len(self.buffers))
        self._barrier = Barrier()
        self._start: list[Tensor] | None = None

    @property
    def parameters(self) -> list[Tensor]:
        """θ: the outer parameters, in the order of the outer rule's groups."""
        return [] if self.outer is None else [p for group in self.outer.param_groups for p in group["params"]]

    @property
    def thetas(self) -> list[Tensor]:
        """The parameters in the precision of the outer rule: float32 master copies for a model in half precision."""
        return [] if self.outer is None else self.outer.thetas()

    @property
    def theta_bytes(self) -> int:
        """The size of θ as the outer rule keeps it: at least 4 bytes per parameter."""
        return sum(p.numel() * max(4, p.element_size()) for p in self.parameters)

    @property
    def steps_accepted(self) -> int:
        """Inner steps of all accepted contributions."""
        return sum(self.steps_of)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Workers that have handed in and wait at the barrier."""
        return tuple(self._barrier.workers)

    # ---- dispatch

    def dispatch(self, worker: int, *, with_start: bool = True) -> Round:
        """The worker's next round. With `with_start=False` it has no tensors; the engine gets them one by one from `start`."""
        if worker in self.rounds_under_way:
            raise ValueError(
                f"worker {worker} already holds round {self.rounds_under_way[worker].index}: it must return or abandon it first."
            )
        if worker not in self.reserved:
            self.reserve(worker)
        data = self.reserved.pop(worker)
        data_terms = data.shard, data.spans, data.inner_steps, data.shard_steps, data.progress
        terms = worker, self.rounds_of[worker], self.outer_step, *data_terms
        self.rounds_under_way[worker] = RoundUnderWay(*terms)
        if self.outer is None or not with_start:
            return Round(*terms)
        if self._start is None:  # one look-ahead model for all rounds of this version
            self._start = self.outer.lookahead()
        return Round(*terms, parameters=self._start, buffers=list(self.buffers))

    def reserve(self, worker: int) -> Reservation:
        """Hands out the data of the worker's next round before that is dispatched: the worker need not wait for its start."""
        if worker in self.reserved:
            raise ValueError(f"worker {worker} has the data of its next round already.")
        index, steps = self.rounds_of[worker] + (worker in self.rounds_under_way), self.inner_steps[worker]
        shard = self.choose_shard(worker, index, self.ledger.pages)
        shard_steps = self.ledger.pages[shard].steps
        spans = self.ledger.take(shard, steps * self.windows_per_step, steps)
        self.reserved[worker] = Reservation(shard, spans, steps, shard_steps, self._progress(self.arrivals))
        return self.reserved[worker]

    def cancel(self, worker: int) -> None:
        """Takes the data of the worker's next round back."""
        data = self.reserved.pop(worker)
        self.ledger.give_back(data.shard, data.spans, data.inner_steps)

    def start(self, names: Iterable[str]) -> Iterator[Tensor]:
        """The start of the current version, in the order of these names (parameter.0, …, buffer.0, …). Large parameters come in
        flat slices, so that there is no second model in memory."""
        for name in names:
            kind, number = blocks.parse_block_name(name)
            if kind == blocks.BUFFER:
                yield self.buffers[number]
            elif self.outer is not None:
                yield from self.outer.lookahead_of(number)

    def abandon(self, worker: int) -> None:
        """Gives up the worker's round. Its data goes back to the ledger."""
        terms = self.rounds_under_way.pop(worker)
        self.ledger.give_back(terms.shard, terms.spans, terms.inner_steps)
        self.rounds_of[worker] += 1

    # ---- receive

    def _arrival_counts(self, worker: int, staleness: int) -> ArrivalCounts:
        arrivals = self.arrivals + 1
        return ArrivalCounts(
            staleness, self.arrivals_of[worker] + 1, arrivals, self.workers, self._step_share(worker), len(self.ledger.pages),
            self._progress(arrivals),
        )  # fmt: skip

    def _progress(self, arrivals: int) -> float:
        """The part of the run that is over after this many arrivals; 1 if its length is not known."""
        return min(1.0, arrivals / self.planned_arrivals) if self.planned_arrivals else 1.0

    def receive(self, contribution: Contribution) -> Arrival:
        """Applies, drops or refuses the contribution of a worker that holds a round, and says what became of it. A refused one
        changes nothing but the books: its data goes back to the ledger. Raises ValueError if the worker holds no such round."""
        worker = contribution.worker
        terms = self.rounds_under_way.get(worker)
        if terms is None or (terms.index, terms.version) != (contribution.index, contribution.version):
            expected = "none" if terms is None else f"round {terms.index} of version {terms.version}"
            claim = f"round {contribution.index} of version {contribution.version}"
            raise ValueError(f"worker {worker} handed in {claim}, but holds {expected}.")
        staleness = self.outer_step - terms.version
        counts = self._arrival_counts(worker, staleness)
        weight = self.weight(counts)
        if self.outer is not None:
            self.outer.counts = counts
        ruling = self._rule_on(contribution, terms, weight)
        if ruling.verdict == "refused":
            return self._refuse(terms, staleness, ruling)
        del self.rounds_under_way[worker]
        self.refused_in_a_row = 0
        self.rounds_of[worker] += 1
        self.arrivals_of[worker] += 1
        self.arrivals += 1
        self.steps_of[worker] += terms.inner_steps
        released = (worker,) if not self.barrier else self._open_barrier() if ruling.verdict == "applied" else ()
        has_stepped = self.outer is not None and ruling.verdict in ("applied", "zeroed")
        return Arrival(
            ruling.verdict, self.arrivals, self.outer_step, worker, terms.index, terms.version, staleness, weight,
            terms.shard, terms.spans, terms.inner_steps, released, ruling.code, ruling.reason, ruling.clipped,
            self.outer.outcomes if has_stepped and self.outer else [], self.outer.movements if has_stepped and self.outer else [],
        )  # fmt: skip

    def _step_share(self, worker: int) -> float:
        """The arriving worker's part of all inner steps, counted as if each worker had handed in one more round."""
        next_steps = self.inner_steps[worker]  # as many as this round has
        return (self.steps_of[worker] + 2 * next_steps) / (self.steps_accepted + next_steps + sum(self.inner_steps))

    def _refuse(self, terms: RoundUnderWay, staleness: int, ruling: Ruling) -> Arrival:
        self.abandon(terms.worker)
        if ruling.code != "norm":  # refusals for size do not count towards the end of the run
            self.refused_in_a_row += 1
        return Arrival(
            "refused", self.arrivals, self.outer_step, terms.worker, terms.index, terms.version, staleness, 0.0,
            terms.shard, terms.spans, terms.inner_steps, (terms.worker,), ruling.code, ruling.reason,
        )  # fmt: skip

    def _rule_on(self, contribution: Contribution, terms: RoundUnderWay, weight: float) -> Ruling:
        """Applies a contribution, or refuses it if its shapes are wrong, it is not finite, or it is far larger than usual."""
        if self.outer is not None and (mismatch := self._mismatch(contribution)):
            return mismatch
        try:
            if self.barrier:
                return self._gather(contribution, terms, weight)
            return self._apply(contribution, terms, weight)
        except NotFinite:
            return Ruling("refused", "not-finite", NOT_FINITE)
        except TooLarge as error:
            return Ruling("refused", "norm", str(error))

    def _apply(self, contribution: Contribution, terms: RoundUnderWay, weight: float) -> Ruling:
        staleness = self.outer_step - terms.version
        decision = self.drop(staleness)
        stale = f"staleness {staleness} is above {self.drop.max_staleness}"
        if decision == "skip":
            return Ruling("skipped", "stale", stale)
        ruling = Ruling("applied") if decision == "apply" else Ruling("zeroed", "stale", stale)
        if self.outer is not None and decision == "apply":
            ruling = self._guarded_step(contribution, terms, weight)
        elif self.outer is not None:
            self._step(contribution.pseudo_gradient, 0.0, release=contribution.release)
        self.outer_step += 1
        return ruling

    def _guarded_step(self, contribution: Contribution, terms: RoundUnderWay, weight: float) -> Ruling:
        """One outer step with the contribution, scaled down by the norm guard if necessary."""
        judgements = Judgements()

        def scale(squares: Numbers) -> Sequence[float]:
            nonlocal judgements
            judgements = self._judge(contribution, terms, squares)
            return judgements.blocks.scales

        self._step(contribution.pseudo_gradient, weight, scale if self.guard.is_on else None, contribution.release)
        self._mix_buffers(judgements.buffers_of(contribution, self.buffers), 1 / self.workers)
        return judgements.ruling("applied")

    def _judge(self, contribution: Contribution, terms: RoundUnderWay, squares: Numbers) -> Judgements:
        """The guard's judgement of a contribution by its sums Δ·Δ. Raises `TooLarge` if it is refused."""
        assert self.outer is not None
        participants = sum(worker in self.rounds_under_way or rounds > 0 for worker, rounds in enumerate(self.rounds_of))
        judgements = Judgements(
            self.guard.judge(
                self.norms, terms.worker, squares.tolist(), inner_steps=terms.inner_steps, participants=participants,
                model_norm=self.outer.norm,
            ),
            self._judge_buffers(contribution, terms, participants),
        )  # fmt: skip
        if judgements.is_outlier and self.guard.policy == "refuse":
            raise TooLarge(judgements.sentence)
        return judgements

    def _judge_buffers(self, contribution: Contribution, terms: RoundUnderWay, participants: int) -> Judgement:
        """Before there is a history, a buffer may move by ten times its own size or 10, and a counter by ten times the round's
        steps."""
        if not self.buffers:
            return Judgement()
        minimum = [1.0 if b.is_floating_point() or b.is_complex() else float(terms.inner_steps) for b in self.buffers]
        return self.guard.judge_buffers(
            self._distances, terms.worker, distances(self.buffers, contribution.buffers), participants=participants,
            at_first=list(map(max, largest(self.buffers), minimum)),
        )  # fmt: skip

    def _mismatch(self, contribution: Contribution) -> Ruling | None:
        for ours, theirs, subject in (
            (self.parameters, contribution.pseudo_gradient, "pseudo-gradient does"),
            (self.buffers, contribution.buffers, "buffers do"),
        ):
            if list(map(_shape, ours)) != list(map(_shape, theirs)):
                return Ruling("refused", "shapes", f"the {subject} not have the model's shapes")
        if not are_usable(self.buffers, contribution.buffers):
            return Ruling("refused", "buffers-not-finite", "the buffers hold NaN or Inf")
        return None

    def _step(
        self,
        pseudo_gradient: Sequence[Block],
        weight: float,
        scale: ScaleBlocks | None = None,
        release: Release | None = None,
    ) -> None:
        """One outer step. Raises `NotFinite` without any change if the pseudo-gradient is not finite."""
        assert self.outer is not None
        self.outer.step(weight=weight, pseudo_gradients=pseudo_gradient, scale=scale, release=release)
        self._start = None

    def _mix_buffers(self, worker_buffers: Sequence[Tensor], share: float) -> None:
        """Moves the buffers towards the worker's by `share`."""
        self.buffers = [mix(ours, theirs, share) for ours, theirs in zip(self.buffers, worker_buffers, strict=True)]

    # ---- barrier (synchronous) mode

    def _gather(self, contribution: Contribution, terms: RoundUnderWay, weight: float) -> Ruling:
        """Adds ρΔ to the sum. With the last worker's contribution, makes the outer step."""
        judgements = Judgements()
        if self.outer is not None:
            squares = self.outer.squares(contribution.pseudo_gradient, contribution.release)
            if not can_be_added(squares, self.parameters, max(1.0, weight * self.workers)):
                raise NotFinite(NOT_FINITE)
            if self.guard.is_on:
                judgements = self._judge(contribution, terms, squares)
        self._barrier.workers.append(contribution.worker)
        if self.outer is not None:
            weights = [weight * scale for scale in judgements.blocks.scales] or [weight] * len(self.parameters)
            buffers = judgements.buffers_of(contribution, self.buffers)
            self._barrier.add(self.parameters, contribution.pseudo_gradient, weights, buffers, contribution.release)
        if len(self._barrier.workers) < self.workers:
            return judgements.ruling("gathered")
        if self.outer is not None:
            self._step(self._barrier.sums, 1.0)  # finite: each contribution was checked as it came in
            self._mix_buffers(self._barrier.buffers, 1.0)
        self.outer_step += 1
        return judgements.ruling("applied")

    def _open_barrier(self) -> tuple[int, ...]:
        self._barrier.open()
        return tuple(range(self.workers))

    # ---- state

    def books(self) -> Books:
        """A copy of the state without its tensors."""
        return Books(
            outer_step=self.outer_step, arrivals=self.arrivals, refused_in_a_row=self.refused_in_a_row,
            rounds_of=list(self.rounds_of), arrivals_of=list(self.arrivals_of), steps_of=list(self.steps_of),
            inner_steps=list(self.inner_steps), gathered_workers=list(self._barrier.workers), ledger=self.ledger.copy_pages(),
            rounds_under_way=list(self.rounds_under_way.values()), reserved=dict(self.reserved),
            outer=[
                {name: value for name, value in state.items() if not isinstance(value, Tensor)} for state in self._outer_states()
            ],
        )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the state by name. They are no copies."""
        tensors: dict[str, Tensor] = {}
        if self.guard.is_on:
            tensors |= {"norms": norms_as_tensor(self.norms), "distances": norms_as_tensor(self._distances)}
        for kind, group in self._tensor_lists().items():
            tensors |= blocks.name_blocks(kind, group)
        return tensors | blocks.name_outer_states(self._outer_states())

    def _outer_states(self) -> list[dict[str, Any]]:
        """What the outer rule keeps, by block."""
        return [self.outer.state.get(p, {}) if self.outer else {} for p in self.parameters]

    def load(self, books: Books, tensors: Mapping[str, Tensor]) -> None:
        """Takes over copies of a state."""
        self.outer_step, self.arrivals, self.refused_in_a_row = books.outer_step, books.arrivals, books.refused_in_a_row
        self.rounds_of, self.arrivals_of = list(books.rounds_of), list(books.arrivals_of)
        self.steps_of, self.inner_steps = list(books.steps_of), list(books.inner_steps)
        self._barrier.workers = list(books.gathered_workers)
        self.ledger.load(books.ledger)
        self.rounds_under_way = {terms.worker: terms for terms in books.rounds_under_way}
        self.reserved = dict(books.reserved)

        device = self.parameters[0].device if self.parameters else torch.device("cpu")

        def copies_of(kind: str) -> list[Tensor]:
            names = [blocks.block_name(kind, index) for index in range(blocks.count_blocks(kind, tensors))]
            return [tensors[name].to(device, copy=True) for name in names]  # read from a file on access, one after the other

        self.buffers, self._barrier.sums = copies_of(blocks.BUFFER), copies_of(blocks.GATHERED)
        self._barrier.buffers = copies_of(blocks.GATHERED_BUFFER)
        self.norms = norms_from_tensor(tensors.get("norms"), self.norms)
        self._distances = norms_from_tensor(tensors.get("distances"), self._distances)
        self._start = None
        outer_states = blocks.outer_states_in(tensors)  # names: each tensor may be read from a file on access
        with torch.no_grad():
            for i, (p, plain) in enumerate(zip(self.parameters, books.outer, strict=True)):
                p.copy_(tensors[blocks.block_name(blocks.PARAMETER, i)])
                assert self.outer is not None
                outer_state = {part: tensors[name].to(p.device, copy=True) for part, name in outer_states.get(i, {}).items()}
                self.outer.state[p] = {**outer_state, **plain}

    def _tensor_lists(self) -> dict[str, list[Tensor]]:
        return {
            blocks.PARAMETER: [p.detach() for p in self.parameters],
            blocks.BUFFER: self.buffers,
            blocks.GATHERED: self._barrier.sums,
            blocks.GATHERED_BUFFER: self._barrier.buffers,
        }


_shape = attrgetter("shape")
