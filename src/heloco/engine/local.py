"""A run on this machine: the virtual clock drives the synchronizer, and rounds are computed when an arrival waits for one."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import torch
from msgspec import structs
from torch import Tensor, nn

import heloco
from heloco.engine.build import build_links, build_parts, model_digest, pick_device, plugins_of, provenance_of
from heloco.engine.determinism import deterministic_algorithms
from heloco.engine.simulation import NS, ClockState, Simulation
from heloco.engine.trainer import Execution, StackFailure, Trainer, choose_execution, make_trainer
from heloco.errors import RunStopped, UserError
from heloco.inner.second_moment import SharedMoment
from heloco.outer.kernels import name_for
from heloco.records.evaluations import EvaluationRecord
from heloco.records.events import EndKind
from heloco.records.json_numbers import finite_measures
from heloco.records.run_end import FINISHED_TEXT
from heloco.records.run_facts import BlockFacts, RunFacts, ShardFacts
from heloco.records.tape import ArrivalRecord
from heloco.run import RunConfig, RunFolder
from heloco.run.checkpoint import CheckpointState
from heloco.run.tape_writer import arrival_record
from heloco.synchronizer import Arrival, Contribution
from heloco.task import Scores, Task, check_scores, mean_scores


class StopRequested(Exception):
    """Somebody asked the run to stop: it is checkpointed and can be resumed."""


STOPPED_TEXT = "it was stopped and saved"


def describe_failure(error: BaseException) -> str:
    """Why a run could not go on, as a sentence without its full stop."""
    text = " ".join(str(error).split()).removesuffix(".")
    is_for_people = isinstance(error, UserError | RunStopped)
    return text if is_for_people else f"it failed with an internal error ({type(error).__name__}: {text})"


class Observer(Protocol):
    """Receives the records of a run while it goes on: a progress display or a collector, for example."""

    def on_arrival(self, record: ArrivalRecord) -> None:
        """Called after each arrival, with its line of the tape."""

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Called after each evaluation, with its line."""


@dataclass
class Collector:
    """Keeps the tape and the evaluations in memory."""

    tape: list[ArrivalRecord] = field(default_factory=list)
    evals: list[EvaluationRecord] = field(default_factory=list)

    def on_arrival(self, record: ArrivalRecord) -> None:
        """Keeps a line of the tape."""
        self.tape.append(record)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Keeps an evaluation."""
        self.evals.append(record)


def describe(
    task: Task,
    config: RunConfig,
    model: nn.Module,
    clock: Literal["virtual", "real"] = "virtual",
    execution: Execution | Literal[""] = "",
) -> RunFacts:
    """run.json: what the tape's numbers refer to. `execution`: that of a simulation."""
    state_names = model.state_dict().keys()
    device = pick_device(config.run.device)
    computed = provenance_of(device, config.inner)
    return RunFacts(
        clock=clock,
        heloco=heloco.__version__,
        torch=computed.torch,
        threads=torch.get_num_threads(),
        kernels=name_for(device),
        execution=execution,
        device=computed.device if execution else "",
        precision=computed.precision if execution else "",
        deterministic=config.run.deterministic,
        method=config.outer.method,
        paces=config.rounds.paces,
        unit=task.unit,
        task_digest=task.digest,
        config_digest=config.digest(),
        plugins=plugins_of(config),
        parameters=sum(p.numel() for p in model.parameters()),
        shards=[ShardFacts(shard.name, shard.windows) for shard in task.shards],
        blocks=[BlockFacts(name, list(p.shape)) for name, p in model.named_parameters()],
        buffers=[name for name, _ in model.named_buffers()],
        tied=_tied(model),
        model_digest=model_digest(task),
        passing_buffers=[name for name, _ in model.named_buffers() if name not in state_names],
    )


def _tied(model: nn.Module) -> dict[str, str]:
    """Further names of parameters that are already known by another: a head that is the token embedding, say."""
    first = {id(p): name for name, p in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(p)] for name, p in every if first[id(p)] != name}


class LocalState(CheckpointState, frozen=True, kw_only=True):
    """What a checkpoint of a simulated run holds."""

    clock: ClockState
    evaluated_at: int
    """The arrival of the last evaluation, or -1."""


