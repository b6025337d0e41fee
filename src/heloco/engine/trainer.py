"""What computes the rounds of one run: a round after the other, or those under way together as one stack of models.

In a stack every worker has a seat of its own, the same in all its rounds, and the stack keeps its size: seats whose workers have
no round to compute run a single step of another's, for nothing. So a round's numbers do not depend on which rounds it shares the
stack with, and a run that is resumed, with other rounds in its first stacks, computes the same.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, Protocol

import numpy as np
import torch

from heloco.engine.build import Parts
from heloco.engine.simulation import Simulation
from heloco.engine.stack_limits import SLICE_COPIES, WIDEST, free_memory, model_bytes, run_bytes
from heloco.errors import UserError
from heloco.inner import SequentialInner
from heloco.inner.seeding import seeded
from heloco.inner.stacked import Job, StackedInner
from heloco.run import RunConfig
from heloco.seeds import derive
from heloco.synchronizer import Contribution, Round
from heloco.task import to_device
from heloco.task.gpt import TinyGPT
from heloco.task.language import LanguageTask
from heloco.task.rounding import rounded_products

Execution = Literal["stacked", "sequential"]
SMALL_STEP_FLOP = 1e11
"""auto computes the rounds of a model one after the other if its inner step has more floating-point operations than this: 60M
parameters over 256 tokens have 9e10. Such a step takes 4 ms in a stack (docs/log.md), and 7 ms if two of five seats are free,
which is what it takes alone. Larger steps keep a GPU busy by themselves."""


class Trainer(Protocol):
    """Computes the rounds that a simulation asks for."""

    @property
    def execution(self) -> Execution:
        """How it computes them, as run.json says it."""

    def pick(self, simulation: Simulation) -> list[Round]:
        """The rounds to compute next, when the clock waits for a result. The one that it waits for is among them."""

    def run(self, rounds: Sequence[Round]) -> list[Contribution]:
        """Computes the rounds that were picked."""


class StackFailure(Exception):
    """A model cannot be computed as a stack. The rounds are as they were, and can be computed one after the other."""


class SequentialTrainer:
    """Computes the round that the clock waits for, and no other."""

    execution: Execution = "sequential"

    def __init__(self, inner: SequentialInner, before_step: Callable[[], None]) -> None:
        self._inner = inner
        inner.before_step = before_step

    def pick(self, simulation: Simulation) -> list[Round]:
        return [simulation.next_needed()]

    def run(self, rounds: Sequence[Round]) -> list[Contribution]:
        return self._inner.run(rounds)


class StackedTrainer:
    """Computes the rounds under way as one stack, or those of as many workers as fit into it."""

    execution: Execution = "stacked"

    def __init__(self, parts: Parts) -> None:
        self._task, self._options = parts.task, parts.config.inner
        self._seed, self._device = parts.config.run.seed, parts.device
        self._workers = parts.synchronizer.workers
        width = max(1, stack_width(parts))
        steps = max(parts.synchronizer.inner_steps)
        self._inner = StackedInner(parts.task, device=parts.device, width=width, steps=steps)

    @property
    def seats(self) -> int:
        """The size of the stack. If it is smaller than the number of workers, they share it in groups of about equal size."""
        groups = -(-self._workers // self._inner.width)
        return -(-self._workers // groups)

    def pick(self, simulation: Simulation) -> list[Round]:
        """All rounds under way of the group whose round comes next. Those that would arrive after the end take no time there."""
        first, *others = simulation.needed()
        group = first.worker // self.seats
        return [first, *(each for each in others if each.worker // self.seats == group)]

    def run(self, rounds: Sequence[Round]) -> list[Contribution]:
        """Raises `StackFailure` where the model cannot be computed as a stack, for whatever reason: if the reason is an error in
        the task, it shows again when the rounds are computed one after the other."""
        seats = [worker_round.worker % self.seats for worker_round in rounds]
        jobs = [Job(worker_round, self._task, self._options) for worker_round in rounds]
        by_seat = dict(zip(seats, jobs, strict=True))
        seated_jobs = [by_seat.get(seat) or _short(jobs[0]) for seat in range(self.seats)]
        names = [name for worker_round in rounds for name in (worker_round.worker, worker_round.index)]
        try:
            with rounded_products(self._device), seeded(derive(self._seed, "stack", *names), self._device):
                contributions = self._inner.begin(seated_jobs)()
        except UserError:
            raise
        except Exception as error:
            raise StackFailure(_reason(error)) from error
        return [contributions[seat] for seat in seats]


def _short(job: Job) -> Job:
    """A job of one step, which keeps a seat that is free."""
    (start, _), count = job.round.spans[0], job.options.windows_per_step
    return replace(job, round=replace(job.round, inner_steps=1, spans=((start, count),)))


def _reason(error: Exception) -> str:
    """What torch says, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 160 else f"{text[:160].rsplit(' ', 1)[0]} …"


