"""The virtual clock: what a cluster of unequal machines would do, event by event, in as little real time as the steps take.

Time is counted in whole nanoseconds, so that two workers that finish together do so exactly. Events are ordered by (time,
priority, worker): at one instant all arrivals come before any start, lower worker first. Five equal workers therefore have
staleness 0, 1, 2, 3, 4. A grace period keeps that window open: after a first arrival nobody starts again for `grace_s`.

A simulation computes nothing itself. It is asked for the rounds it needs and given their results, so that one loop can run a
round at a time, or many simulations can share one device:

    while not simulation.finished:
        if (arrival := simulation.advance()) is None:          # the next arrival needs a result
            simulation.give(inner.run([simulation.next_needed()])[0])
"""

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct
from torch import Tensor

from heloco.engine.simulated_links import LinkState, SimulatedLinks
from heloco.records.tape import Traffic
from heloco.rounds import Overlap
from heloco.synchronizer import Arrival, Contribution, Round, Synchronizer
from heloco.wire import blocks

NS = 1_000_000_000
RESERVE, ARRIVE, START, QUEUE = 0, 1, 2, 3  # priorities within one instant
Memory = dict[str, Tensor] | None
"""What a worker keeps from its last round; None before the first."""


class ClockState(Struct, frozen=True, kw_only=True):
    """A simulation's state without its tensors, in addition to the synchronizer's."""

    now_ns: int
    started_ns: list[int]
    """When each worker's round began."""
    window_end_ns: int
    events: list[tuple[int, int, int]]
    memories: list[bool]
    """Whether each worker has optimizer state from an earlier round."""
    links: LinkState | None
    ended_ns: list[int]
    """With overlap: when each worker ends the inner steps of its round."""
    merge_steps: dict[int, list[int]]
    """With overlap: after how many inner steps each block of a start is merged, for the round under way of each worker."""