class LocalRun:
    """`config` must be resolved. Without a folder nothing is written."""

    def __init__(
        self,
        task: Task,
        config: RunConfig,
        *,
        folder: RunFolder | None = None,
        observers: list[Observer] | None = None,
        model: nn.Module | None = None,
        block_numbers: bool = True,
        begun_as: Execution | None = None,
    ) -> None:
        """`begun_as`: how the rounds of a run that is resumed were computed so far."""
        self.task = task
        self.config = config
        self.folder = folder
        self.observers = observers or []
        self.block_numbers = block_numbers
        self.stop_requested = False
        self._parts = build_parts(task, config, model)
        self.model, self.synchronizer = self._parts.model, self._parts.synchronizer
        self.simulation = Simulation(
            self.synchronizer,
            paces_s=config.rounds.paces,
            arrivals=config.run.arrivals,
            grace_s=config.rounds.grace_s,
            share=SharedMoment(config.inner.second_moment, config.inner.beta2) if config.inner.second_moment else None,
            links=build_links(config, self.model),
        )
        self.units = 0
        self._evaluated_at = -1
        self._saved_at = -1
        self._begun_as = begun_as

    # ---- running

    @cached_property
    def execution(self) -> Execution:
        """How the run's rounds are computed. Raises UserError if the config asks for what cannot be."""
        return choose_execution(self._parts, self._begun_as)

    def run(self) -> None:
        """Runs to the end. If a stop is requested, it writes a checkpoint and raises `StopRequested`."""
        with self._noting_end(), deterministic_algorithms(self.config.run.deterministic):
            trainer = self._make_trainer(self.execution)
            try:
                self.begin()
                while not self.advance():
                    trainer = self._compute(trainer)
            except StopRequested:
                self._save_if(True)
                raise

    @contextmanager
    def _noting_end(self) -> Iterator[None]:
        """Notes in the folder how the run ended, if something else than its last arrival ends it."""
        try:
            yield
        except StopRequested:
            self._note_end("stopped", STOPPED_TEXT)
            raise
        except KeyboardInterrupt:
            self._note_end("stopped", "it was interrupted")
            raise
        except BaseException as error:
            self._note_end("failed", describe_failure(error))
            raise

    def _note_end(self, kind: EndKind, text: str) -> None:
        if self.folder is not None:
            self.folder.note_end(kind, text)

    def _compute(self, trainer: Trainer) -> Trainer:
        """Computes rounds that the clock waits for. Returns what computes the next ones."""
        try:
            contributions = trainer.run(trainer.pick(self.simulation))
        except StackFailure as failure:
            reason = str(failure)
        else:
            for contribution in contributions:
                self.simulation.give(contribution)
            return trainer
        return self._make_sequential(reason)  # not in `except`: an error keeps the stack alive while it is handled

    def _make_trainer(self, execution: Execution) -> Trainer:
        if self.folder is not None and (facts := self.folder.facts()).execution != execution:
            self.folder.write_facts(structs.replace(facts, execution=execution))
        return make_trainer(self._parts, execution, before_step=self._heed_stop)

    def _make_sequential(self, reason: str) -> Trainer:
        """What goes on where a stack cannot. Nothing is lost: the rounds that were asked for are still asked for."""
        if self.config.run.execution == "stacked":
            raise UserError(f"execution is stacked, but this model cannot be computed as a stack ({reason}): leave it out.")
        print(
            f"heloco: this model cannot be computed as a stack ({reason}). Its rounds are computed one after the other.",
            file=sys.stderr,
            flush=True,
        )
        return self._make_trainer("sequential")

    def begin(self) -> None:
        """Makes the first evaluation, unless the run was taken up from a checkpoint."""
        if self.synchronizer.arrivals == 0 and self._evaluated_at < 0:
            self._evaluate()
            self._save()

    def advance(self) -> bool:
        """Advances the run as far as the results given so far allow. Returns True when the run has reached its end."""
        settings = self.config.run
        while not self.simulation.finished:
            self._heed_stop()
            if (outcome := self.simulation.advance()) is None:
                return False
            self.take_in(*outcome)
            if outcome[0].verdict != "refused":
                self._evaluate_if(is_due(self.synchronizer.arrivals, settings.eval_every))
                self._save_if(is_due(self.synchronizer.arrivals, settings.checkpoint_every))
        self._evaluate_if(True)
        self._save_if(True)
        self._note_end("finished", FINISHED_TEXT)
        return True

    def _heed_stop(self) -> None:
        if self.stop_requested:
            raise StopRequested

    def take_in(self, arrival: Arrival, contribution: Contribution) -> None:
        """Records an arrival. Raises `RunStopped` after too many refusals in a row."""
        self.units += contribution.units if arrival.verdict != "refused" else 0
        start_s, traffic = self.simulation.started_ns[arrival.worker] / NS, self.simulation.traffic(arrival.worker)
        record = arrival_record(
            arrival, contribution, time_s=self.simulation.now_s, start_s=start_s, traffic=traffic, numbers=self.block_numbers
        )
        if self.folder is not None:
            self.folder.write_arrival(record)
        for observer in self.observers:
            observer.on_arrival(record)
        if self.synchronizer.refused_in_a_row >= self.config.run.max_refusals:
            self._save()
            where = f" What was done until then is in {self.folder.path}." if self.folder else ""
            raise RunStopped(
                f"{self.synchronizer.refused_in_a_row} contributions in a row were refused, the last (worker {arrival.worker}) "
                f"because {arrival.reason}. The training diverges: lower --lr or --outer-lr, or clip with --clip.{where}"
            )

    def _evaluate_if(self, due: bool) -> None:
        if due and self._evaluated_at != self.synchronizer.arrivals:
            self._evaluate()

    def _evaluate(self) -> None:
        synchronizer = self.synchronizer
        record = evaluation_record(
            self.evaluate(), arrival=synchronizer.arrivals, outer_step=synchronizer.outer_step, time_s=self.simulation.now_s,
            inner_steps=synchronizer.steps_accepted, units=self.units,
        )  # fmt: skip
        self._evaluated_at = self.synchronizer.arrivals
        if self.folder is not None:
            self.folder.write_eval(record)
        for observer in self.observers:
            observer.on_evaluation(record)

    @torch.no_grad()
    def evaluate(self) -> dict[str, dict[str, float]]:
        """The scores of the outer model as it stands."""
        for buffer, outer_buffer in zip(self.model.buffers(), self.synchronizer.buffers, strict=True):
            buffer.copy_(outer_buffer)
        return self.task.evaluate(self.model)

    # ---- state

    def save(self) -> None:
        """Writes a checkpoint if the newest one is older than the run. Without a folder it does nothing."""
        self._save_if(True)

    def _save_if(self, due: bool) -> None:
        if due and self._saved_at != self.synchronizer.arrivals:
            self._save()

    def _save(self) -> None:
        if self.folder is None:
            return
        state = LocalState(
            config_digest=self.config.digest(), task_digest=self.task.digest, books=self.synchronizer.books(),
            clock=self.simulation.clock(), lines=self.folder.line_sizes(), units=self.units, evaluated_at=self._evaluated_at,
        )  # fmt: skip
        self.folder.save_checkpoint(state, self.synchronizer.tensors() | self.simulation.tensors())
        self._saved_at = self.synchronizer.arrivals

    def load(self, state: LocalState, tensors: Mapping[str, Tensor]) -> None:
        """Takes up a checkpoint; refuses one of another config or other data."""
        if state.config_digest != self.config.digest():
            raise UserError(
                "The run's config is not the one its checkpoint was made with: restore config.toml, or start a new run with "
                "`heloco train --config`."
            )
        if state.task_digest != self.task.digest:
            raise UserError(
                "The data or the tokenizer is not the one this run was started with: give the same text, e.g. with --data."
            )
        device = next(self.model.parameters()).device
        tensors = {name: t.to(device) for name, t in tensors.items()}
        self.synchronizer.load(state.books, tensors)
        self.simulation.load(state.clock, tensors)
        self.units, self._evaluated_at = state.units, state.evaluated_at
        self._saved_at = self.synchronizer.arrivals


def evaluation_record(
    scores: Scores,
    *,
    arrival: int,
    outer_step: int,
    time_s: float,
    inner_steps: int,
    units: int,
    machine: str = "",
    own_steps: int = 0,
) -> EvaluationRecord:
    """An evaluation's line: where the run was, and its scores. Raises UserError if a task gives something else than scores."""
    scores = check_scores(scores)
    return EvaluationRecord(
        arrival=arrival, outer_step=outer_step, time_s=time_s, inner_steps=inner_steps, units=units, machine=machine,
        own_steps=own_steps, mean=finite_measures(mean_scores(scores)),
        scores={name: finite_measures(measures) for name, measures in scores.items()},
    )  # fmt: skip


def is_due(arrivals: int, every: int) -> bool:
    """Whether something that happens every `every` arrivals happens after this one. With 0 it never does."""
    return every > 0 and arrivals % every == 0
