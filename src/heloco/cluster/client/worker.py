"""The worker loop of `heloco join`: trains the run's task round by round, until the run ends or the user stops it.

Config and models are imported when the task is built: importing this room loads neither."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heloco.cluster.client.activity import MachineActivity
from heloco.cluster.client.machine_identity import MachineIdentity
from heloco.cluster.client.run_client import MachineStopRequested, NotHeld, RunClient, RunEnded, Scores, TakenRound
from heloco.cluster.protocol.link import Link
from heloco.cluster.protocol.messages import Acknowledgement, Assignment, ContributionReport, RunInfo
from heloco.errors import UserError
from heloco.inner import SequentialInner
from heloco.outer.kernels.windows import dense
from heloco.records.json_numbers import finite_measures
from heloco.rounds import Contribution, Round
from heloco.task import Task
from heloco.wire import blocks

if TYPE_CHECKING:
    from heloco.run.config import RunConfig


class Abandoned(Exception):
    """The round was given up between two steps."""


def task_of(info: RunInfo, *, progress: Any = None, **local_settings: str | None) -> "tuple[Task, RunConfig]":
    """Builds the run's task on this machine. Raises UserError if the data here is not the run's. `local_settings` replace
    settings of the run: the device, and the places of data, tokenizer and hf."""
    if info.external:
        raise UserError("This run trains the model that its machines bring: join it from a training script with heloco.join(…).")
    from heloco.engine.build import build_task, model_digest, model_files
    from heloco.run.config import RunConfig, resolve
    from heloco.run.settings import parse_toml, with_fields

    values = parse_toml(info.config, "the run's config", for_task=True)
    if local_settings.get("hf") and Path(str(values.get("tokenizer", ""))).parent == Path(str(values.get("hf", ""))):
        values["tokenizer"] = ""  # the model's own
    values |= {"device": "auto"} | {name: value for name, value in local_settings.items() if value is not None}
    task, config = build_task(resolve(with_fields(RunConfig(), values)), progress)
    if task.digest != info.task_digest:
        raise UserError("The data here is not the run's: copy the run's text to this machine and give it with --data DIR.")
    if info.model_digest and model_digest(task) != info.model_digest:
        raise UserError(
            f"The {model_files(config)} of the model here is not the run's: copy its folder to this machine, and give it with "
            "--hf DIR."
        )
    return task, config


class Worker:
    """`heloco join`: takes rounds of the run's task and computes them.

    With keep_state the optimizer's state stays in this process and never travels. It is used for a worker's next round only if
    this machine did the worker's last accepted one (`Assignment.keeps_state`); otherwise the round begins with a fresh state."""

    def __init__(
        self,
        task: Task,
        config: "RunConfig",
        *,
        tell: Callable[[str], Any] = print,
        after_round: Callable[[], Any] = lambda: None,
        before_request: Callable[[], Any] = lambda: None,
    ) -> None:
        """`after_round` is called after each round that was handed in, `before_request` each time before it asks for a round."""
        from heloco.engine.build import pick_device

        self.tell, self.after_round, self.before_request = tell, after_round, before_request
        self.inner = SequentialInner(task, config.inner, seed=config.run.seed, device=pick_device(config.run.device))
        self.inner.before_step = self.before_step
        self.keep_state = config.inner.keep_state
        self.stop_requested: str | None = None
        """Why this machine was asked to stop; None if it was not."""
        self.rounds = self.accepted = 0
        """Rounds that were acknowledged, and those of them that were not refused."""
        self.loss: float | None = None
        self.pace_s: float | None = None
        """Mean training loss and seconds per inner step of the last round."""
        self._assignment: Assignment | None = None
        self._arrivals = self._arrivals_at_first = 0
        """The run's arrivals, as heard last, and when this machine's first round began."""
        self._config = config
        self._optimizer_states: dict[int, dict[str, Tensor] | None] = {}
        self._client: RunClient | None = None

    def warm_up(self) -> float:
        """Makes two inner steps, so that one-time costs do not count in the first round. Returns the seconds of the second."""
        per_step = self._config.inner.windows_per_step
        start = [p.detach().clone() for p in self.inner.model.parameters()]
        buffers = [b.detach().clone() for b in self.inner.model.buffers()]
        for _ in range(2):
            began = time.perf_counter()
            self.inner.run([Round(0, 0, 0, 0, ((0, per_step),), 1, 0, 0.0, start, buffers)])
            if self.inner.device.type == "cuda":
                torch.cuda.synchronize(self.inner.device)
        return time.perf_counter() - began

    def evaluate(self, tensors: dict[str, Tensor]) -> Scores:
        """Evaluates a model of the run, in the place of the one that is trained: each round begins with its own start."""
        model = self.inner.model
        with torch.no_grad():
            for kind, ours in ((blocks.PARAMETER, model.parameters()), (blocks.BUFFER, model.buffers())):
                for tensor, theirs in zip(ours, blocks.blocks_of(kind, tensors), strict=True):
                    tensor.copy_(theirs)
        return {source: finite_measures(measures) for source, measures in self.inner.task.evaluate(model).items()}

    def activity(self) -> MachineActivity:
        """What this machine is doing. May be called from any thread."""
        client, assignment = self._client, self._assignment
        arrivals_since = self._arrivals - self._arrivals_at_first
        wait = client.waiting if client is not None else None
        return MachineActivity(
            doing=client.doing if client is not None else "joining",
            wait_kind=wait.kind if wait is not None else None,
            waits_for=client.out_of_reach or (wait.text if wait is not None else "") if client is not None else "",
            is_suspended=client is not None and client.is_suspended,
            worker=assignment.worker if assignment is not None else None, round=assignment.round if assignment is not None else 0,
            steps=client.steps if client is not None else 0, inner_steps=assignment.inner_steps if assignment is not None else 0,
            rounds=self.rounds, accepted=self.accepted, loss=self.loss, pace_s=self.pace_s, arrivals=self._arrivals,
            planned_arrivals=self._config.run.arrivals, share=self.accepted / arrivals_since if arrivals_since > 0 else None,
            download=client.download if client is not None else None, upload=client.upload if client is not None else None,
        )  # fmt: skip

    def run(self, link: Link, name: str, run: str | None = None, *, evaluates: bool = False, patience_s: float = 3600.0) -> str:
        """Works until the run ends or a stop is requested. Returns a sentence: why the run ended, or what became of the round.
        `evaluates`: also evaluates models of the run between rounds. `patience_s`: how long to try to reach the run again."""
        identity = MachineIdentity(run, name)
        step_s = self.warm_up()
        client = self._client = RunClient(
            link, name, returning=identity.ticket, keep_ticket=identity.keep, is_stopping=lambda: self.stop_requested is not None,
            tell=self.tell, evaluate=self.evaluate if evaluates else None, patience_s=patience_s,
        )  # fmt: skip
        outcome = "nothing was under way"
        try:
            seat = client.join().seat
            role = f"worker {seat}" if seat is not None else "a spare: all seats are taken"
            self.tell(f"Joined {link.address} as {role}, {step_s:.3g} s per step.")
            while (taken_round := client.take(self._is_stopping)) is not None:
                outcome = self._round(client, taken_round)
                if self.stop_requested is not None:
                    break
            client.leave(self.stop_requested or "")
            return f"Left the run ({self.stop_requested}): {outcome}."
        except MachineStopRequested:
            client.leave(self.stop_requested or "")
            return f"Left the run ({self.stop_requested}), which is out of reach: it will give what was under way to another."
        except RunEnded as end:
            client.leave()
            return str(end)
        finally:
            identity.close()

    def _is_stopping(self) -> bool:
        self.before_request()
        return self.stop_requested is not None

    def _round(self, client: RunClient, taken_round: TakenRound) -> str:
        """Does one round. Returns what became of it."""
        worker = taken_round.key.worker
        name = f"round {taken_round.key.round} of worker {worker}"
        self._note_round(taken_round.assignment)
        try:
            began = time.perf_counter()
            contribution = self.inner.run([self._as_round(taken_round)])[0]
            self.pace_s = (time.perf_counter() - began) / taken_round.assignment.inner_steps
            deltas = [dense(block) for block in contribution.pseudo_gradient]
            tensors = blocks.name_contribution(deltas, contribution.buffers)
            ack = client.hand_in(taken_round.key, tensors, _report(contribution))
            if self.keep_state and ack.verdict != "refused":
                self._optimizer_states[worker] = contribution.memory
            self._note_acknowledgement(contribution, ack)
            self.after_round()
            return f"{name} was handed in and is {ack.verdict}"
        except Abandoned as reason:
            client.abandon(str(reason))
            return f"{name} was given back undone"
        except NotHeld as reason:
            self.tell(f"{name} was not accepted: {reason}")
            return f"{name} was not accepted"

    def _note_round(self, assignment: Assignment) -> None:
        self._arrivals = max(self._arrivals, round(assignment.progress * self._config.run.arrivals))
        if self._assignment is None:
            self._arrivals_at_first = self._arrivals
        self._assignment = assignment

    def _note_acknowledgement(self, contribution: Contribution, ack: Acknowledgement) -> None:
        self.rounds += 1
        self.accepted += ack.verdict != "refused"
        self.loss, self._arrivals = contribution.loss, max(self._arrivals, ack.arrival)

    def before_step(self) -> None:
        """Called before each inner step."""
        if self._client is None:
            return
        if self.stop_requested is not None:
            raise Abandoned(self.stop_requested)
        if self._client.obsolete is not None:
            raise Abandoned(self._client.obsolete.text)
        self._client.steps += 1

    def _as_round(self, taken_round: TakenRound) -> Round:
        assignment, device = taken_round.assignment, self.inner.device
        if not assignment.keeps_state:
            self._optimizer_states.pop(assignment.worker, None)
        parameters, buffers = (
            [tensor.to(device) for tensor in blocks.blocks_of(kind, taken_round.start)]
            for kind in (blocks.PARAMETER, blocks.BUFFER)
        )
        return Round(
            assignment.worker, assignment.round, assignment.version, assignment.shard, assignment.spans, assignment.inner_steps,
            assignment.shard_steps, assignment.progress, parameters, buffers, self._optimizer_states.get(assignment.worker),
        )  # fmt: skip


def _report(contribution: Contribution) -> ContributionReport:
    return ContributionReport(
        loss=contribution.loss, last_loss=contribution.last_loss, samples=contribution.samples,
        units=contribution.units,
    )  # fmt: skip
