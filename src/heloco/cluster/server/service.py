"""The service of a run, composed of parts that Ray's actor and the HTTPS gateway call.

    state           the run, the roster, the lock           contributions   uploads, commits, acknowledgements
    rounds          handing out rounds                      models          the model of an external run
    members         joining, leaving, beats                 housekeeping    periodic work
    pauses          when no rounds are handed out           admin           status, files, stopping
    evaluation      models that machines evaluate

A bad request raises `Refused` with a code and a sentence, and has changed nothing.
"""

import time
from collections.abc import Callable
from pathlib import Path

import heloco
from heloco.cluster.protocol.messages import RoundAnswer, RoundKey, RunInfo, Ticket, Wait
from heloco.cluster.server.administration import Administration
from heloco.cluster.server.contributions import Contributions
from heloco.cluster.server.housekeeping import Housekeeping
from heloco.cluster.server.journaled_run import JournaledRun
from heloco.cluster.server.machine_evaluation import MachineEvaluation
from heloco.cluster.server.membership import Membership
from heloco.cluster.server.model_intake import ModelIntake, RunFactory
from heloco.cluster.server.pauses import Pauses
from heloco.cluster.server.round_dispatcher import RoundDispatcher
from heloco.cluster.server.state import ServiceState
from heloco.cluster.server.transfers import SnapshotStore
from heloco.records.run_end import FINISHED_TEXT
from heloco.run.config import RunConfig
from heloco.run.settings import to_toml


class Service:
    """`create_run` makes an external run from the model of the first machine."""

    def __init__(
        self,
        config: RunConfig,
        folder: Path,
        *,
        task_digest: str = "",
        model_digest: str = "",
        create_run: RunFactory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.task_digest, self.model_digest = task_digest, model_digest
        self.is_external = create_run is not None
        self.notices: list[str] = []
        """Sentences for the person who serves the run."""
        self.state = state = ServiceState(config, folder, clock)
        self.rounds = RoundDispatcher(state)
        self.pauses = Pauses(state)
        self.members = Membership(state, self.rounds, self.pauses)
        self.contributions = Contributions(state, self.rounds, self.members)
        self.housekeeping = Housekeeping(state, self.rounds, self.members, self.pauses)
        self.evaluation = MachineEvaluation(state, self.rounds)
        self.admin = Administration(state, self.rounds)
        self.models = ModelIntake(state, create_run, self._serve_new_run)

    def next(self, ticket: Ticket, evaluates: bool = False) -> RoundAnswer:
        """The next thing to do for a machine: a round, or a model to evaluate if it offers that."""
        if job := self.evaluation.next(ticket, evaluates):
            return job
        answer = self.rounds.next(ticket)
        return (self.evaluation.next(ticket, evaluates, is_idle=True) or answer) if isinstance(answer, Wait) else answer

    def describe(self) -> RunInfo:
        """What a machine needs to know before it joins. Raises `Refused` if it should ask again when the run is served again."""
        if not self.state.is_over:
            self.state.check_open()
        return RunInfo(
            run=self.state.run_id, heloco=heloco.__version__, config=to_toml(self.state.config), task_digest=self.task_digest,
            model_digest=self.model_digest, external=self.is_external, ended=self.state.ended,
        )  # fmt: skip

    def take_up(self, run: JournaledRun, starts: SnapshotStore) -> None:
        """Serves a run that has begun. Machines that held rounds before a restart may come back with them."""
        state = self.state
        state.run, state.starts, state.paused = run, starts, run.paused
        self.evaluation.take_up(run)
        state.set_time(run.time_s)
        if len(state.roster):  # they joined before the run had its model
            self.members.note_present()
        state.book = run.book
        self.pauses.take_up()
        self.housekeeping.take_up()
        for worker, terms in run.synchronizer.rounds_under_way.items():
            entry = state.book.get(run.holders[worker])
            machine = state.roster.join(run.holders[worker], state.now_s, seat=entry.seat if entry else None)
            self.rounds.assign(machine, RoundKey(worker, terms.index, terms.version), terms.inner_steps)
            machine.is_away = True
        self.rounds.tidy_starts()
        if run.is_finished:
            state.end("finished", FINISHED_TEXT)

    def _serve_new_run(self, run: JournaledRun, starts: SnapshotStore) -> None:
        self.take_up(run, starts)
        self.pauses.consider()
        self.state.changed.notify_all()

    def finish_evaluations(self) -> None:
        """If the run is finished, waits for its last evaluations."""
        run = self.state.run
        if run is not None and run.is_finished and not self.state.has_failed:
            run.finish_evaluations()

    def close(self) -> None:
        """Drops unfinished uploads and closes the run's journal and files. Acknowledged contributions stay on disk."""
        with self.state.lock:
            self.state.uploads.close()
            self.models.drop()
            if self.state.run is not None:
                self.state.run.close()


def wait_for_round(service: Service, ticket: Ticket, wait_s: float, evaluates: bool = False) -> RoundAnswer:
    """A round as soon as one is free, or after `wait_s` the reason why there is none."""
    state = service.state
    until_s = state.now_s + wait_s
    with state.changed:
        while True:
            answer = service.next(ticket, evaluates=evaluates)
            if not isinstance(answer, Wait) or (left_s := until_s - state.now_s) <= 0:
                return answer
            state.changed.wait(min(left_s, answer.ask_again_s))
