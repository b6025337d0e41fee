"""A machine's side of a run: it joins, gives signs of life, takes rounds, hands in, and comes back by itself after a cut."""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from heloco.cluster.client.activity import Doing, Transfer, timed_transfer
from heloco.cluster.client.obsolete_rounds import Obsolete, why_obsolete
from heloco.cluster.protocol.link import Link, LinkDown
from heloco.cluster.protocol.messages import (
    Acknowledgement,
    Assignment,
    ContributionReport,
    Ended,
    EvaluationJob,
    Joined,
    RoundAnswer,
    RoundKey,
    RunInfo,
    Ticket,
    Wait,
    printable,
)
from heloco.cluster.protocol.refusals import RESUMED, RETRIED_LATER, RefusalCode, Refused
from heloco.cluster.protocol.score_messages import EvaluationResult, ScoreReport
from heloco.errors import RunStopped, UserError
from heloco.records.events import EndKind
from heloco.wire.layout import Layout

if TYPE_CHECKING:
    from heloco.cluster.client.contribution_codes import ContributionCodes

T = TypeVar("T")
Scores = dict[str, dict[str, float | None]]
"""Source -> measure -> value; None if it is not finite."""
FIRST_PAUSE_S, PAUSE_LIMIT_S = 0.1, 2.0
PAUSE_SHARE = 1 / 8
"""The pause before the next try, as a share of the time waited so far. A run that is back after 3 s is noticed within 0.5 s."""
POLL_S = 10.0
FINAL_TRIES = 3
WHOLE = "fp32"
"""The format of contributions that are sent as they are: for them no encoder is loaded."""


class RunEnded(Exception):
    """Raised when the run has ended. Its text says why."""

    def __init__(self, kind: EndKind, text: str) -> None:
        super().__init__(text)
        self.ended = Ended(kind=kind, text=text)


class MachineStopRequested(Exception):
    """This machine was asked to stop while the run could not be reached."""


class NotHeld(Exception):
    """This machine no longer holds the round. It continues with a fresh one."""


@dataclass(frozen=True)
class TakenRound:
    """A round that this machine holds, with the parameters it begins with."""

    assignment: Assignment
    start: dict[str, Tensor]

    @property
    def key(self) -> RoundKey:
        """The worker, round and version that every request about this round names."""
        return self.assignment.key


