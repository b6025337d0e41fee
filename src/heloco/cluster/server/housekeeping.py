"""Periodic work: losing machines, expiring rounds, pausing, giving up, and saving."""

import contextlib
import logging
import math
import threading
from collections.abc import Callable

from heloco.cluster.protocol.refusals import Refused
from heloco.cluster.server import checkpoints
from heloco.cluster.server.membership import Membership
from heloco.cluster.server.pauses import Pauses
from heloco.cluster.server.round_dispatcher import RoundDispatcher
from heloco.cluster.server.state import ServiceState
from heloco.disk import FULL, SCARCE
from heloco.errors import RunStopped, UserError

TICK_S = 0.2
CHECKPOINT_REST_S = 10.0
"""After a checkpoint that could not be made, the next one is tried after this time: a copy of the model that is bound to fail
takes the room that contributions need."""
STANDSTILL_S = 2.0
"""If more time than this passes between two ticks, the process itself stood still and could not hear any machine."""
log = logging.getLogger("heloco.server")


class Housekeeping:
    """The service's periodic work. `tick` does what is due at this moment."""

    def __init__(self, state: ServiceState, rounds: RoundDispatcher, members: Membership, pauses: Pauses) -> None:
        self.state, self.rounds, self.members, self.pauses = state, rounds, members, pauses
        self._ticked_s = 0.0
        self._told_at = -1
        """The arrival at which it was said last that no checkpoint could be made."""
        self._no_checkpoint_until_s = -math.inf

    def take_up(self) -> None:
        """Sets the time of the last tick to now, so that the time before a restart does not count as a standstill."""
        self._ticked_s = self.state.now_s

    def tick(self) -> None:
        """One round of housekeeping. Called every `TICK_S`."""
        state = self.state
        with state.changed:
            if state.ended is not None:
                return
            now_s, passed_s = state.now_s, state.now_s - self._ticked_s
            self._ticked_s = now_s
            if passed_s > STANDSTILL_S:
                state.roster.forgive(passed_s)
            elif self.pauses.space_problem() is not None:  # machines that wait for room on the disk are not lost
                state.roster.forgive_waiting(now_s, passed_s)
            with contextlib.suppress(Refused):  # the disk is full: the next tick tries again
                self._part_with_the_lost(now_s)
            self.pauses.consider()
            self._give_up_if_paused_for_long(now_s)
        self.save_if_due()

    def _part_with_the_lost(self, now_s: float) -> None:
        for machine in self.state.roster.find_lost(now_s):
            silent_s = now_s - (machine.progressed_s if machine.round else machine.seen_s)
            self.members.part_with(machine, "lost", f"no progress for {silent_s:.1f} s")
        for machine in self.state.roster.find_expired(now_s):
            self.rounds.give_up(machine, "expired", "the round took longer than it may, by what its machine usually needs")

    def _give_up_if_paused_for_long(self, now_s: float) -> None:
        paused, limit_s = self.state.paused, self.state.config.cluster.give_up_after_s
        if paused is not None and paused.kind != "admin" and now_s - self.pauses.since_s > limit_s:
            goes_on = f"What was done is kept: `heloco serve {self.state.folder}` goes on."
            self.state.end("gave-up", f"{paused.text}, for more than {limit_s:g} s. {goes_on}")

    def save_if_due(self, *, wait: bool = False) -> None:
        """Begins a checkpoint if one is due. `wait`: returns when it is written. It waits without the lock."""
        run = self.state.run
        if run is None:
            return
        if wait:
            checkpoints.wait_for_saving(run)
        with self.state.changed:
            self._try(lambda: checkpoints.finish_saving(run))
            if wait or self.state.now_s >= self._no_checkpoint_until_s:
                self._try(lambda: checkpoints.save_if_due(run, gives_way=not wait))
        if wait:
            checkpoints.wait_for_saving(run)
            with self.state.changed:
                self._try(lambda: checkpoints.finish_saving(run))

    def _try(self, save: Callable[[], None]) -> None:
        """Without room or descriptors only a checkpoint is missing: the journal has everything. After an fsync that failed,
        nothing more is written."""
        try:
            if not self.state.has_failed:
                save()
        except RunStopped as error:  # an fsync failed
            self.state.end("failed", str(error))
        except (UserError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in FULL + SCARCE:
                raise
            self._no_checkpoint_until_s = self.state.now_s + CHECKPOINT_REST_S
            if self._told_at != (arrivals := self.state.run.synchronizer.arrivals if self.state.run else 0):
                self._told_at = arrivals
                log.warning("No checkpoint could be made: %s", error)


class Housekeeper(threading.Thread):
    """The thread that calls `Housekeeping.tick`."""

    def __init__(self, housekeeping: Housekeeping) -> None:
        super().__init__(name="heloco-housekeeper", daemon=True)
        self._housekeeping = housekeeping
        self._is_over = threading.Event()

    def run(self) -> None:
        """Ticks every `TICK_S` until `end` is called. An error in a tick ends the run as failed."""
        state = self._housekeeping.state
        while not self._is_over.wait(TICK_S):
            try:
                self._housekeeping.tick()
            except Exception as error:
                log.error("The synchronizer failed with an internal error.", exc_info=error)
                if not state.has_failed:
                    state.end("failed", f"The synchronizer failed with an internal error ({type(error).__name__}: {error}).")

    def end(self) -> None:
        """Returns when the thread has finished its current tick and ended."""
        self._is_over.set()
        self.join()
