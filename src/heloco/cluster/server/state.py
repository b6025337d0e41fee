"""What the parts of the service share: the run, the roster, the lock that orders all calls, and the run's end."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from heloco.cluster.protocol.messages import Ended, Paused, Ticket
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.server import checkpoints
from heloco.cluster.server.journaled_run import JournaledRun
from heloco.cluster.server.machine_book import MachineBook
from heloco.cluster.server.roster import Machine, Roster
from heloco.cluster.server.transfers import SnapshotStore, Uploads, refuse_for_disk
from heloco.disk import FULL, SCARCE
from heloco.errors import RunStopped, UserError
from heloco.records.events import RESUMABLE, EndKind
from heloco.records.journal import JournalTaken
from heloco.records.journal_reader import FOLDER as JOURNAL
from heloco.records.run_end import RunEnd, write_end
from heloco.records.run_files import CONFIG, RUN_ID
from heloco.run.config import RunConfig


class ServiceState:
    """One lock orders all calls, and `changed` is a condition over it. Beats never wait for it."""

    def __init__(self, config: RunConfig, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.config, self.folder = config, folder
        self.run_id = run_id(folder)
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.run: JournaledRun | None = None
        """The run; None in an external run until a machine has brought the model."""
        self.starts: SnapshotStore | None = None
        self.roster = Roster(len(config.rounds.paces), config.cluster.beat_s, config.cluster.patience)
        self.book = MachineBook()
        self.uploads = Uploads(folder)
        self.paused: Paused | None = None
        self.ended: Ended | None = None
        self.is_stopping = False
        """Whether a stop waits for its checkpoint. No round begins meanwhile."""
        self._clock = clock
        self._zero_s = clock()

    @property
    def now_s(self) -> float:
        """The run's own time, which stands still while the synchronizer is down."""
        return self._clock() - self._zero_s

    def set_time(self, now_s: float) -> None:
        """Sets the run's own time, from which it goes on after a restart."""
        self._zero_s = self._clock() - now_s

    # ---- the end

    @property
    def has_failed(self) -> bool:
        """Whether the run ended with an error. The state in memory may then be half changed."""
        return self.ended is not None and self.ended.kind == "failed"

    @property
    def is_over(self) -> bool:
        """Whether the run has ended for its machines. One that failed or is suspended goes on when it is served again."""
        return self.ended is not None and self.ended.kind not in RESUMABLE

    def end(self, kind: EndKind, text: str) -> None:
        """Ends the run in this process, and wakes all that wait for a change. The text says why."""
        with self.changed:
            self.ended = Ended(kind=kind, text=text)
            if (self.folder / CONFIG).exists():
                write_end(self.folder, RunEnd(kind=kind, text=text))
            self.changed.notify_all()

    def check_open(self) -> None:
        """Raises `Refused` if the run has ended, failed, or is suspended."""
        if self.ended is None:
            return
        if self.ended.kind == "failed":
            raise Refused(RefusalCode.AWAY, f"The synchronizer has stopped: {self.ended.text}")
        if self.ended.kind == "suspended":
            raise Refused(RefusalCode.SUSPENDED, f"The run is suspended, and goes on when it is served again: {self.ended.text}.")
        raise Refused(RefusalCode.ENDED, f"The run has ended: {self.ended.text}", end=self.ended.kind)

    @contextmanager
    def recording(self, *, may_be_finished: bool = False) -> Iterator[JournaledRun]:
        """Locks the run, for a change that goes into its journal. `may_be_finished`: also when all arrivals are in.

        1. If the disk is full or there are no file descriptors, nothing has changed: the request is refused and
           may be repeated.
        2. Any other error may have left the state in memory half changed. The state on disk is complete: the
           process stops, and a restart continues from there."""
        with self.changed:
            if not (may_be_finished and self.ended is not None and self.ended.kind == "finished"):
                self.check_open()
            assert self.run is not None
            try:
                yield self.run
            except Refused:
                raise
            except OSError as error:
                if error.errno in FULL + SCARCE:
                    raise refuse_for_disk(error, self.folder / JOURNAL) from error
                self.end("failed", f"{self.folder} cannot be written ({error.strerror}).")
                raise Refused(RefusalCode.AWAY, "The synchronizer has stopped: its disk failed.") from error
            except (UserError, RunStopped) as error:
                try:
                    if isinstance(error, JournalTaken):  # memory alone still holds all that was acknowledged, and it is intact
                        checkpoints.save(self.run)
                finally:
                    self.end("failed", str(error))
                raise Refused(RefusalCode.AWAY, f"The synchronizer has stopped: {error}") from error
            except BaseException as error:
                self.end("failed", f"The synchronizer failed with an internal error ({type(error).__name__}: {error}).")
                raise
            finally:
                self.changed.notify_all()

    # ---- who asks

    def machine(self, ticket: Ticket) -> Machine:
        """The machine of a ticket. Raises `Refused` if it is not present or the secret is wrong. Takes no lock."""
        self.check_not_barred(ticket.machine)
        machine = self.roster.present.get(ticket.machine)
        if machine is None:
            raise Refused(RefusalCode.UNKNOWN_MACHINE, f"{ticket.machine!r} is not here, or was away for too long: join again.")
        if not self.book.proves(ticket.machine, ticket.secret):
            raise Refused(RefusalCode.SECRET, f"The secret is not the one that {ticket.machine} was given: join again.")
        self.roster.note_seen(machine, self.now_s)
        return machine

    def check_not_barred(self, machine: str) -> None:
        """Raises `Refused` if the machine was evicted or turned away."""
        entry = self.book.get(machine)
        if entry is not None and entry.is_barred:
            raise Refused(RefusalCode.BARRED, f"{machine} may not take part any more: {entry.barred_because}.")

    def note_transfer(self, machine: str) -> None:
        """Notes that bytes moved to or from a machine. Takes no lock."""
        if present := self.roster.present.get(machine):
            self.roster.note_transfer(present, self.now_s)


def run_id(folder: Path) -> str:
    """The run's id: random, made once, and stored in its folder."""
    path = folder / RUN_ID
    if not path.exists() or not path.read_text().strip():
        path.write_text(secrets.token_hex(8))
    return path.read_text().strip()
