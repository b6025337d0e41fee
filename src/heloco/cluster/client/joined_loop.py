"""`heloco.join`: an existing training loop takes part in a run, through hooks on its optimizer.

    with heloco.join(address, model, optimizer):
        for batch in loader:
            loss(model, batch).backward(); optimizer.step(); optimizer.zero_grad()

The hook counts the optimizer's steps. After the number of steps that the synchronizer asked for, it sends the pseudo-gradient,
waits for the acknowledgement, and loads the next start into the model in place. All of this happens inside `optimizer.step()`.
"""

import contextlib
import re
import socket
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from heloco.cluster.client.connect import connect, find_token
from heloco.cluster.client.loop_evaluation import LoopEvaluation, LoopScores, named_scores
from heloco.cluster.client.loop_options import Options
from heloco.cluster.client.machine_identity import MachineIdentity
from heloco.cluster.client.model_blocks import ModelBlocks
from heloco.cluster.client.ranks import Ranks
from heloco.cluster.client.round_plan import RoundPlan
from heloco.cluster.client.run_client import NotHeld, RunClient, RunEnded
from heloco.cluster.client.run_progress import RunProgress
from heloco.cluster.protocol.link import Link
from heloco.cluster.protocol.messages import ContributionReport, Ended, WaitKind
from heloco.cluster.protocol.refusals import Refused
from heloco.cluster.protocol.score_messages import ScoreReport
from heloco.errors import RunStopped, UserError
from heloco.finite import all_finite
from heloco.wire.blocks import PSEUDO_GRADIENT, blocks_of

NOT_FINITE_LIMIT = 3
"""After this many rounds in a row with NaN or Inf the machine gives up."""
CONNECT_TIMEOUT_S = 60.0
"""Connect timeout before the first success; the address may be wrong."""


class RunOver(BaseException):
    """Leaves the loop when the run has ended. The `with heloco.join(…)` block catches it. It is not an `Exception`, so that a
    loop that catches the errors of single batches does not catch it."""

    def __init__(self, joined: "JoinedLoop") -> None:
        super().__init__("The run has ended: this leaves the block `with heloco.join(…)`.")
        self.joined = joined


