"""Handing out rounds: which machine does which worker's, with how many steps, for how long, and what they begin with."""

from pathlib import Path

from heloco.cluster.protocol.messages import Assignment, RoundAnswer, RoundKey, Ticket, Wait
from heloco.cluster.protocol.refusals import Code, Refused
from heloco.cluster.server.pauses import holds_back
from heloco.cluster.server.roster import Machine
from heloco.cluster.server.state import ServiceState
from heloco.policy import inner_steps
from heloco.policy.deadlines import RoundDeadline, reference_pace
from heloco.records.events import AbandonKind


class RoundDispatcher:
    def __init__(self, state: ServiceState) -> None:
        self.state = state
        cluster = state.config.cluster
        self.deadline = RoundDeadline(cluster.patience, cluster.patience * cluster.beat_s, cluster.round_limit_s)

    def next(self, ticket: Ticket) -> RoundAnswer:
        """A round for the machine: the one it holds, or a new one; or why there is none."""
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
            held = state.run.synchronizer.held[machine.round.worker]
            return Assignment(
                worker=held.worker, round=held.index, version=held.version, shard=held.shard, spans=held.spans,
                inner_steps=held.inner_steps, shard_steps=held.shard_steps, run_steps=held.run_steps,
                start_digest=state.run.start_digests[held.version],
                keeps_state=state.run.last_machines.get(held.worker) == machine.id,
            )  # fmt: skip

    def _reason_to_wait(self, machine: Machine) -> Wait | None:
        state = self.state
        assert state.run is not None
        if state.paused and holds_back(state.paused, has_contributed=machine.id in state.run.participants()):
            return Wait(kind="paused", text=state.paused.text)
        if state.now_s < machine.rests_until_s:
            return Wait(kind="rest", text="its last rounds came to nothing, so the next one comes a little later")
        if not self._free_seats(machine):
            return Wait(kind="no-seat", text="all workers' rounds are under way")
        return None

    def _free_seats(self, machine: Machine) -> list[int]:
        """Seats whose rounds the machine may do and that are not under way or waiting at a barrier."""
        assert self.state.run is not None
        synchronizer = self.state.run.synchronizer
        open_seats = self.state.roster.seats_open_to(machine, self.state.now_s)
        return sorted(open_seats - {*synchronizer.held, *synchronizer.waiting})

    def _hand_out(self, machine: Machine) -> None:
        """Of the free seats the one with the fewest arrivals, the machine's own where that is among them."""
        state = self.state
        with state.recording() as run:
            assert state.starts is not None
            arrivals, free = run.synchronizer.arrivals_of, self._free_seats(machine)
            seat = min(free, key=lambda s: (arrivals[s], s != machine.seat, s))
            steps = self._steps(machine)
            run.dispatch(seat, machine.id, steps, run.write_start(state.starts), state.now_s)
            held = run.synchronizer.held[seat]
            self.took(machine, RoundKey(seat, held.index, held.version), steps)

    def took(self, machine: Machine, key: RoundKey, steps: int) -> None:
        """The machine holds a round, and has this long for it."""
        own, others = self._paces(machine)
        self.state.roster.took(machine, key, self.state.now_s, self.deadline(steps, own, others))

    def _paces(self, machine: Machine) -> tuple[list[float], list[float]]:
        """Measured paces of the machine's last rounds, and of the others'."""
        own, others = list[float](), list[float]()
        for each in self.state.roster:
            if known := self.state.book.get(each.id):
                (own if each is machine else others).extend(known.paces_s)
        return own, others

    def _steps(self, machine: Machine) -> int:
        """H; with DyLU what the machine does in the time in which the fastest does H, by measured paces."""
        workers, book = self.state.config.workers, self.state.book
        known = book.get(machine.id)
        if workers.steps == "constant" or known is None or known.pace_s is None:
            return workers.inner_steps
        paces = [k.pace_s for m in self.state.roster if (k := book.get(m.id)) and k.pace_s]
        reference = reference_pace(paces)
        assert reference is not None
        return inner_steps(workers.steps, workers.inner_steps, [reference, max(reference, known.pace_s)])[1]

    # ---- the round that a machine holds

    def holding(self, ticket: Ticket, key: RoundKey) -> Machine:
        """The machine, if it holds this round."""
        state = self.state
        machine = state.machine(ticket)
        state.check_open()
        if state.run is None:
            raise Refused(Code.NOT_HELD, "The run has no model yet.")
        if machine.round != key:
            at = state.run.synchronizer.outer_step
            if key.version > at:
                raise Refused(Code.FUTURE, f"Version {key.version} is from the future: the run is at {at}.")
            holds = "none" if machine.round is None else "round {1} of worker {0}, version {2}".format(*machine.round)
            asked = f"round {key.round} of worker {key.worker}, version {key.version}"
            raise Refused(
                Code.NOT_HELD,
                f"{machine.name} does not hold {asked} (it holds {holds}): that one was given up or given to another. "
                "Take a fresh round.",
            )
        return machine

    def start(self, ticket: Ticket, key: RoundKey) -> Path:
        """The file that the machine's round begins with."""
        with self.state.lock:
            machine = self.holding(ticket, key)
            assert self.state.starts is not None
            if not self.state.starts.has(key.version):
                self.give_up(machine, "start-gone", "what it begins with is gone")
                raise Refused(Code.NOT_HELD, "What this round begins with is gone: take a fresh one.")
            return self.state.starts.path(key.version)

    def final(self, ticket: Ticket) -> Path:
        """The file with the model of a run that has ended."""
        state = self.state
        with state.lock:
            state.machine(ticket)
            if state.run is None or state.starts is None or state.ended is None:
                raise Refused(Code.NOT_HELD, "The run has not ended: its model is still being trained.")
            return state.starts.write_final(state.run.final_model())

    def abandon(self, ticket: Ticket, text: str) -> None:
        """The machine gives its round back undone."""
        with self.state.changed:
            machine = self.state.machine(ticket)
            if machine.round and self.state.ended is None:
                self.give_up(machine, "too-stale" if self.is_too_stale(machine) else "given-back", text)

    def is_too_stale(self, machine: Machine) -> bool:
        """Whether the machine's contribution would come too late to be used."""
        run, held = self.state.run, machine.round
        if run is None or held is None:
            return False
        return run.synchronizer.drop(run.synchronizer.outer_step - held.version) == "skip"

    def give_up(self, machine: Machine, kind: AbandonKind, text: str) -> None:
        """The machine's round comes to nothing: its data goes back, and the round to another."""
        assert machine.round is not None
        with self.state.recording() as run:
            run.abandon(machine.round.worker, kind, text, self.state.now_s)
            self.put_down(machine, remove_upload=True)
            if known := self.state.book.get(machine.id):
                self.state.roster.rest(machine, known.wasted, self.state.now_s)

    def put_down(self, machine: Machine, *, remove_upload: bool) -> None:
        """The machine holds no round any more."""
        assert machine.round is not None
        self.state.uploads.drop(machine.round, remove=remove_upload)
        self.state.roster.put_down(machine, self.state.now_s)
        self.tidy_starts()

    def tidy_starts(self) -> None:
        """Removes the files that no round under way began with."""
        run, starts = self.state.run, self.state.starts
        assert run is not None and starts is not None
        starts.keep_only({held.version for held in run.synchronizer.held.values()} | {run.synchronizer.outer_step})
