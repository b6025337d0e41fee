"""Many simulations on one device: every running one is asked for the rounds it needs next, and a stack runs them together.

    while some run is unfinished:
        pick as many needed rounds as the stack is wide      # of whatever runs
        begin to run them as one model                       # inner/stacked.py
        hand those begun before their results; their clocks go on as far as they can

Who comes first: a round is urgent when the steps that must follow it one upon the other would take about as long as everything
that is left takes at full width; urgent rounds go first, longest chain first. Else first come, first served, so that runs finish
one after the other and an interrupted study keeps most of what it did. The stack stays full to the end that way, as long as it is
no wider than all steps over the longest chain. On a GPU two waves of half that width are under way: while one is computed, the
host takes in the results of the other.

A stack trains one architecture with one kind of inner optimizer. Runs of another kind begin when the last of those before has
ended: otherwise the two kinds would take the device's memory from each other, and each would record its stack again and again.
"""

import copy
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from heloco.engine.build import file_sizes
from heloco.engine.determinism import deterministic_algorithms
from heloco.engine.local import Collector, LocalRun, Observer, StopRequested
from heloco.engine.schedule import chains, planned_arrivals
from heloco.engine.stack_limits import SLICE_COPIES, WIDEST, free_memory, model_bytes, run_bytes
from heloco.errors import RunStopped, UserError
from heloco.inner import InnerOptions
from heloco.inner.stacked import Job, Results, StackedInner, check_stackable, kind_of
from heloco.run import RunConfig, RunFolder
from heloco.synchronizer import Round
from heloco.task import Task
from heloco.task.language import LanguageTask
from heloco.task.rounding import rounded_products

URGENT = 0.9  # of the time that is left
WAVES = {"cuda": 2, "cpu": 1}  # under way at a time
SHARE_OF_RUNS = 0.5  # of the free memory; the stack takes what it needs of the rest


@dataclass(frozen=True)
class PlannedRun:
    """A run to be carried out. `config` is resolved."""

    key: str
    task: Task
    config: RunConfig
    folder: RunFolder | None = None
    """The folder that the run is written to. Its records then go to `observers`, and are not collected."""
    observers: Sequence[Observer] = ()


class Watcher(Protocol):
    """Is told how far the runs of a fleet are, and gets the records of each run that ends."""

    def on_progress(self, steps_done: int, steps_total: int) -> None:
        """Called after each wave with the inner steps that are done and those of all runs."""

    def on_finish(self, key: str, collector: Collector) -> None:
        """Called with the tape and evaluations of a run that reached its last arrival; empty if the run has a folder."""

    def on_divergence(self, key: str, reason: str, collector: Collector) -> None:
        """Called with what there is of a run that was stopped because its numbers are not finite."""


def run_fleet(
    planned_runs: Sequence[PlannedRun], watcher: Watcher, *, device: torch.device, is_stopping: Callable[[], bool] = lambda: False
) -> None:
    """Carries out all runs; `StopRequested` when `is_stopping()` turned true. Those that ended were handed to the watcher."""
    carry_out(Fleet(planned_runs, watcher, device, is_stopping))


def carry_out(fleet: "Fleet") -> None:
    """Runs the fleet with what its device does best."""
    deterministic = any(member.planned_run.config.run.deterministic for member in fleet.waiting)
    with deterministic_algorithms(deterministic), rounded_products(fleet.device), host_work_first(fleet.device):
        fleet.run()


def host_work_first(device: torch.device) -> AbstractContextManager[Any]:
    """On a GPU, a stream of high priority for everything but the stacks.

    Taking in a result is many small kernels, and the host waits for them at every arrival. At equal priority each of them would
    wait for the large kernels of the stack that runs at the same time.
    """
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


StackKey = tuple[Hashable, InnerOptions]


