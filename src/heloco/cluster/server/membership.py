"""Machines join and leave. Each is identified by its own secret, not by its name."""

import secrets

import heloco
from heloco.cluster.protocol.messages import BeatAnswer, Joined, JoinRequest, Ticket, WireTerms
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.server.machine_book import hash_secret
from heloco.cluster.server.pauses import Pauses
from heloco.cluster.server.roster import Machine
from heloco.cluster.server.round_dispatcher import RoundDispatcher
from heloco.cluster.server.state import ServiceState
from heloco.records.events import AbandonKind, Join, Part, PartKind
from heloco.records.machine_ids import make_id
from heloco.run import RunConfig
from heloco.wire.layout import Layout

PRESENT_LIMIT = 4096
_ROUND_OF: dict[PartKind, AbandonKind] = {"lost": "lost", "evicted": "evicted", "turned-away": "not-finite"}
"""Why the round of a machine that leaves in this way is abandoned; "given-back" for the other ways."""


class Membership:
    """Lets machines join, come back and leave, and bars those that may not."""

    def __init__(self, state: ServiceState, rounds: RoundDispatcher, pauses: Pauses) -> None:
        self.state, self.rounds, self.pauses = state, rounds, pauses

    def join(self, request: JoinRequest, ticket: Ticket | None = None, token: str = "") -> Joined:
        """A new machine joins, or a machine with a ticket of this run comes back. `token` is the id of the token it showed."""
        state = self.state
        with state.changed:
            state.check_open()
            self._check_fits(request)
            if ticket is not None and state.book.proves(ticket.machine, ticket.secret):
                state.check_not_barred(ticket.machine)
            else:
                ticket = self._new_ticket(request.name)
            machine = self._enter(ticket, token)
            self.pauses.consider()
            run, starts = state.run, state.starts
            return Joined(
                run=state.run_id, ticket=ticket, seat=machine.seat, seats=state.roster.seats,
                planned_arrivals=state.config.run.arrivals, beat_s=state.config.cluster.beat_s,
                terms=terms_of(state.config), needs_model=run is None,
                start_layout=starts.layout.entries if starts else None,
                contribution_layout=run.contribution_layout.entries if run else None,
            )  # fmt: skip

    def _check_fits(self, request: JoinRequest) -> None:
        if request.version.split(".")[:2] != heloco.__version__.split(".")[:2]:
            raise Refused(
                RefusalCode.VERSION,
                f"This run has heloco {heloco.__version__}, and the machine has {request.version}: install the same version.",
            )
        starts = self.state.starts
        if starts is None and request.layout is None:
            raise Refused(
                RefusalCode.NO_MODEL, "This run trains the model that its machines bring: join it from a training script."
            )
        if starts is None or request.layout is None:
            return
        if (difference := starts.layout.difference(Layout(request.layout))) is not None:
            raise Refused(RefusalCode.LAYOUT, f"This run trains another model: here, {difference}.")

    def _new_ticket(self, name: str) -> Ticket:
        if len(self.state.roster) >= PRESENT_LIMIT:
            raise Refused(RefusalCode.BUSY, f"{PRESENT_LIMIT} machines are here already: wait until one leaves.")
        return Ticket(machine=make_id(clean_name(name), secrets.token_hex(4)), secret=secrets.token_urlsafe(24))

    def _enter(self, ticket: Ticket, token: str) -> Machine:
        state = self.state
        entry, is_here = state.book.get(ticket.machine), ticket.machine in state.roster.present
        machine = state.roster.join(ticket.machine, state.now_s, seat=entry.seat if entry else None)
        secret_hash = hash_secret(ticket.secret)
        if state.run is None:
            state.book.note_join(machine.id, secret_hash, token, machine.seat)
        elif not is_here:
            event = Join(time_s=state.now_s, machine=machine.id, seat=machine.seat, secret_hash=secret_hash, token=token)
            try:
                with state.recording() as run:
                    run.note(event)
            except Refused:
                state.roster.leave(machine)
                raise
        return machine

    def note_present(self) -> None:
        """Records the machines that joined before the run had its model."""
        for machine in self.state.roster:
            entry = self.state.book.get(machine.id)
            assert entry is not None
            with self.state.recording() as run:
                run.note(
                    Join(
                        time_s=self.state.now_s, machine=machine.id, seat=machine.seat, secret_hash=entry.secret_hash,
                        token=entry.token,
                    )
                )  # fmt: skip

    def leave(self, ticket: Ticket, text: str) -> None:
        """A machine leaves of its own accord. Its round is given up, and nothing happens if it is not present."""
        with self.state.changed:
            if ticket.machine in self.state.roster.present:
                self.part_with(self.state.machine(ticket), "left", text)

    def part_with(self, machine: Machine, kind: PartKind, text: str) -> None:
        """Removes a machine from the run, and gives up its round."""
        state = self.state
        if machine.round and state.run is not None and state.ended is None:
            self.rounds.give_up(machine, _ROUND_OF.get(kind, "given-back"), text)
        state.roster.leave(machine)
        if state.run is None:
            state.book.note_part(machine.id, kind, text)
        elif state.ended is None:
            with state.recording() as run:
                run.note(Part(time_s=state.now_s, machine=machine.id, kind=kind, text=text))
        self.pauses.consider()
        state.changed.notify_all()

    def evict(self, machine: str, text: str) -> None:
        """Removes a machine and bars it for good. It may have left already."""
        with self.state.changed:
            state, text = self.state, text or "it was evicted"
            if present := state.roster.present.get(machine):
                self.part_with(present, "evicted", text)
            elif state.book.get(machine) is None:
                raise Refused(
                    RefusalCode.NO_SUCH, f"There was never a machine {machine!r} here: `heloco status` lists those that are."
                )
            elif state.run is None:
                state.book.note_part(machine, "evicted", text)
            else:
                with state.recording() as run:
                    run.note(Part(time_s=state.now_s, machine=machine, kind="evicted", text=text))

    def declare_lost(self, machine: str, text: str) -> None:
        """Removes a machine whose process is known to be dead, without waiting for the timeout."""
        with self.state.changed:
            if present := self.state.roster.present.get(machine):
                self.part_with(present, "lost", text)

    def evict_token(self, token: str, text: str) -> None:
        """Evicts all present machines that joined with a token."""
        with self.state.changed:
            for machine in self.state.roster:
                if (entry := self.state.book.get(machine.id)) and entry.token == token:
                    self.part_with(machine, "evicted", text)

    def beat(self, ticket: Ticket, steps: int) -> BeatAnswer:
        """A sign of life. It takes no lock, so it never waits, not even while a contribution is applied."""
        state = self.state
        machine = state.machine(ticket)
        state.roster.note_steps(machine, steps, state.now_s)
        too_stale = self.rounds.is_too_stale(machine)
        return BeatAnswer(ended=state.ended, paused=state.paused, too_stale=too_stale, round=machine.round)


def terms_of(config: RunConfig) -> WireTerms:
    """How the machines of a run with this config encode their contributions."""
    links = config.links
    return WireTerms(
        wire=links.wire, rounding=links.rounding, error_feedback=links.error_feedback, feedback_decay=links.feedback_decay,
        seed=config.run.seed,
    )  # fmt: skip


def clean_name(name: str) -> str:
    """A machine's name with only characters that are safe to show and to store."""
    return "".join(c for c in name if c.isascii() and (c.isalnum() or c in "-_.~"))[:80] or "machine"
