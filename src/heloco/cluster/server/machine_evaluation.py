"""Evaluations by machines that offer them, one at a time. While such a machine is present, the synchronizer leaves them to it."""

import math
from pathlib import Path

from heloco.cluster.protocol.messages import EvaluationJob, EvaluationResult, Ticket, Wait
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.server.evaluation_queue import EvaluationQueue
from heloco.cluster.server.journaled_run import JournaledRun
from heloco.cluster.server.state import ServiceState
from heloco.errors import UserError
from heloco.task import check_scores


class MachineEvaluation:
    """Gives models to machines that offer to evaluate them, and takes the scores in."""

    def __init__(self, state: ServiceState) -> None:
        self.state = state

    def take_up(self, run: JournaledRun) -> None:
        """Lets the run's queue leave evaluations to the machines that offer to evaluate."""
        if run.evaluations is not None:
            run.evaluations.is_left_to = self._is_left_to

    def _is_left_to(self, machine: str | None) -> bool:
        """Whether this machine, or if None any machine, is here and evaluates."""
        limit_s = self.state.config.cluster.patience * self.state.config.cluster.beat_s
        present = [m for m in self.state.roster if m.evaluates and self.state.now_s - m.seen_s < limit_s]
        return any(machine in (None, m.id) for m in present)

    def next(self, ticket: Ticket, evaluates: bool) -> EvaluationJob | Wait | None:
        """A model for the machine to evaluate; None if it should go on with rounds."""
        with self.state.lock:
            machine = self.state.machine(ticket)
            machine.evaluates = evaluates
            queue = self._queue()
            if not evaluates or machine.round is not None or queue is None:
                return None
            if job := queue.lend(machine.id):
                return EvaluationJob(arrival=job[0].arrival, digest=job[1])
            if self.state.is_over and queue.waiting:
                return Wait(kind="evaluation", text="the last models are being evaluated")
            return None

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

    def _queue(self) -> EvaluationQueue | None:
        return self.state.run.evaluations if self.state.run is not None else None
