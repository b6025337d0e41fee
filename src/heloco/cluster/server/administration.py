"""Looking at a run, reading its files, and stopping it."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path

from heloco.cluster.protocol.messages import MachineStatus, Status
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.server import checkpoints
from heloco.cluster.server.journaled_run import JournaledRun
from heloco.cluster.server.roster import Machine
from heloco.cluster.server.round_dispatcher import RoundDispatcher
from heloco.cluster.server.state import ServiceState
from heloco.records import journal_reader as journal
from heloco.records.events import EndKind
from heloco.records.run_files import CONFIG, EVALS, META, TAPE

READABLE = (CONFIG, META, TAPE, EVALS, journal.FOLDER)
READ_LIMIT_BYTES = 1 << 20
STATUS_PATIENCE_S = 0.05
"""How long a status waits for the lock if the last one is recent."""
RECENT_S = 10.0


class Administration:
    """What people ask of the service: its status, its files, and its end."""

    def __init__(self, state: ServiceState, rounds: RoundDispatcher) -> None:
        self.state, self.rounds = state, rounds
        self._last_status: Status | None = None
        self._one_stop = threading.Lock()

    @property
    def recent_status(self) -> Status | None:
        """The last status that was asked for, if it is of a moment ago."""
        last = self._last_status
        return last if last is not None and self.state.now_s - last.time_s < RECENT_S else None

    def status(self) -> Status:
        """The state of the run. While a large contribution is applied, the state of a moment ago, if it is known."""
        state, recent = self.state, self.recent_status
        if not state.lock.acquire(timeout=-1 if recent is None else STATUS_PATIENCE_S):
            assert recent is not None
            return recent
        try:
            self._last_status = self._status()
            return self._last_status
        finally:
            state.lock.release()

    def _status(self) -> Status:
        state, run, now_s = self.state, self.state.run, self.state.now_s
        return Status(
            run=state.run_id, folder=str(state.folder), ended=state.ended, paused=state.paused, time_s=now_s,
            arrivals=run.synchronizer.arrivals if run else 0, arrival_goal=state.config.run.arrivals,
            outer_step=run.synchronizer.outer_step if run else 0, seats=state.roster.seats,
            participants=tuple(sorted(run.participants())) if run else (),
            participation_window=len(run.contributors) if run else 0, min_workers=state.config.cluster.min_workers,
            beat_s=state.config.cluster.beat_s, per_minute=run.rates(now_s)["per_minute"] if run else None,
            evaluations_due=run.evaluations.waiting if run and run.evaluations else 0,
            machines=tuple(self._machine_status(machine, now_s) for machine in state.roster),
        )  # fmt: skip

    def _machine_status(self, machine: Machine, now_s: float) -> MachineStatus:
        run, entry = self.state.run, self.state.book.get(machine.id)
        return MachineStatus(
            machine=machine.id, name=machine.name, seat=machine.seat, round=machine.round, steps=machine.steps,
            pace_s=entry.pace_s if entry else None, arrivals=entry.arrivals if entry else 0, silent_s=now_s - machine.seen_s,
            is_away=machine.is_away, wasted_rounds=entry.wasted_rounds if entry else 0, token=entry.token if entry else "",
            **(run.rates(now_s, machine.id) if run else {}),
        )  # fmt: skip

    def read(self, name: str, offset: int) -> bytes:
        """The next part of one of the readable files, from byte `offset` on. The journal counts as one long file."""
        if name not in READABLE or not 0 <= offset < 1 << 62:
            raise Refused(RefusalCode.PATH, f"{name!r} at {offset} is none of {', '.join(READABLE)}.")
        path = self.state.folder / name
        if name == journal.FOLDER:
            path, offset = _segment_at(path, offset)
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            file.seek(min(offset, os.fstat(file.fileno()).st_size))  # file systems refuse offsets beyond their largest file
            return file.read(READ_LIMIT_BYTES)

    def stop(self, text: str) -> None:
        """Saves the run and ends it for all machines. Rounds under way are taken back. `heloco serve` can continue it later."""
        text = text or "stopped"
        self._end("stopped", text, lambda: self._take_rounds_back(text))

    def suspend(self, text: str) -> None:
        """Saves the run and ends it in this process alone: machines keep their rounds, and wait until it is served again."""
        self._end("suspended", text or "its process is restarted", lambda: None)

    def _end(self, kind: EndKind, text: str, prepare: Callable[[], None]) -> None:
        with self._one_stop:
            try:
                if (run := self._begin_end(kind, prepare)) is not None:
                    self._save(run)
                with self.state.changed:
                    if self.state.ended is None:
                        self.state.end(kind, text)
            finally:
                self.state.is_stopping = False

    def _begin_end(self, kind: EndKind, prepare: Callable[[], None]) -> JournaledRun | None:
        """Hands out no more rounds. Returns the run that is to be saved, if any. Refuses to stop a run that is suspended: its
        machines wait for another process, which alone can take their rounds back."""
        state = self.state
        with state.changed:
            if kind == "stopped" and state.ended is not None and state.ended.kind == "suspended":
                state.check_open()
            if state.ended is not None or state.run is None:
                return None
            state.is_stopping = True
            prepare()
            return state.run

    def _take_rounds_back(self, text: str) -> None:
        for machine in self.state.roster:
            if machine.round:
                self.rounds.give_up(machine, "stopped", text)

    def _save(self, run: JournaledRun) -> None:
        """Writes a checkpoint, and waits for it without the lock. Without room on the disk the run has none of this moment: the
        journal has everything."""
        checkpoints.wait_for_saving(run)  # one that was begun before the stop
        with self.state.recording(), checkpoints.tolerate_full_disk():
            checkpoints.finish_saving(run)
        gave_way = True
        while gave_way:  # one that was not begun here may give way to an outer step
            under_way = None
            with self.state.recording(), checkpoints.tolerate_full_disk():
                under_way = run.checkpoint_under_way or checkpoints.begin_saving(run)
            if under_way is None:
                return
            wait([under_way])
            with self.state.recording(), checkpoints.tolerate_full_disk():
                checkpoints.finish_saving(run)
                under_way.result()
            gave_way = under_way.exception() is None and under_way.result() is None


def _segment_at(folder: Path, offset: int) -> tuple[Path, int]:
    """The segment that holds a byte of the journal, and the byte's offset in that segment."""
    base, path = max((each for each in journal.segments(folder) if each[0] <= offset), default=(0, folder / "none"))
    return path, offset - base
