"""Evaluations by machines that offer them, one at a time. While such a machine is present, the synchronizer leaves them to it.

In an external run the machines alone have the data. What they find is an event of the journal, and so are the scores that their
training loops report by themselves."""

import math
from pathlib import Path

from heloco.cluster.protocol.messages import EvaluationJob, RoundKey, Ticket, Wait, printable
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.protocol.score_messages import EvaluationResult, ScoreReport
from heloco.cluster.server.evaluation_queue import EvaluationDue, EvaluationQueue
from heloco.cluster.server.journaled_run import JournaledRun
from heloco.cluster.server.roster import Machine
from heloco.cluster.server.round_dispatcher import RoundDispatcher
from heloco.cluster.server.state import ServiceState
from heloco.errors import UserError
from heloco.records.events import Evaluate
from heloco.task import Scores, check_scores


class MachineEvaluation:
    """Gives models to machines that offer to evaluate them, and takes the scores in."""

    def __init__(self, state: ServiceState, rounds: RoundDispatcher) -> None:
        self.state, self.rounds = state, rounds

    def take_up(self, run: JournaledRun) -> None:
        """Lets the run's queue leave evaluations to the machines that offer to evaluate."""
        if run.evaluations is not None:
            run.evaluations.is_left_to = self._is_left_to
            run.evaluations.is_hopeless = lambda: self._is_finished and not self._is_left_to(None)

    @property
    def _is_finished(self) -> bool:
        return self.state.ended is not None and self.state.ended.kind == "finished"

    def _is_left_to(self, machine: str | None) -> bool:
        """Whether this machine, or if None any machine, is here and evaluates."""
        limit_s = self.state.config.cluster.patience * self.state.config.cluster.beat_s
        present = [m for m in self.state.roster if m.evaluates and self.state.now_s - m.seen_s < limit_s]
        return any(machine in (None, m.id) for m in present)

    def next(self, ticket: Ticket, evaluates: bool, *, is_idle: bool = False) -> EvaluationJob | Wait | None:
        """A model for the machine to evaluate; None if it should go on with rounds. In an external run a machine does a round
        between two evaluations, unless it `is_idle`: there is no round for it."""
        with self.state.lock:
            machine = self.state.machine(ticket)
            machine.evaluates = evaluates
            queue = self._queue()
            if not evaluates or machine.round is not None or queue is None:
                return None
            if self._is_external and self._is_rounds_turn(machine, queue, is_idle):
                return None
            if job := queue.lend(machine.id):
                return EvaluationJob(arrival=job[0].arrival, digest=job[1])
            if self.state.is_over and queue.waiting:
                return Wait(kind="evaluation", text="the last models are being evaluated")
            return None

    def _is_rounds_turn(self, machine: Machine, queue: EvaluationQueue, is_idle: bool) -> bool:
        run = self.state.run
        assert run is not None
        if run.synchronizer.arrivals == 0 and max(queue.newest, run.machine_scores.arrival) < 0:
            run.evaluate_if(True)  # what the run began with, to compare with
        if self.state.ended is not None:
            return not self._is_finished
        return machine.has_evaluated and not is_idle

    def model(self, ticket: Ticket, arrival: int) -> Path:
        """The file of the model that the machine evaluates."""
        machine, queue = self.state.machine(ticket), self._queue()
        path = queue.lent_model(machine.id, arrival) if queue is not None else None
        if path is None:
            raise Refused(
                RefusalCode.NOT_HELD, f"The model of arrival {arrival} is not to be evaluated by {machine.name}: take a round."
            )
        return path

    def take_in(self, ticket: Ticket, result: EvaluationResult) -> None:
        """Records the scores that a machine found. A repeated request changes nothing."""
        machine, queue = self.state.machine(ticket), self._queue()
        if self._is_external:
            self._take_into_journal(machine, result)
            return
        if result.has_failed:
            machine.evaluates = False  # the synchronizer does it
            return
        scores = {
            source: {name: math.nan if value is None else value for name, value in measures.items()}
            for source, measures in result.scores.items()
        }
        if not scores:
            raise Refused(RefusalCode.MALFORMED, "There must be at least one source.")
        try:
            check_scores(scores)
        except UserError as error:
            raise Refused(RefusalCode.MALFORMED, str(error)) from error
        if queue is not None:
            queue.take_in(machine.id, result.arrival, scores)

    def _take_into_journal(self, machine: Machine, result: EvaluationResult) -> None:
        with self.state.recording(may_be_finished=True) as run:
            queue = self._queue()
            due = queue.lent_due(machine.id, result.arrival) if queue is not None else None
            if queue is None or due is None:
                return
            if result.has_failed:
                queue.give_back(machine.id, result.arrival, printable(result.text))
            else:
                self._note(run, machine, due, 0, run.machine_scores.check(result.scores))
            machine.has_evaluated = True

    def take_report(self, ticket: Ticket, report: ScoreReport) -> None:
        """Records scores that a machine's training loop found in its round. If the run's model has scores at this arrival or at a
        later one, those stand."""
        key = RoundKey(report.worker, report.round, report.version)
        with self.state.lock:
            machine = self.rounds.holder_of(ticket, key)
            if not self._is_external:
                raise Refused(RefusalCode.SCORES, "This run evaluates its model by its own task: leave report_eval out.")
            with self.state.recording() as run:
                scores, place = run.machine_scores.check(report.scores), run.start_places[key.worker]
                if report.own_steps or place.arrival > run.machine_scores.arrival:
                    self._note(run, machine, place, report.own_steps, scores)

    def _note(self, run: JournaledRun, machine: Machine, place: EvaluationDue, own_steps: int, scores: Scores) -> None:
        event = Evaluate(
            time_s=self.state.now_s, machine=machine.id, arrival=place.arrival, outer_step=place.outer_step,
            arrival_s=place.time_s, inner_steps=place.inner_steps, units=place.units, own_steps=own_steps, scores=scores,
        )  # fmt: skip
        run.note(event)

    @property
    def _is_external(self) -> bool:
        return self.state.run is not None and self.state.run.machines_evaluate

    def _queue(self) -> EvaluationQueue | None:
        return self.state.run.evaluations if self.state.run is not None else None