@dataclass
class _Member:
    """A run and what its schedule, which needs no training, tells beforehand."""

    order: int
    planned_run: PlannedRun
    chains: dict[tuple[int, int], int]
    steps_left: int
    run: LocalRun | None = None
    collector: Collector = field(default_factory=Collector)
    busy_workers: set[int] = field(default_factory=set)
    """Workers whose rounds are being computed."""

    def make_run(self, model: nn.Module) -> LocalRun:
        """The run itself. `model` has the task's initial parameters."""
        plan = self.planned_run
        has_folder = plan.folder is not None
        observers: list[Observer] = list(plan.observers) if has_folder else [self.collector]
        return LocalRun(plan.task, plan.config, folder=plan.folder, observers=observers, model=model, block_numbers=has_folder)

    @property
    def stack_key(self) -> StackKey:
        """Runs with equal keys can share a stack."""
        task = self.planned_run.task
        model = (task.model_config, task.context) if isinstance(task, LanguageTask) else id(task)
        return model, kind_of(self.planned_run.config.inner)

    def needed(self) -> list[Round]:
        """Those of the rounds under way that arrive before the end (or, after refusals, the one that the clock waits for)."""
        assert self.run is not None
        simulation = self.run.simulation
        scheduled = [
            worker_round for worker_round in simulation.needed() if (worker_round.worker, worker_round.index) in self.chains
        ]
        return [
            worker_round
            for worker_round in scheduled or [simulation.next_needed()]
            if worker_round.worker not in self.busy_workers
        ]

    def chain(self, worker_round: Round) -> int:
        return self.chains.get((worker_round.worker, worker_round.index), worker_round.inner_steps)


Wave = list[tuple[_Member, Round]]


