"""Handing out rounds: which machine does which worker's round, with how many steps, until when, and from which start."""

import math
from pathlib import Path

from heloco.cluster.protocol.messages import Assignment, RoundAnswer, RoundKey, Ticket, Wait
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.server.pauses import holds_back
from heloco.cluster.server.roster import Machine
from heloco.cluster.server.state import ServiceState
from heloco.policy import inner_steps
from heloco.policy.deadlines import RoundDeadline, reference_pace
from heloco.records.events import AbandonKind


class RoundDispatcher:
    """Hands out rounds to machines, and gives up rounds that take too long."""

    def __init__(self, state: ServiceState) -> None:
        self.state = state
        cluster = state.config.cluster
        self.deadline = RoundDeadline(cluster.patience, cluster.patience * cluster.beat_s, cluster.round_limit_s)
        self._grace_until_s = -math.inf

    def next(self, ticket: Ticket) -> RoundAnswer:
        """The round that the machine holds, or a new one, or the reason why there is none."""
        state = self.state
        with state.changed:
            machine = state.machine(ticket)
            state.check_open()
            machine.asked_s = state.now_s
            if state.run is None:
                return Wait(kind="no-model", text="the run has no model yet")
            if machine.round is None:
                if wait := self._reason_to_wait(machine):
                    return wait
                self._hand_out(machine)
            assert machine.round is not None
            terms = state.run.synchronizer.rounds_under_way[machine.round.worker]
            return Assignment(
                worker=terms.worker, round=terms.index, version=terms.version, shard=terms.shard, spans=terms.spans,
                inner_steps=terms.inner_steps, shard_steps=terms.shard_steps, progress=terms.progress,
                start_digest=state.run.start_digests[terms.version],
                keeps_state=state.run.last_machines.get(terms.worker) == machine.id,
                last_accepted=state.run.last_accepted(terms.worker, machine.id),
            )  # fmt: skip

    def _reason_to_wait(self, machine: Machine) -> Wait | None:
        state = self.state
        assert state.run is not None
        if state.is_stopping:
            return Wait(kind="stopping", text="the run is being saved, and then ends or restarts")
        if state.paused and holds_back(state.paused, has_contributed=machine.id in state.run.participants()):
            return Wait(kind="paused", text=state.paused.text)
        if state.now_s < machine.rests_until_s:
            return Wait(kind="rest", text="its last rounds were not accepted, so the next one comes a little later")
        if not self._free_seats(machine):
            return Wait(kind="no-seat", text="all workers' rounds are under way")
        grace_left_s = self._grace_until_s - state.now_s
        if grace_left_s > 0:
            return Wait(kind="grace", text="others that arrive in a moment start together with it", ask_again_s=grace_left_s)
        return None

    def note_arrival(self) -> None:
        """Begins a grace period with the first arrival after the last one, and ends it when there is nobody left to wait for. No
        round begins in it: a machine that starts just before the others arrive would work from an old model."""
        state, rounds = self.state, self.state.config.rounds
        assert state.run is not None
        if not state.run.synchronizer.rounds_under_way:
            self._grace_until_s = state.now_s
        elif rounds.grace and state.now_s > self._grace_until_s:
            self._grace_until_s = state.now_s + rounds.grace * rounds.inner_steps * (self._reference_pace() or 0.0)

    def _free_seats(self, machine: Machine) -> list[int]:
        """Seats whose next round the machine may do now: not under way, and not waiting at a barrier."""
        assert self.state.run is not None
        synchronizer = self.state.run.synchronizer
        open_seats = self.state.roster.seats_open_to(machine, self.state.now_s)
        return sorted(open_seats - {*synchronizer.rounds_under_way, *synchronizer.waiting})

    def _hand_out(self, machine: Machine) -> None:
        """Hands out the round of the free seat with the fewest arrivals. Among equals, the machine's own seat comes first."""
        state = self.state
        with state.recording() as run:
            assert state.starts is not None
            arrivals, free = run.synchronizer.arrivals_of, self._free_seats(machine)
            seat = min(free, key=lambda s: (arrivals[s], s != machine.seat, s))
            steps = self._steps(machine)
            run.dispatch(seat, machine.id, steps, run.write_start(state.starts), state.now_s)
            terms = run.synchronizer.rounds_under_way[seat]
            self.assign(machine, RoundKey(seat, terms.index, terms.version), steps)

    def assign(self, machine: Machine, key: RoundKey, steps: int) -> None:
        """Notes that the machine holds a round, and sets its deadline."""
        own_paces, other_paces = self._paces(machine)
        self.state.roster.assign(machine, key, self.state.now_s, self.deadline(steps, own_paces, other_paces))

    def _paces(self, machine: Machine) -> tuple[list[float], list[float]]:
        """Measured paces of the machine's last rounds, and of the other machines' rounds."""
        own_paces, other_paces = list[float](), list[float]()
        for present in self.state.roster:
            if entry := self.state.book.get(present.id):
                (own_paces if present is machine else other_paces).extend(entry.paces_s)
        return own_paces, other_paces

    def _steps(self, machine: Machine) -> int:
        """H, or with DyLU the steps that the machine does in the time in which the fastest does H, by measured paces."""
        rounds, book = self.state.config.rounds, self.state.book
        entry = book.get(machine.id)
        if rounds.steps == "constant" or entry is None or entry.pace_s is None:
            return rounds.inner_steps
        reference = self._reference_pace()
        assert reference is not None
        return inner_steps(rounds.steps, rounds.inner_steps, [reference, max(reference, entry.pace_s)])[1]

    def _reference_pace(self) -> float | None:
        """The pace of the fastest machine that is here, within reason."""
        book = self.state.book
        return reference_pace([entry.pace_s for m in self.state.roster if (entry := book.get(m.id)) and entry.pace_s])

    # ---- the round that a machine holds

    def holder_of(self, ticket: Ticket, key: RoundKey) -> Machine:
        """The machine of the ticket. Raises `Refused` unless it holds this round."""
        state = self.state
        machine = state.machine(ticket)
        state.check_open()
        if state.run is None:
            raise Refused(RefusalCode.NOT_HELD, "The run has no model yet.")
        if machine.round != key:
            outer_step = state.run.synchronizer.outer_step
            if key.version > outer_step:
                raise Refused(RefusalCode.FUTURE, f"Version {key.version} is from the future: the run is at {outer_step}.")
            holds = "none" if machine.round is None else "round {1} of worker {0}, version {2}".format(*machine.round)
            round_name = f"round {key.round} of worker {key.worker}, version {key.version}"
            raise Refused(
                RefusalCode.NOT_HELD,
                f"{machine.name} does not hold {round_name} (it holds {holds}): the round was given up or given to another "
                "machine. Take a fresh round.",
            )
        return machine

    def start(self, ticket: Ticket, key: RoundKey) -> Path:
        """The file that the machine's round begins with."""
        with self.state.lock:
            machine = self.holder_of(ticket, key)
            assert self.state.starts is not None
            if not self.state.starts.has(key.version):
                self.give_up(machine, "start-gone", "its start file is gone")
                raise Refused(RefusalCode.NOT_HELD, "The start file of this round is gone: take a fresh round.")
            return self.state.starts.path(key.version)

    def final(self, ticket: Ticket) -> Path:
        """The file with the model of a run that has ended. It is written without the lock: the model does not change any more."""
        state = self.state
        with state.lock:
            state.machine(ticket)
            if state.run is None or state.starts is None or not state.is_over:
                raise Refused(RefusalCode.NOT_HELD, "The run has not ended: its model is still being trained.")
        return state.starts.write_final(state.run.final_model())

    def abandon(self, ticket: Ticket, text: str) -> None:
        """The machine gives its round back undone."""
        with self.state.changed:
            machine = self.state.machine(ticket)
            if machine.round and self.state.ended is None:
                self.give_up(machine, "too-stale" if self.is_too_stale(machine) else "given-back", text)

    def is_too_stale(self, machine: Machine) -> bool:
        """Whether the machine's contribution would arrive too late to be used."""
        run, current_round = self.state.run, machine.round
        if run is None or current_round is None:
            return False
        return run.synchronizer.drop(run.synchronizer.outer_step - current_round.version) == "skip"

    def give_up(self, machine: Machine, kind: AbandonKind, text: str) -> None:
        """Abandons the machine's round. Its data goes back to the ledger, and another machine does the worker's next round."""
        assert machine.round is not None
        with self.state.recording() as run:
            run.abandon(machine.round.worker, kind, text, self.state.now_s)
            self.put_down(machine, remove_upload=True)
            if entry := self.state.book.get(machine.id):
                self.state.roster.rest(machine, entry.wasted_rounds, self.state.now_s)

    def put_down(self, machine: Machine, *, remove_upload: bool) -> None:
        """The machine holds no round any more."""
        assert machine.round is not None
        self.state.uploads.drop(machine.round, remove=remove_upload)
        self.state.roster.put_down(machine, self.state.now_s)
        self.tidy_starts()

    def tidy_starts(self) -> None:
        """Removes the start files that no round under way needs."""
        run, starts = self.state.run, self.state.starts
        assert run is not None and starts is not None
        starts.keep_only({terms.version for terms in run.synchronizer.rounds_under_way.values()} | {run.synchronizer.outer_step})