class Simulation:
    """A virtual clock that drives a synchronizer: workers of given paces hand in their rounds in the order of time.

        while not simulation.finished:
            if simulation.advance() is None:                            # the clock waits for a result
                simulation.give(compute(simulation.next_needed()))

    It computes no training itself, so results may come from anywhere and in any order. `heloco.simulate` does all of this."""

    def __init__(
        self,
        synchronizer: Synchronizer,
        *,
        paces_s: Sequence[float],
        arrivals: int,
        grace_s: float = 0.0,
        share: Callable[[int, list[Memory]], Memory] | None = None,
        links: SimulatedLinks | None = None,
    ) -> None:
        """`share` makes the optimizer's state that a worker starts with from its number and what each worker kept. Without
        `links` everything travels at once and as it is."""
        assert len(paces_s) == synchronizer.workers
        self._share = share
        self.links = links
        self.synchronizer = synchronizer
        self.budget = arrivals
        self.now_ns = 0
        self.started_ns = [0] * len(paces_s)
        self.memory: list[Memory] = [None] * len(paces_s)
        self._pace_ns = [round(pace * NS) for pace in paces_s]
        self._grace_ns = round(grace_s * NS)
        self._window_end_ns = -1
        self._busy_until_ns = 0
        """When the synchronizer has taken in what waits for it, where that takes time. Only schedules have this."""
        self._events: list[tuple[int, int, int]] = [(0, START, worker) for worker in range(len(paces_s))]  # sorted: a heap
        self._ends: list[list[Tensor] | None] = [None] * len(paces_s)
        """With overlap: the parameters that each worker had at the end of its last accepted round."""
        self._ended_ns = [0] * len(paces_s)
        """With overlap: when each worker ends the inner steps of its round."""
        self._rounds: dict[int, Round] = {}
        self._results: dict[int, Contribution] = {}

    @property
    def now_s(self) -> float:
        """Virtual seconds since the start of the run."""
        return self.now_ns / NS

    @property
    def finished(self) -> bool:
        """Whether all arrivals of the run are in."""
        return self.synchronizer.arrivals >= self.budget

    def traffic(self, worker: int) -> Traffic:
        """The bytes that the worker's last round moved, both ways."""
        return Traffic(self.links.bytes_down[worker], self.links.sizes.contribution) if self.links else Traffic()

    def needed(self) -> list[Round]:
        """The rounds under way whose results were not given yet, the next to arrive first."""
        waiting = sorted(event for event in self._events if event[1] == ARRIVE and event[2] not in self._results)
        return [self._rounds[worker] for _, _, worker in waiting]

    def next_needed(self) -> Round:
        """The round that the clock waits for: `needed()[0]` without the sorting, after `advance` returned None."""
        return self._rounds[self._events[0][2]]

    def give(self, contribution: Contribution) -> None:
        """The result of a needed round. It takes effect when the clock comes to its arrival."""
        worker, open_round = contribution.worker, self._rounds.get(contribution.worker)
        key = (contribution.index, contribution.version)
        is_awaited = open_round is not None and (open_round.index, open_round.version) == key
        if not is_awaited or worker in self._results:
            raise ValueError(f"nobody asked for round {contribution.index} (version {contribution.version}) of worker {worker}.")
        self._results[worker] = contribution

    def advance(self) -> tuple[Arrival, Contribution] | None:
        """Runs the clock to the next arrival; None where that waits for a result (see `needed`)."""
        while not self.finished:
            time, priority, worker = self._events[0]
            if priority == ARRIVE and worker not in self._results:
                return None
            heapq.heappop(self._events)
            self.now_ns = time
            if priority == ARRIVE:
                return self._arrive(worker)
            if priority == START:
                self._start(worker)
            elif priority == QUEUE:
                self._queue(worker)
            else:
                self.synchronizer.reserve(worker)
        return None

    def _start(self, worker: int) -> None:
        worker_round = self.synchronizer.dispatch(worker)
        worker_round.memory = self._share(worker, self.memory) if self._share else self.memory[worker]
        self._rounds[worker] = worker_round
        self.started_ns[worker] = self.now_ns
        download_ns, upload_ns = (self.links.deliver(worker_round), self.links.upload_ns(worker)) if self.links else (0, 0)
        start_at_ns = self.now_ns + download_ns
        computing_ns = worker_round.inner_steps * self._pace_ns[worker]
        if self.links is None or not self.links.options.overlap:
            self._expect(worker, start_at_ns + computing_ns + upload_ns)
            return
        worker_round.overlap = self._overlap(worker_round, start_at_ns)
        begin_ns = start_at_ns if self._ends[worker] is None else self._ended_ns[worker]
        self._ended_ns[worker] = max(begin_ns + computing_ns, start_at_ns)
        heapq.heappush(self._events, (self._ended_ns[worker], RESERVE, worker))
        self._expect(worker, self._ended_ns[worker] + upload_ns)

    def _expect(self, worker: int, time_ns: int) -> None:
        """Notes when the worker's contribution will have travelled to the synchronizer."""
        is_queued = self.links is not None and self.links.taking_in_ns > 0
        heapq.heappush(self._events, (time_ns, QUEUE if is_queued else ARRIVE, worker))

    def _queue(self, worker: int) -> None:
        """The contribution is there, and arrives when those before it are taken in and it is too."""
        assert self.links is not None
        self._busy_until_ns = max(self.now_ns, self._busy_until_ns) + self.links.taking_in_ns
        heapq.heappush(self._events, (self._busy_until_ns, ARRIVE, worker))

    def _overlap(self, worker_round: Round, start_at_ns: int) -> Overlap:
        """When the blocks of a start are merged: after the inner steps that the worker has done by the time they arrive."""
        assert self.links is not None
        worker = worker_round.worker
        if self._ends[worker] is None:
            return Overlap(self.links.options.merge_share)
        waits_ns = [start_at_ns - early_ns - self._ended_ns[worker] for early_ns in self.links.early_ns(worker)]
        merge_steps = [min(worker_round.inner_steps, max(0, ns // self._pace_ns[worker])) for ns in waits_ns]
        return Overlap(self.links.options.merge_share, merge_steps, self._ends[worker])

    def _arrive(self, worker: int) -> tuple[Arrival, Contribution]:
        contribution = self._results.pop(worker)
        if self.links:
            contribution = self.links.collect(contribution)
        arrival = self.synchronizer.receive(contribution)
        del self._rounds[worker]
        if self.links:
            self.links.note(arrival)
        if arrival.verdict != "refused":
            self.memory[worker] = contribution.memory
        self._ends[worker] = contribution.end if arrival.verdict != "refused" else None
        if self.now_ns > self._window_end_ns:
            self._window_end_ns = self.now_ns + self._grace_ns
        for released in arrival.released:
            heapq.heappush(self._events, (self._window_end_ns, START, released))
        return arrival, contribution

    @property
    def _makes_starts(self) -> bool:
        return self.links is not None and self.links.makes_starts

    # ---- state: what `resume` needs in addition to the synchronizer's state

    def clock(self) -> ClockState:
        """A copy of the state without its tensors."""
        return ClockState(
            now_ns=self.now_ns, started_ns=list(self.started_ns), window_end_ns=self._window_end_ns, events=sorted(self._events),
            memories=[memory is not None for memory in self.memory], links=self.links.state() if self.links else None,
            ended_ns=list(self._ended_ns),
            merge_steps={worker: each.overlap.merge_steps for worker, each in self._rounds.items() if each.overlap},
        )  # fmt: skip

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the state by name. They are no copies."""
        tensors = self.links.tensors() if self.links else {}
        for worker, under_way in self._rounds.items():
            # rounds of one version start from the same tensors: kept once
            if not self._makes_starts:
                tensors |= {f"start.{under_way.version}.{i}": t for i, t in enumerate(under_way.parameters)}
            tensors |= {f"start_buffer.{under_way.version}.{i}": t for i, t in enumerate(under_way.buffers)}
            if self._share:  # others have arrived since: it could not be made again
                tensors |= {f"shared.{worker}.{name}": t for name, t in (under_way.memory or {}).items()}
        for worker, memory in enumerate(self.memory):
            tensors |= {f"memory.{worker}.{name}": t for name, t in (memory or {}).items()}
            tensors |= blocks.name_worker_blocks(blocks.END, worker, dict(enumerate(self._ends[worker] or [])))
        return tensors

    def load(self, clock: ClockState, tensors: Mapping[str, Tensor]) -> None:
        """Takes up where the state was saved. The synchronizer must have been loaded before. Results not yet applied are asked
        for again: a round is a function of what it was handed."""
        self.now_ns, self._window_end_ns = clock.now_ns, clock.window_end_ns
        self.started_ns, self._events = list(clock.started_ns), list(clock.events)
        self._results = {}
        self.memory = [
            dict(_under(f"memory.{worker}.", tensors)) if has_memory else None for worker, has_memory in enumerate(clock.memories)
        ]
        if self.links and clock.links:
            self.links.load(clock.links, tensors)
        self._ended_ns = list(clock.ended_ns)
        ends = [blocks.worker_blocks(blocks.END, worker, tensors) for worker in range(len(self.memory))]
        self._ends = [[end[i] for i in range(len(end))] if end else None for end in ends]
        self._rounds = {}
        for worker, terms in self.synchronizer.rounds_under_way.items():
            start = [t for _, t in sorted(_under(f"start.{terms.version}.", tensors), key=lambda item: int(item[0]))]
            self._rounds[worker] = Round(
                worker, terms.index, terms.version, terms.shard, terms.spans, terms.inner_steps,
                terms.shard_steps, terms.progress,
                self.links.start_of(worker) if self.links and self._makes_starts else start,
                [t for _, t in sorted(_under(f"start_buffer.{terms.version}.", tensors), key=lambda item: int(item[0]))],
                (dict(_under(f"shared.{worker}.", tensors)) or None) if self._share else self.memory[worker],
            )  # fmt: skip
            if self.links and worker in clock.merge_steps:
                share, merge_steps = self.links.options.merge_share, clock.merge_steps[worker]
                self._rounds[worker].overlap = Overlap(share, merge_steps, self._ends[worker])


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    return ((name.removeprefix(prefix), tensor) for name, tensor in tensors.items() if name.startswith(prefix))
