"""Taking in contributions. Bytes arrive at an offset, so that an interrupted transfer can continue;
a commit applies them once."""

import contextlib
import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from heloco.cluster.protocol.messages import Acknowledgement, ContributionReport, RoundKey, Ticket, UploadState
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.server.journaled_run import JournaledRun
from heloco.cluster.server.membership import Membership
from heloco.cluster.server.pauses import ROOM_FOR_LINES
from heloco.cluster.server.roster import Machine
from heloco.cluster.server.round_dispatcher import RoundDispatcher
from heloco.cluster.server.state import ServiceState
from heloco.cluster.server.transfers import Upload, refuse_for_disk
from heloco.disk import release_for
from heloco.finite import all_finite
from heloco.outer.kernels.windows import Release, parts
from heloco.records.run_end import FINISHED_TEXT
from heloco.records.run_files import TAPE
from heloco.synchronizer import NOT_FINITE
from heloco.wire import blocks
from heloco.wire.encoder import check_scales


class Contributions:
    """Takes in the bytes of contributions, checks them, and has each applied exactly once."""

    def __init__(self, state: ServiceState, rounds: RoundDispatcher, members: Membership) -> None:
        self.state, self.rounds, self.members = state, rounds, members

    def progress(self, ticket: Ticket, key: RoundKey) -> UploadState:
        """How much of a contribution has arrived, or its acknowledgement."""
        with self.state.lock:
            if ack := self._ack(ticket, key):
                return UploadState(ack=ack)
            self.rounds.holder_of(ticket, key)
            upload = self.state.uploads.get(key)
            return UploadState(size=upload.size if upload else 0)

    def _ack(self, ticket: Ticket, key: RoundKey) -> Acknowledgement | None:
        """The acknowledgement of an earlier commit. It exists only once the contribution is durable."""
        self.state.machine(ticket)
        if self.state.run is None or self.state.has_failed:
            return None
        return self.state.run.ack_of(key)

    def upload(self, ticket: Ticket, key: RoundKey) -> Upload:
        """The file that receives the contribution of a round. Raises `Refused` if the machine does not hold the round."""
        with self.state.lock:
            self.rounds.holder_of(ticket, key)
            assert self.state.run is not None
            return self.state.uploads.open(key, self.state.run.contribution_layout)

    def commit(self, ticket: Ticket, key: RoundKey, digest: str, report: ContributionReport) -> Acknowledgement:
        """Checks a complete contribution, writes it to the journal and applies it. A repeated commit gets the same answer."""
        state = self.state
        with contextlib.ExitStack() as until_the_answer:
            with state.lock:
                if ack := self._ack(ticket, key):
                    return ack
                machine, upload = self.rounds.holder_of(ticket, key), state.uploads.get(key)
                until_the_answer.enter_context(state.roster.committing(machine))
                # Runs before the count falls, so the machine never looks silent in between.
                until_the_answer.callback(state.note_transfer, machine.id)
            if upload is None or not upload.is_complete:
                size = upload.size if upload else 0
                raise Refused(RefusalCode.INCOMPLETE, f"{size} bytes have arrived: send the rest.", size=size)
            return self._take_in(ticket, key, digest, report, upload)

    def _take_in(self, ticket: Ticket, key: RoundKey, digest: str, report: ContributionReport, upload: Upload) -> Acknowledgement:
        with upload.sealed():
            if upload.digest() == digest:
                tensors = upload.tensors()
                problem = _find_problem(tensors, release_for(upload.size))
                del tensors
                if problem is not None:
                    self._refuse(ticket, key, problem)
                return self._apply(ticket, key, report, upload)
        upload.restart()
        raise Refused(RefusalCode.CORRUPTED, "What arrived is not what was sent (its digest differs): send it again.", size=0)

    def _apply(self, ticket: Ticket, key: RoundKey, report: ContributionReport, upload: Upload) -> Acknowledgement:
        with self._recording_unread() as run:
            if ack := self._ack(ticket, key):
                return ack
            machine, state = self.rounds.holder_of(ticket, key), self.state
            self._check_room_for_lines(run)
            prepare = lambda: self._prepare_start(run)  # noqa: E731
            ack = run.receive(key, report, upload, machine=machine.id, time_s=state.now_s, concurrent_work=prepare)
            self.rounds.put_down(machine, remove_upload=False)
            self.rounds.note_arrival()
            machine.refusals_in_a_row = machine.refusals_in_a_row + 1 if ack.verdict == "refused" else 0
            state.roster.note_transfer(machine, state.now_s)
            self._turn_away_if_hopeless(machine)
            if run.is_finished:
                state.end("finished", FINISHED_TEXT)
            return ack

    @contextmanager
    def _recording_unread(self) -> Iterator[JournaledRun]:
        """Like `ServiceState.recording`, at a moment when nobody copies the outer state. It waits for that moment without the
        lock, so that meanwhile rounds are handed out and bytes arrive."""
        state = self.state
        assert state.run is not None
        while True:
            state.run.readers.wait()
            with state.lock:
                if not state.run.readers.are_reading:
                    with state.recording() as run:
                        yield run
                    return

    def _prepare_start(self, run: JournaledRun) -> None:
        """Writes the start of the next round, which will be fetched in a moment, unless another commit is under way. If
        the disk is full, the machine that fetches it gets the refusal."""
        assert self.state.starts is not None
        if self.state.roster.commits_under_way == 1:
            with contextlib.suppress(Refused):
                run.write_start(self.state.starts)

    def _check_room_for_lines(self, run: JournaledRun) -> None:
        if not run.lines.catch_up() or shutil.disk_usage(self.state.folder).free < ROOM_FOR_LINES:
            raise refuse_for_disk(OSError(errno.ENOSPC, ""), self.state.folder / TAPE)

    def _refuse(self, ticket: Ticket, key: RoundKey, problem: str) -> None:
        """Refuses a contribution whose numbers make no sense. Nothing of it is kept, and its data goes back to the ledger."""
        with self.state.changed:
            machine = self.rounds.holder_of(ticket, key)
            machine.refusals_in_a_row += 1
            self.rounds.give_up(machine, "not-finite", problem)
            self._turn_away_if_hopeless(machine)
        raise Refused(RefusalCode.NOT_FINITE, f"The contribution was refused: {problem}. Take a fresh round.")

    def _turn_away_if_hopeless(self, machine: Machine) -> None:
        refusals = machine.refusals_in_a_row
        if refusals >= self.state.config.run.max_refusals:
            self.members.part_with(machine, "turned-away", f"{refusals} of its contributions in a row were refused")


def _find_problem(tensors: dict[str, Tensor], release: Release | None) -> str | None:
    """A sentence about a pseudo-gradient with NaN, Inf or a scale that makes no sense; None if it can be applied. Codes need not
    be decoded for that: with such scales all their numbers are finite."""
    if not all_finite(parts(blocks.blocks_of(blocks.PSEUDO_GRADIENT, tensors), release)):
        return NOT_FINITE
    return check_scales(tensor for name, tensor in tensors.items() if blocks.is_of_kind(blocks.SCALE, name))