class JoinedLoop:
    """The value of `with heloco.join(…) as run`: this machine's state in the run."""

    def __init__(self, address: "str | Link | None", model: nn.Module, optimizers: list[Optimizer], options: Options) -> None:
        self.arrivals = 0
        """Contributions of this machine that the run has accepted."""
        self._address, self._model, self._optimizers, self._options = address, model, optimizers, options
        self._ranks = Ranks()
        self._client: RunClient | None = None
        self._identity: MachineIdentity | None = None
        self._blocks: ModelBlocks | None = None
        self._evaluation: LoopEvaluation | None = None
        self._start: dict[str, Tensor] = {}
        """The start of the round: the only copy of the model in memory besides the model itself."""
        self._plan, self._progress = RoundPlan(), RunProgress()
        self._steps = self._refused_in_a_row = 0
        self._clear_optimizer = self._is_exchanging = False
        self._losses: list[Tensor | float] = []
        self._samples = 0
        self._last_wait: WaitKind | None = None
        self._pending_optimizers: set[int] = set()
        self._hooks: list[RemovableHandle] = []

    # ---- for the script

    @property
    def active(self) -> bool:
        """Whether the loop takes part in a run. False without an address: the loop trains alone."""
        return self._address is not None

    @property
    def worker(self) -> int:
        """The worker whose rounds this machine does, from 0 to `workers` − 1. It may change after a reconnection."""
        return self._plan.key.worker if self._plan.seat is None else self._plan.seat

    @property
    def workers(self) -> int:
        """How many workers the run has; 1 if the loop trains alone."""
        return self._plan.seats

    @property
    def round(self) -> int:
        """The number of this worker's current round, from 0."""
        return self._plan.key.round

    @property
    def inner_steps(self) -> int:
        """Inner steps of the current round; 0 if the loop trains alone."""
        return self._plan.inner_steps

    @property
    def progress(self) -> float:
        """How much of the whole run is done, from 0 to 1; the same on every rank. Within a round it is estimated."""
        return self._progress.share

    @property
    def steps_left(self) -> int:
        """About how many steps this loop will still make in the run; the same on every rank."""
        return self._progress.steps_left

    @property
    def run_arrivals(self) -> int:
        """How many contributions of all machines the run had taken in when this round began."""
        return self._progress.arrivals

    @property
    def planned_arrivals(self) -> int:
        """How many contributions the run will take in; 0 if the loop trains alone."""
        return self._progress.planned_arrivals

    @property
    def waiting(self) -> str:
        """Why this machine has no round at the moment; empty if it has one."""
        return self._client.waiting.text if self._client and self._client.waiting else ""

    @property
    def ended(self) -> bool:
        """Whether the run has ended. Further steps of this loop are not sent anywhere."""
        return self._plan.ended is not None

    def report(self, loss: Tensor | float | None = None, *, samples: int = 0) -> None:
        """Reports a training loss and its samples. The run's tape gets the mean over the round. Call it before the step."""
        if not self.active or self.ended:
            return
        if loss is not None:
            self._losses.append(loss.detach() if isinstance(loss, Tensor) else float(loss))
        self._samples += samples

    def report_eval(self, scores: LoopScores) -> None:
        """Reports validation scores of the model as it is now: a loss, or losses by names. Before the first step of a round they
        are scores of the run's model; after it, of this machine's own. The run's evaluations say which."""
        client, key = self._client, self._plan.key
        if client is None or self.ended or self._ranks.rank:
            return
        has_begun_step = 0 < len(self._pending_optimizers) < len(self._optimizers)
        try:
            client.report_scores(
                ScoreReport(**key._asdict(), own_steps=self._steps + has_begun_step, scores=named_scores(scores))
            )
        except (Refused, NotHeld, RunEnded) as reason:
            self._tell(f"The scores were not recorded. {reason}")

    # ---- coming and going

    def __enter__(self) -> Self:
        if self._address is None:
            return self
        self._ranks = Ranks()
        try:
            include_all = self._ranks.ask(self._connect)
            if include_all and self._options.evaluate is not None:
                raise UserError("This run evaluates its model by its own task: leave evaluate out.")
            self._blocks = ModelBlocks(self._model, include_all=include_all)
            self._evaluation = LoopEvaluation(self._options.evaluate, self._model, self._blocks, self._ranks)
            if not any(self._blocks.trained_by(optimizer) for optimizer in self._optimizers):
                raise UserError("The optimizer moves none of the model's parameters: give the one that trains this model.")
            self._ranks.ask(self._enter_run)
            self._exchange(lambda: None)
            if self._plan.ended is not None:
                raise self._nothing_to_join(self._plan.ended.text)
            self._pending_optimizers = {id(optimizer) for optimizer in self._optimizers}
            hook = torch.compiler.disable(self._after_step)  # type: ignore[no-untyped-call]  # where steps are compiled
            self._hooks = [optimizer.register_step_post_hook(hook) for optimizer in self._optimizers]
        except BaseException as error:
            self._leave(f"it could not begin: {type(error).__name__}")
            raise
        self._tell(f"Joined {self._run_address} as worker {self.worker} of {self.workers}, {self.inner_steps} steps a round.")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if self._hooks and not self.ended:
            loss_note = f"; {self._steps} steps of a round that was not done are given up" if self._steps else ""
            self._tell(f"Left {self._run_address} after {self.arrivals} contributions{loss_note}.")
        self._leave("its loop ended" if kind is None else f"its loop ended with {kind.__name__}")
        return isinstance(error, RunOver) and error.joined is self

    def _leave(self, reason: str) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._leave_run(reason)

    def _leave_run(self, reason: str) -> None:
        self._start = {}
        if self._client is not None:
            self._client.leave(reason)
            self._client = None
        if self._identity is not None:
            self._identity.close()
            self._identity = None

    def _connect(self) -> bool:
        """Connects to the run. True if the run has a built-in task, whose model includes frozen parameters and all buffers."""
        assert self._address is not None
        options = self._options
        link = connect(self._address, find_token(options.token)) if isinstance(self._address, str) else self._address
        name = options.name or socket.gethostname()
        self._client = client = RunClient(link, name, patience_s=min(options.patience_s, CONNECT_TIMEOUT_S), tell=self._tell)
        try:
            with self._in_words():
                info = client.describe()
        except RunStopped as error:
            raise UserError(f"{error} Check the address, and that `heloco serve` runs there.") from error
        if info.ended is not None:
            raise self._nothing_to_join(f"The run has ended: {info.ended.text}")
        self._identity = MachineIdentity(info.run, name)
        client.come_back_as(self._identity.ticket, self._identity.keep)
        client.patience_s = options.patience_s
        return not info.external

    def _enter_run(self) -> None:
        assert self._client is not None and self._blocks is not None and self._evaluation is not None
        self._client.layout = self._blocks.layout
        if self._options.evaluate is not None:
            self._client.offer_evaluations(self._evaluation.score)
        try:
            with self._in_words():
                if self._client.join().needs_model:
                    self._blocks.check_finite()
                    self._client.send_model(self._blocks.layout, self._blocks.name_tensors(), self._blocks.names)
        except RunEnded as end:
            raise self._nothing_to_join(str(end)) from None

    # ---- the hook

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.ended:
            self._stop_loop()
            return
        self._pending_optimizers.discard(id(optimizer))
        if self._pending_optimizers:
            return
        self._pending_optimizers = {id(each) for each in self._optimizers}
        self._steps += 1
        self._progress.note_step()
        client = self._client
        if client is not None:
            client.steps = self._steps
        if self._is_exchanging:  # an exchange was interrupted and the loop continued: this round is void
            self._exchange(lambda: None)
        elif self._steps >= self._plan.inner_steps:
            self._exchange(self._hand_in)
        elif client is not None and client.obsolete is not None and self._ranks.size == 1:
            # Only rank 0 hears of it: with more ranks the others would go on into a collective that it never enters.
            self._exchange(self._give_up)

    def _exchange(self, finish: Callable[[], None]) -> None:
        """Finishes the round, and begins the next one."""
        assert self._blocks is not None and self._evaluation is not None
        self._is_exchanging = True
        plan = self._ranks.ask(lambda: self._next_plan(finish), self._evaluation.take_part)
        self._ranks.spread(self._blocks.tensors())
        if plan.clear_optimizer or self._options.reset_optimizer:
            for optimizer in self._optimizers:
                optimizer.state.clear()
        self._plan, self._steps, self._is_exchanging = plan, 0, False
        self._losses, self._samples = [], 0
        if plan.ended is not None:
            self._progress.end()
        else:
            self._progress.begin_round(
                plan.progress, planned_arrivals=plan.planned_arrivals, seats=plan.seats, inner_steps=plan.inner_steps
            )
        if plan.ended is not None and self._hooks:
            self._stop_loop()

    def _stop_loop(self) -> None:
        """Called again at every step if the loop catches `RunOver`. The hooks stay until the block is left: torch uses them."""
        self._leave_run("the run has ended")
        if self._options.stop_at_end:
            raise RunOver(self)

    # ---- what only rank 0 does

    def _next_plan(self, finish: Callable[[], None]) -> RoundPlan:
        assert self._client is not None and self._blocks is not None
        self._clear_optimizer = False
        try:
            with self._in_words():
                finish()
                self._start = {}  # before the next start arrives, so that there is never more than one in memory
                taken_round = self._client.take(self._note_waiting)
                assert taken_round is not None
        except RunEnded as end:
            return self._take_final(end.ended)
        self._last_wait = None
        self._blocks.load(taken_round.start)
        self._start = taken_round.start
        joined, assignment = self._client.joined, taken_round.assignment
        return RoundPlan(
            taken_round.key, assignment.inner_steps, joined.seat, joined.seats, assignment.progress, joined.planned_arrivals,
            clear_optimizer=self._clear_optimizer,
        )  # fmt: skip

    def _take_final(self, ended: Ended) -> RoundPlan:
        """The run has ended. Loads its final model, if that can still be fetched."""
        assert self._client is not None and self._blocks is not None
        if self._hooks:
            model = self._client.final_model()
            if model is not None:
                self._blocks.load(model)
            outcome = "its model is loaded" if model is not None else "its model is out of reach, so this machine's own stays"
            self._tell(f"{ended.text}. After {self.arrivals} contributions from here; {outcome}.")
        return RoundPlan(self._plan.key, 0, self._plan.seat, self._plan.seats, ended=ended)

    def _hand_in(self) -> None:
        assert self._client is not None and self._blocks is not None
        key = self._plan.key
        self._blocks.wait_for_device()
        contribution = self._blocks.contribution(self._start)
        name = f"Round {key.round} of worker {key.worker}"
        if not all_finite(blocks_of(PSEUDO_GRADIENT, contribution)):  # buffers are not checked: one may be a mask of −∞
            self._give_up_as_not_finite(name)
            return
        self._refused_in_a_row = 0
        try:
            ack = self._client.hand_in(key, contribution, self._report_losses())
        except NotHeld as reason:
            self._tell(f"{name} was not accepted: {reason}")
            return
        if ack.verdict == "refused":
            self._tell(f"{name} was refused: {ack.reason}.")
        else:
            self.arrivals += 1

    def _give_up_as_not_finite(self, name: str) -> None:
        assert self._client is not None
        self._client.abandon("its model holds NaN or Inf")
        self._refused_in_a_row += 1
        self._clear_optimizer = True  # its state holds NaN or Inf too
        if self._refused_in_a_row >= NOT_FINITE_LIMIT:
            raise RunStopped(
                f"{self._refused_in_a_row} rounds in a row came to NaN or Inf here: look at the data and the loss, "
                "or lower the lr."
            )
        self._tell(f"{name} came to NaN or Inf and is given up: a fresh start, and the optimizer's state is cleared.")

    def _give_up(self) -> None:
        assert self._client is not None and self._client.obsolete is not None
        reason = self._client.obsolete.text
        self._client.abandon(reason)
        self._tell(f"Round {self.round} of worker {self._plan.key.worker} is given up after {self._steps} steps: {reason}.")

    def _report_losses(self) -> ContributionReport:
        losses = [float(loss) for loss in self._losses]
        mean = sum(losses) / len(losses) if losses else None
        last = losses[-1] if losses else None
        return ContributionReport(loss=mean, last_loss=last, samples=self._samples, units=self._samples)

    # ---- messages

    @property
    def _run_address(self) -> str:
        return self._address if isinstance(self._address, str) else getattr(self._address, "address", "the run")

    def _tell(self, line: str) -> None:
        if self._ranks.rank == 0:
            self._options.tell(line)

    def _note_waiting(self) -> bool:
        wait = self._client.waiting if self._client else None
        if wait is not None and wait.kind != self._last_wait:
            self._tell(f"Waiting for a round: {wait.text}.")
            self._last_wait = wait.kind
        return False

    def _nothing_to_join(self, reason: str) -> UserError:
        return UserError(f"There is nothing to join at {self._run_address}. {reason}")

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        """Turns a refusal into a UserError, with the block names of this model."""
        try:
            yield
        except Refused as refusal:
            labels = self._blocks.labels() if self._blocks is not None else {}
            text = re.sub(r"\b(parameter|buffer)\.\d+\b", lambda match: labels.get(match[0], match[0]), refusal.text)
            raise UserError(f"{self._run_address} does not take this machine: {text}") from refusal