def make_trainer(parts: Parts, execution: Execution, before_step: Callable[[], None]) -> Trainer:
    """`before_step` is called before each inner step of a round that is computed alone. What it raises ends the round."""
    return StackedTrainer(parts) if execution == "stacked" else SequentialTrainer(parts.inner, before_step)


# ---- which of the two


def choose_execution(parts: Parts, begun_as: Execution | None) -> Execution:
    """What the config says, or else what the run was begun with, or else a stack on a GPU where it serves the model. Raises
    UserError if the config asks for a stack that would not honour the run's other settings."""
    choice, obstacle = parts.config.run.execution, stack_obstacle(parts)
    if choice == "stacked" and obstacle:
        raise UserError(f"execution is stacked, but {obstacle}: leave one of them out.")
    if choice != "auto":
        return choice
    if begun_as is not None:
        return begun_as
    serves = parts.device.type == "cuda" and not obstacle and stack_width(parts) >= min(2, parts.synchronizer.workers)
    return "stacked" if serves and step_flop(parts) <= SMALL_STEP_FLOP else "sequential"


def stack_obstacle(parts: Parts) -> str:
    """What a stack would not compute as a round alone does; empty if there is nothing."""
    if parts.config.inner.has_own_optimizer:
        return f"inner_optimizer is {parts.config.inner.inner_optimizer}, and a stack has only those that are built in"
    for name, parameter in parts.model.named_parameters():
        if parameter.dtype not in (torch.float32, torch.float64):
            return f"the parameter {name!r} is {parameter.dtype}, in which a stack's optimizer would compute"
        if not parameter.requires_grad:
            return f"the parameter {name!r} needs no gradient, and a stack trains all parameters"
    return settings_obstacle(parts.config)


def settings_obstacle(config: RunConfig) -> str:
    """The setting that a stack would not honour; empty if there is none."""
    if config.inner.compile:
        return "compile is set, and a stack is compiled and recorded in a way of its own"
    if config.inner.recompute:
        return "recompute is set, and a stack keeps what its backward pass needs"
    if config.links.overlap:
        return "overlap is set, and in a stack no start is merged in the middle of a round"
    return ""


def stack_width(parts: Parts) -> int:
    """How many rounds fit into the device's memory beside what the run holds; 0: none."""
    in_use = torch.cuda.memory_reserved(parts.device) if parts.device.type == "cuda" else 0
    memory = free_memory(parts.device) + in_use - run_bytes(parts.config, parts.model)
    slices = int(memory / max(1, SLICE_COPIES * model_bytes(parts.model)))
    return max(0, min(slices, parts.synchronizer.workers, WIDEST.get(parts.device.type, 8)))


def step_flop(parts: Parts) -> int:
    """About how many floating-point operations an inner step has: those of the products of a forward pass, three times."""
    task, options = parts.task, parts.config.inner
    if isinstance(task, LanguageTask) and isinstance(parts.model, TinyGPT):  # counting would take a second
        return 6 * _weights(parts.model) * task.context * options.windows_per_step
    from torch.utils.flop_counter import FlopCounterMode

    model = copy.deepcopy(parts.model)  # a forward pass may move its buffers
    with torch.no_grad(), seeded(0, parts.device), FlopCounterMode(display=False) as counter:
        task.loss(model, to_device(task.batch(0, np.arange(options.batch_size)), parts.device))
    return 3 * options.accumulate * int(counter.get_total_flops())


def _weights(model: TinyGPT) -> int:
    """The numbers that each token meets in a product: those of the blocks and of the head."""
    return sum(p.numel() for p in model.blocks.parameters()) + model.head.weight.numel()