class Fleet:
    """Carries out many runs on one device. `run_fleet` is the usual way to use it."""

    def __init__(
        self, planned_runs: Sequence[PlannedRun], watcher: Watcher, device: torch.device, is_stopping: Callable[[], bool]
    ) -> None:
        self.watcher, self.device, self.is_stopping = watcher, device, is_stopping
        members = [make_member(order, each) for order, each in enumerate(planned_runs)]
        keys = list(dict.fromkeys(member.stack_key for member in members))
        self.waiting = sorted(members, key=lambda member: keys.index(member.stack_key))
        self.running: list[_Member] = []
        self.steps_total = sum(member.steps_left for member in self.waiting)
        self.steps_done = 0
        self._memory = free_memory(device)
        self._waves = WAVES.get(device.type, 1)
        self._key: StackKey | None = None
        """The stack key of the runs that are under way."""
        self._inner: StackedInner | None = None
        """The inner loop that computes the rounds of these runs."""
        self._wanted_width = 1
        self._models: dict[int, nn.Module] = {}

    def run(self) -> None:
        """Carries out all runs. Raises `StopRequested` when `is_stopping()` turns true."""
        under_way: deque[tuple[Wave, Results]] = deque()
        while self.waiting or self.running:
            self._admit()
            while len(under_way) < self._waves and (wave := self._pick()):
                under_way.append((wave, self._begin(wave)))
            if self.is_stopping():
                self._stop()
            if under_way:  # else the last of those that ran ended as they were admitted
                self._take_in(*under_way.popleft())
                self.watcher.on_progress(min(self.steps_done, self.steps_total), self.steps_total)

    def _stop(self) -> NoReturn:
        """Saves the runs that have a folder. What is being computed is lost, and computed again when they go on."""
        for member in self.running:
            assert member.run is not None
            member.run.save()
        raise StopRequested

    def _begin(self, wave: Wave) -> Results:
        for member, worker_round in wave:
            member.busy_workers.add(worker_round.worker)
        jobs = [Job(worker_round, member.planned_run.task, member.planned_run.config.inner) for member, worker_round in wave]
        assert self._inner is not None
        return self._inner.begin(jobs)

    def _take_in(self, wave: Wave, results: Results) -> None:
        for (member, worker_round), contribution in zip(wave, results(), strict=True):
            if member.run is None:  # it diverged while this was computed
                continue
            member.busy_workers.remove(worker_round.worker)
            member.run.simulation.give(contribution)
            member.steps_left -= worker_round.inner_steps
            self.steps_done += worker_round.inner_steps
        for member in {id(member): member for member, _ in wave if member.run is not None}.values():
            self._advance(member)

    # ---- which rounds

    def _pick(self) -> Wave:
        """The next wave: rounds that can share a stack, of the length of the one that goes first or shorter."""
        every = [(member, worker_round) for member in self.running for worker_round in member.needed()]
        if not every:
            return []
        stack_steps_left = sum(member.steps_left for member in self._stack_members()) / (self._wanted_width * self._waves)

        def place(candidate: tuple[_Member, Round]) -> tuple[bool, int, int]:
            member, worker_round = candidate
            chain = member.chain(worker_round)
            return (False, -chain, member.order) if chain >= URGENT * stack_steps_left else (True, 0, member.order)

        every.sort(key=place)
        _, leading = every[0]
        shorter = [each for each in every if each[1].inner_steps <= leading.inner_steps]
        shorter.sort(key=lambda each: each[1].inner_steps != leading.inner_steps)
        assert self._inner is not None
        return shorter[: self._inner.width]

    # ---- runs come and go

    def _admit(self) -> None:
        """Starts waiting runs, in their order, while they fit into the memory set aside for runs. One run may always run."""
        while self.waiting:
            if self.waiting[0].stack_key != self._key:
                if self.running:
                    return
                self._begin_stack(self.waiting[0])
            bytes_in_use = sum(map(self._run_bytes, self.running))
            if self.running and bytes_in_use + self._run_bytes(self.waiting[0]) > SHARE_OF_RUNS * self._memory:
                return
            member = self.waiting.pop(0)
            member.run = member.make_run(copy.deepcopy(self._model(member.planned_run.task)))
            self.running.append(member)
            member.run.begin()
            self._advance(member)

    def _advance(self, member: _Member) -> None:
        assert member.run is not None
        try:
            if not member.run.advance():
                return
            self.watcher.on_finish(member.planned_run.key, member.collector)
        except RunStopped as stopped:
            self.steps_done += member.steps_left
            self.watcher.on_divergence(member.planned_run.key, str(stopped), member.collector)
        member.run = None
        self.running.remove(member)

    def _run_bytes(self, member: _Member) -> int:
        return run_bytes(member.planned_run.config, self._model(member.planned_run.task))

    def _model(self, task: Task) -> nn.Module:
        """The task's initial model on the device: made once, then copied."""
        if id(task) not in self._models:
            self._models[id(task)] = task.build_model().to(self.device)
        return self._models[id(task)]

    def _stack_members(self) -> list[_Member]:
        """All that share the stack, now or later."""
        return [member for member in (*self.running, *self.waiting) if member.stack_key == self._key]

    def _begin_stack(self, first: _Member) -> None:
        self._key, task = first.stack_key, first.planned_run.task
        members = self._stack_members()
        longest = max(max(member.chains.values()) for member in members)
        steps = sum(member.steps_left for member in members)
        self._wanted_width = max(1, min(steps // (longest * self._waves), WIDEST.get(self.device.type, 8)))
        slices = (1 - SHARE_OF_RUNS) * self._memory / max(1, SLICE_COPIES * model_bytes(self._model(task)))
        width = max(1, min(self._wanted_width, int(slices)))
        self._inner = None  # its memory first
        self._inner = StackedInner(task, device=self.device, width=width)


def make_member(order: int, planned_run: PlannedRun) -> _Member:
    """Works out the schedule of a run, without training. Raises UserError if a stack cannot honour its settings."""
    config = planned_run.config
    check_stackable(config.inner)
    if config.inner.has_own_optimizer:
        name = config.inner.inner_optimizer
        raise UserError(f"A study computes many runs as one stack of models, which cannot have the inner optimizer {name}.")
    if config.run.execution == "sequential" or config.links.overlap:
        name = "overlap" if config.links.overlap else "execution"
        raise UserError(f"{name} is set, but a study computes the rounds of many runs as one stack of models: leave it out.")
    sizes = file_sizes(config, planned_run.task.build_model()) if config.links.takes_time else None
    events = list(planned_arrivals(config, sizes=sizes))
    return _Member(order, planned_run, chains(events), sum(arrival.inner_steps for _, arrival in events))