class RunClient:
    """One machine in one run, over any link. Requests that fail are repeated, for at most `patience_s`."""

    def __init__(
        self,
        link: Link,
        name: str,
        *,
        layout: Layout | None = None,
        patience_s: float = 3600.0,
        returning: Ticket | None = None,
        keep_ticket: Callable[[Ticket], Any] = lambda _: None,
        is_stopping: Callable[[], Any] = lambda: False,
        evaluate: Callable[[dict[str, Tensor]], Scores] | None = None,
        tell: Callable[[str], Any] = print,
    ) -> None:
        """`layout`: blocks of the machine's own model, if it brings one. `patience_s`: how long to try to reach the run again.
        `returning`: the ticket of an earlier process. `keep_ticket` is called with the current ticket. `evaluate`: a function
        that evaluates a model; with it, this machine offers to do that between its rounds."""
        self.link, self.name, self.layout = link, name, layout
        self.patience_s, self.is_stopping, self.tell = patience_s, is_stopping, tell
        self.steps = 0
        """Inner steps of the current round that are done."""
        self.obsolete: Obsolete | None = None
        """Why the current round should be abandoned; None if it should not."""
        self.waiting: Wait | None = None
        """Why this machine has no round at the moment; None if it has one, or has not asked."""
        self.doing: Doing = "joining"
        self.out_of_reach = ""
        """Why the run does not answer at the moment, as a sentence; empty if it does."""
        self.is_suspended = False
        """Whether the run said last that it is suspended and will be served again."""
        self.download: Transfer | None = None
        """The last start that came."""
        self.upload: Transfer | None = None
        """The last contribution that went."""
        self._joined: Joined | None = None
        self._codes: ContributionCodes | None = None
        self._last_accepted = -1
        self._returning, self._keep_ticket = returning, keep_ticket
        self._evaluate, self._goes_on_after_failures = evaluate, False
        self._round_key: RoundKey | None = None
        self._lock = threading.Lock()
        self._is_leaving = threading.Event()
        self._beats: threading.Thread | None = None

    # ---- coming and going

    def come_back_as(self, ticket: Ticket | None, keep_ticket: Callable[[Ticket], Any]) -> None:
        """Sets the ticket to come back with, and where to store the new one. Call it before `join`."""
        self._returning, self._keep_ticket = ticket, keep_ticket

    def describe(self) -> RunInfo:
        """The facts of the run, before joining it."""
        return self._with_retries(self.link.describe)

    def join(self) -> Joined:
        """Joins the run, or comes back as the same machine, and then gives signs of life until `leave`."""
        joined = self._enter()
        self._beats = threading.Thread(target=self._beat, name="heloco-beats", daemon=True)
        self._beats.start()
        return joined

    def _enter(self) -> Joined:
        """Joins the run, or comes back as the same machine."""

        def ask() -> Joined:
            return self.link.join(self.name, returning=self._returning, layout=self.layout)

        try:
            self._joined = self._with_retries(ask)
        except Refused as refusal:
            _raise_if_ended(refusal)
            raise
        if self._codes is not None and not self._codes.fit(self._joined):
            self._codes = None
        if self._joined.terms.wire != WHOLE and self._codes is None:
            from heloco.cluster.client.contribution_codes import ContributionCodes

            self._codes = ContributionCodes(self._joined)
        self._returning = self._joined.ticket
        self._keep_ticket(self._joined.ticket)
        return self._joined

    @property
    def joined(self) -> Joined:
        """The run's answer to the last join. Call `join` first."""
        assert self._joined is not None, "join comes first"
        return self._joined

    def leave(self, text: str = "it left") -> None:
        """Leaves the run. If the run cannot be reached at once, it will notice by itself."""
        self._is_leaving.set()
        if self._beats is not None:
            self._beats.join(timeout=10)
        if self._joined is not None:  # also after the end: the run waits until its machines have the final model
            with contextlib.suppress(LinkDown, Refused):  # the run will notice by itself
                self.link.leave(self._joined.ticket, text)
        self.link.close()

    def send_model(self, layout: Layout, tensors: Mapping[str, Tensor], names: list[str]) -> None:
        """Sends the model of an external run, unless another machine has sent it already."""
        try:
            self._call(lambda ticket: self.link.send_model(ticket, layout, tensors, names))
        except Refused as refusal:
            if refusal.code is not RefusalCode.HAS_MODEL:
                raise

    # ---- evaluations

    def offer_evaluations(self, evaluate: Callable[[dict[str, Tensor]], Scores]) -> None:
        """Offers to evaluate models between rounds. One that fails is left out, and the next one is made again."""
        self._evaluate, self._goes_on_after_failures = evaluate, True

    def report_scores(self, report: ScoreReport) -> None:
        """Reports scores that the training loop found in the current round. Raises `Refused` if the run does not take them."""
        self._call(lambda ticket: self.link.report_scores(ticket, report))

    # ---- rounds

    def take(self, is_stopping: Callable[[], bool] = lambda: False) -> TakenRound | None:
        """The next round; None if `is_stopping` becomes true first."""
        self.doing = "waiting"
        while not is_stopping():
            wait_s = min(POLL_S, self.joined.beat_s * 2)
            answer = self._next_round(wait_s)
            self.waiting = answer if isinstance(answer, Wait) else None
            if isinstance(answer, EvaluationJob):
                self.doing = "evaluating"
                self._evaluate_model(answer)
                self.doing = "waiting"
                continue
            if isinstance(answer, Wait):
                continue
            if self.joined.start_layout is None:  # the run got its model after this machine had joined
                self._enter()
            self._hold(answer.key)
            self._last_accepted = answer.last_accepted
            try:
                taken_round = TakenRound(answer, self._fetch(answer))
            except NotHeld:
                self.doing = "waiting"
                continue
            self.doing = "training"
            return taken_round
        return None

    def _next_round(self, wait_s: float) -> RoundAnswer:
        evaluates = self._evaluate is not None
        return self._call(lambda ticket: self.link.next_round(ticket, wait_s, evaluates=evaluates))

    def _evaluate_model(self, job: EvaluationJob) -> None:
        """Evaluates a model for the run. If that fails, another will do it, or it is left out."""
        if self.joined.start_layout is None:  # the run got its model after this machine had joined
            self._enter()
        layout = Layout(self.joined.start_layout or ())
        assert self._evaluate is not None
        try:
            model = self._call(lambda ticket: self.link.fetch_evaluated(ticket, job, layout))
        except NotHeld:  # another does it
            return
        try:
            scores = self._evaluate(model)
        except Refused as refusal:
            self._note_failure(job, refusal.text)
            return
        except Exception as error:  # a task is the user's own code
            self._note_failure(job, f"{type(error).__name__}: {error}")
            return
        try:
            self._call(lambda ticket: self.link.send_scores(ticket, EvaluationResult(arrival=job.arrival, scores=scores)))
        except Refused as refusal:
            if refusal.code not in (RefusalCode.MALFORMED, RefusalCode.SCORES, RefusalCode.TOO_LONG):
                raise
            self._note_failure(job, refusal.text)

    def _note_failure(self, job: EvaluationJob, reason: str) -> None:
        """Stops evaluating, or gives this evaluation back."""
        if not self._goes_on_after_failures:
            self._evaluate = None
            self.tell(f"The evaluation at arrival {job.arrival} failed, and no other is made here ({reason}).")
            return
        self.tell(f"The evaluation at arrival {job.arrival} is left out. {reason}")
        result = EvaluationResult(arrival=job.arrival, scores={}, has_failed=True, text=printable(reason))
        self._call(lambda ticket: self.link.send_scores(ticket, result))

    def _fetch(self, assignment: Assignment) -> dict[str, Tensor]:
        layout = Layout(self.joined.start_layout or ())
        self.doing = "receiving"

        def fetch(ticket: Ticket) -> dict[str, Tensor]:
            request = partial(self.link.fetch, ticket, assignment.key, layout, assignment.start_digest)
            start, self.download = timed_transfer(layout.size, request)
            return start

        return self._call(fetch)

    def _hold(self, key: RoundKey | None) -> None:
        with self._lock:
            self.steps, self.obsolete, self._round_key = 0, None, key

    def hand_in(self, key: RoundKey, tensors: Mapping[str, Tensor], report: ContributionReport) -> Acknowledgement:
        """Sends the contribution until it is acknowledged. Raises `NotHeld` if it came too late or was refused. It is
        encoded once, however often it is sent."""
        layout = Layout(self.joined.contribution_layout or ())
        if self._codes is not None:
            tensors = self._codes.encode(key, tensors, last_accepted=self._last_accepted)
        self.doing = "sending"

        def send(ticket: Ticket) -> Acknowledgement:
            ack, self.upload = timed_transfer(layout.size, lambda: self.link.hand_in(ticket, key, layout, tensors, report))
            return ack

        try:
            return self._call(send)
        finally:
            self.doing = "waiting"
            self._hold(None)

    def final_model(self) -> dict[str, Tensor] | None:
        """The model of a run that has ended; None if it cannot be fetched within a few tries."""
        layout, failures, began = Layout(self.joined.start_layout or ()), 0, time.monotonic()
        while failures < FINAL_TRIES and time.monotonic() < began + self.patience_s:
            try:
                return self.link.fetch_final(self.joined.ticket, layout)
            except LinkDown:
                failures += 1
            except Refused as refusal:
                if refusal.code is not RefusalCode.BUSY:  # busy: the synchronizer is still writing a large model
                    break
            except (UserError, RunStopped):
                break
            self._is_leaving.wait(FIRST_PAUSE_S)
        return None

    def abandon(self, text: str) -> None:
        """Gives the current round back, with the reason in `text`. Its data is handed out again."""
        with contextlib.suppress(NotHeld):
            self._call(lambda ticket: self.link.abandon(ticket, text))
        self._hold(None)

    # ---- requests, repeated if necessary

    def _call(self, ask: Callable[[Ticket], T]) -> T:
        while True:
            try:
                return self._with_retries(lambda: ask(self.joined.ticket))
            except Refused as refusal:
                _raise_if_ended(refusal)
                if refusal.code in (RefusalCode.NOT_HELD, RefusalCode.NOT_FINITE):
                    self._hold(None)
                    raise NotHeld(refusal.text) from None
                if refusal.code in RESUMED:
                    continue  # the next try continues from the bytes that have arrived
                if refusal.code not in (RefusalCode.UNKNOWN_MACHINE, RefusalCode.SECRET):
                    raise
                self._enter()

    def _with_retries(self, ask: Callable[[], T]) -> T:
        """Repeats a request while the run is out of reach or its disk is full, with growing pauses, for at most `patience_s`."""
        began, was_away, last_reason = time.monotonic(), False, ""
        while True:
            try:
                answer = ask()
                self._note_back(was_away)
                return answer
            except LinkDown as error:
                reason = str(error)
            except Refused as refusal:
                if refusal.code not in RETRIED_LATER:
                    self._note_back(was_away)
                    raise
                self.is_suspended = self.is_suspended or refusal.code is RefusalCode.SUSPENDED
                reason = refusal.text
            waited_s = time.monotonic() - began
            if waited_s > self.patience_s:
                raise RunStopped(f"{self.link.address} was out of reach for {self.patience_s:g} s ({reason}): given up.")
            if not was_away or reason != last_reason:
                self.tell(f"{reason} Trying again.")
            was_away, last_reason, self.out_of_reach = True, reason, reason
            if self._is_leaving.wait(pause_after(waited_s)) or self.is_stopping():
                raise MachineStopRequested(reason)

    def _note_back(self, was_away: bool) -> None:
        if was_away:
            self.out_of_reach, self.is_suspended = "", False
            self.tell("The run is back.")

    # ---- signs of life

    def _beat(self) -> None:
        while not self._is_leaving.wait(self.joined.beat_s):
            round_key = self._round_key
            try:
                answer = self.link.beat(self.joined.ticket, self.steps)
            except (LinkDown, Refused):
                continue  # the next request will find out
            self._note_suspension(answer.ended)
            with self._lock:
                if round_key is not None and round_key == self._round_key:  # otherwise the answer is about another round
                    self.obsolete = why_obsolete(answer, round_key)

    def _note_suspension(self, ended: Ended | None) -> None:
        if ended is None or ended.kind != "suspended":
            self.is_suspended = False
        elif not self.is_suspended:
            self.is_suspended = True
            keeps = f"This machine keeps its round, and waits for the run for up to {self.patience_s:g} s"
            self.tell(f"The run is suspended, and goes on when it is served again: {ended.text}. {keeps}.")


def pause_after(waited_s: float) -> float:
    """Seconds until the next try, after the run has been out of reach for `waited_s`."""
    return min(PAUSE_LIMIT_S, max(FIRST_PAUSE_S, PAUSE_SHARE * waited_s))


def _raise_if_ended(error: Refused) -> None:
    if error.refusal.end is not None:
        raise RunEnded(error.refusal.end, error.text) from None
