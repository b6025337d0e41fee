"""Who takes part in a run and what they are doing: machines, their rounds, pauses. `Service` adds what they hand in.

Many threads may call; one lock orders them, but signs of life never wait for it. Whatever is wrong with a request is a `Denied`
with a name and a sentence, and has changed nothing.
"""

import math
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

import heloco
from heloco.engine.cluster.files import Denied, Incoming, Key, StartFiles, full_disk
from heloco.engine.cluster.machines import Machine, Machines
from heloco.engine.cluster.recorded import RecordedRun
from heloco.errors import RunStopped, UserError
from heloco.policy import inner_steps
from heloco.run.config import RunConfig, to_toml
from heloco.run.disk import FULL
from heloco.run.journal import FOLDER
from heloco.run.tensors import Layout

AWAY_S = 2.0


class Attendance:
    """`found` makes the run from the first machine's model, where the run has no model of its own."""

    def __init__(
        self,
        run: RecordedRun | None,
        config: RunConfig,
        folder: Path,
        *,
        task_digest: str = "",
        model_digest: str = "",
        found: Callable[[Layout, dict[str, Tensor], list[str]], RecordedRun] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.folder, self.task_digest, self.model_digest = config, folder, task_digest, model_digest
        self.run_id = run_id(folder)
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        cluster = config.cluster
        self.machines = Machines(len(config.workers.paces), cluster.beat_s, cluster.patience)
        self.paused = ""
        """Why nobody gets a round at the moment, or only those that have not contributed lately."""
        self._paused_for_all = False
        self.ended = ""
        """Why the run is over: finished, stopped, or a sentence."""
        self.failed = False
        self._found, self._clock = found, clock
        self._incoming: dict[Key, Incoming] = {}
        self._turned_away: set[str] = set()
        self._model: Incoming | None = None
        self._model_from = ""
        self._paused_s = self._ticked_s = 0.0
        self._zero_s = clock()
        self.recorded: RecordedRun | None = None
        if run is not None:
            self._take_up(run)

    def _take_up(self, run: RecordedRun) -> None:
        self.recorded = run
        self._zero_s = self._clock() - run.time_s
        self._ticked_s = self._paused_s = self.now_s
        self.paused = run.paused
        self.starts = StartFiles(self.folder, run.synchronizer)
        for worker, held in run.synchronizer.held.items():  # of before a restart: their machines may come back with them
            owner = run.machine_of[worker]
            machine = self.machines.join("", self.now_s, returning=owner, seat=run.seats.get(owner))
            self.machines.took(machine, (worker, held.index, held.version), self.now_s)
            machine.away = True
        self.starts.tidy(self.recorded.synchronizer)
        if run.finished:
            self.ended = "finished"

    @property
    def now_s(self) -> float:
        """The run's own time: it stands still while the synchronizer is down."""
        return self._clock() - self._zero_s

    @contextmanager
    def _recording(self) -> Iterator[RecordedRun]:
        """The run, locked. What goes wrong with its files ends the service: what is on disk is whole, and is taken up again."""
        with self.changed:
            self._check_open()
            assert self.recorded is not None
            try:
                yield self.recorded
            except Denied:
                raise
            except OSError as error:
                if error.errno in FULL:
                    raise full_disk(error, self.folder / FOLDER) from error
                self._fail(f"{self.folder} cannot be written ({error.strerror}).")
                raise
            except (UserError, RunStopped) as error:
                self._fail(str(error))
                raise Denied("ended", self.ended) from error
            except BaseException as error:
                self._fail(f"the synchronizer met an error of its own ({type(error).__name__}: {error}).")
                raise
            finally:
                self.changed.notify_all()

    def _fail(self, why: str) -> None:
        self.failed, self.ended = True, why
        self.changed.notify_all()

    def _check_open(self) -> None:
        if self.ended:
            raise Denied("ended", f"The run has ended: {self.ended}")

    def machine(self, machine: str) -> Machine:
        found = self.machines.present.get(machine)
        if machine in self._turned_away:
            raise Denied("turned-away", f"{machine} was turned away: too many of its contributions were refused. Mend it first.")
        if found is None:
            raise Denied("unknown-machine", f"{machine!r} is not here, or was away for too long: join again.")
        self.machines.saw(found, self.now_s)
        return found

    # ---- coming and going

    def describe(self) -> dict[str, Any]:
        """What a machine needs to know before it joins."""
        return {
            "run": self.run_id, "heloco": heloco.__version__, "config": to_toml(self.config), "task_digest": self.task_digest,
            "model_digest": self.model_digest, "external": self._found is not None, "ended": self.ended,
        }  # fmt: skip

    def join(
        self,
        name: str,
        *,
        returning: str | None = None,
        pace_s: float | None = None,
        version: str = heloco.__version__,
        layout: Layout | None = None,
    ) -> dict[str, Any]:
        """`layout`: of the machine's own model, where it brings one."""
        with self.changed:
            self._check_open()
            if version.split(".")[:2] != heloco.__version__.split(".")[:2]:
                raise Denied(
                    "version", f"this run is of heloco {heloco.__version__}, the machine has {version}: install the same."
                )
            if self.recorded is None and layout is None:
                raise Denied("no-model", "this run trains whatever model its machines bring: join it from a training script.")
            if self.recorded is not None and layout is not None and (wrong := self.starts.layout.difference(layout)):
                raise Denied("layout", f"this run trains another model: here, {wrong}.")
            if returning in self._turned_away:
                self.machine(str(returning))
            known = returning in self.machines.present
            had = self.recorded.seats.get(returning) if self.recorded and returning else None
            machine = self.machines.join(_clean(name), self.now_s, returning=_clean(returning), pace_s=pace_s, seat=had)
            if self.recorded is not None and not known:
                with self._recording() as run:
                    run.note("join", self.now_s, machine=machine.id, seat=machine.seat)
            self._consider_pause()
            return {
                "machine": machine.id, "seat": machine.seat, "run": self.run_id, "seats": self.machines.seats,
                "beat_s": self.config.cluster.beat_s, "needs_model": self.recorded is None,
                "layout": self.starts.layout.as_json() if self.recorded else None,
                "contribution": self.recorded.layout.as_json() if self.recorded else None,
            }  # fmt: skip

    def leave(self, machine: str, reason: str = "it left") -> None:
        with self.changed:
            if machine in self.machines.present:
                self._part_with(self.machines.present[machine], "leave", reason)

    def _part_with(self, machine: Machine, kind: str, reason: str) -> None:
        if machine.round and self.recorded is not None and not self.ended:
            self._abandon(machine, reason)
        self.machines.leave(machine)
        if self.recorded is not None and not self.ended:
            with self._recording() as run:
                run.note(kind, self.now_s, machine=machine.id, reason=reason)
        self._consider_pause()
        self.changed.notify_all()

    def beat(self, machine: str, steps: int = 0, pace_s: float | None = None) -> dict[str, Any]:
        """A sign of life, and how far the round is. The answer says whether going on makes sense.

        It takes no lock, so that it never waits behind a contribution, an evaluation or a checkpoint."""
        found = self.machine(machine)
        if steps != found.steps:
            found.steps = steps
            self.machines.progressed(found, self.now_s, a_step=True)
        if pace_s is not None and 0 < pace_s < math.inf:
            found.pace_s = pace_s
        return {"ended": self.ended, "paused": self.paused, "stale": self._too_stale(found), "round": found.round}

    def _too_stale(self, machine: Machine) -> bool:
        run, held = self.recorded, machine.round
        if run is None or held is None:
            return False
        return run.synchronizer.drop(run.synchronizer.outer_step - held[2]) == "skip"

    # ---- rounds

    def next_round(self, machine: str) -> dict[str, Any]:
        """A round for the machine: the one it holds, or a new one; or {"wait": why}."""
        with self.changed:
            found = self.machine(machine)
            self._check_open()
            if self.recorded is None:
                return {"wait": "the run has no model yet"}
            if found.round is None:
                if reason := self._reason_to_wait(found):
                    return {"wait": reason}
                self._hand_out(found)
            assert found.round is not None
            held = self.recorded.synchronizer.held[found.round[0]]
            return {
                "worker": held.worker, "round": held.index, "version": held.version, "shard": held.shard, "spans": held.spans,
                "inner_steps": held.inner_steps, "shard_steps": held.shard_steps, "run_steps": held.run_steps,
                "bytes": self.starts.layout.size, "run": self.run_id,
            }  # fmt: skip

    def _reason_to_wait(self, machine: Machine) -> str:
        if self.paused and (self._paused_for_all or machine.name in self.participants()):
            return self.paused
        return "" if self._free_seats(machine) else "all workers' rounds are under way"

    def _free_seats(self, machine: Machine) -> list[int]:
        """The machine's own seat and those that nobody sits on or whose machine does another's round, as far as their rounds
        are not under way or waiting at a barrier."""
        assert self.recorded is not None
        synchronizer = self.recorded.synchronizer
        waiting = {*synchronizer.held, *synchronizer.waiting}
        elsewhere = {m.seat for m in self.machines if m.round is not None and m.round[0] != m.seat}
        own = {machine.seat} if machine.seat is not None else set()
        return sorted(seat for seat in own | elsewhere | self.machines.empty_seats() if seat is not None and seat not in waiting)

    def _hand_out(self, machine: Machine) -> None:
        """Of the free seats the one with the fewest arrivals, the machine's own where that is among them."""
        with self._recording() as run:
            synchronizer = run.synchronizer
            seat = min(self._free_seats(machine), key=lambda s: (synchronizer.arrivals_of[s], s != machine.seat, s))
            self.starts.write(synchronizer)
            run.dispatch(seat, machine.id, self._steps(machine), self.now_s)
            held = synchronizer.held[seat]
            self.machines.took(machine, (seat, held.index, held.version), self.now_s)

    def _steps(self, machine: Machine) -> int:
        workers = self.config.workers
        paces = self.machines.paces()
        if workers.steps == "constant" or not machine.pace_s or not paces:
            return workers.inner_steps
        return inner_steps(workers.steps, workers.inner_steps, [min(paces), machine.pace_s])[1]

    def start(self, machine: str, key: Key) -> Path:
        """The file that the machine's round starts from; of a worker behind the last one, the run's model once it has ended."""
        with self.lock:
            if key[0] == self.machines.seats:
                return self._final()
            found = self._holding(machine, key)
            path = self.starts.path(key[2])
            if not path.exists():  # lost with a machine that crashed: the round cannot be begun any more
                self._abandon(found, "what it starts from is gone")
                raise Denied("not-held", "what this round starts from is gone: take a fresh one.")
            return path

    def _final(self) -> Path:
        if self.recorded is None or not self.ended:
            raise Denied("not-held", "the run has not ended: its model is still being trained.")
        return self.starts.write_final(self.recorded.synchronizer)

    def moved(self, machine: str) -> None:
        """Bytes went out to a machine, or came in. Takes no lock either."""
        if found := self.machines.present.get(machine):
            self.machines.progressed(found, self.now_s)

    def _holding(self, machine: str, key: Key) -> Machine:
        found = self.machine(machine)
        self._check_open()
        if self.recorded is None:
            raise Denied("not-held", "the run has no model yet.")
        if found.round != key:
            if key[2] > self.recorded.synchronizer.outer_step:
                raise Denied(
                    "future", f"version {key[2]} is from the future: the run is at {self.recorded.synchronizer.outer_step}."
                )
            has = "none" if found.round is None else "round {1} of worker {0}, version {2}".format(*found.round)
            raise Denied(
                "not-held",
                f"{found.name} does not hold round {key[1]} of worker {key[0]}, version {key[2]} (it holds {has}): that one was "
                "given up or given to another. Take a fresh round.",
            )
        return found

    def abandon(self, machine: str, reason: str) -> None:
        """The machine gives its round back undone."""
        with self.changed:
            found = self.machine(machine)
            if found.round and not self.ended:
                self._abandon(found, reason)

    def _abandon(self, machine: Machine, reason: str) -> None:
        assert machine.round is not None
        with self._recording() as run:
            run.abandon(machine.round[0], reason, self.now_s)
            self._forget(machine)

    def _forget(self, machine: Machine, *, keep_tensors: bool = False) -> None:
        assert machine.round is not None and self.recorded is not None
        if incoming := self._incoming.pop(machine.round, None):
            incoming.close(remove=not keep_tensors)
        machine.round = None
        machine.steps = 0
        self.starts.tidy(self.recorded.synchronizer)

    # ---- time passes

    def tick(self) -> None:
        """To be called now and then: parts with the lost, pauses, gives up, saves."""
        with self.changed:
            if self.ended:
                return
            away_s = self.now_s - self._ticked_s
            if away_s > AWAY_S:  # this process stood still, or was busy: nobody is to blame for its silence
                self.machines.forgive(away_s)
            self._ticked_s = self.now_s
            if self._short_of_space():  # whoever waits for it is not to blame either
                self.machines.forgive_waiting(self.now_s)
            for machine in self.machines.lost(self.now_s):
                silent = self.now_s - (machine.progressed_s if machine.round else machine.seen_s)
                self._part_with(machine, "lost", f"no progress for {silent:.1f} s")
            self._consider_pause()
            limit = self.config.cluster.give_up_after_s
            if self.paused and self.now_s - self._paused_s > limit:
                self._fail(
                    f"{self.paused}, for more than {limit:g} s. What was done is kept: `heloco serve {self.folder}` goes on."
                )
        self.save_if_due()

    def save_if_due(self) -> None:
        with self.changed:
            if self.recorded is None or self.failed:
                return
            try:
                self.recorded.save_if_due()
            except UserError as error:  # a full disk, say: the journal has everything, so only the checkpoint is missing
                if not self.paused:
                    self.paused = str(error)

    def _consider_pause(self) -> None:
        """Whether there is room, enough machines are here, and enough of them contribute."""
        if self.recorded is None or self.ended:
            return
        least, here, window = self.config.cluster.min_workers, len(self.machines.present), self.recorded.contributors
        why = self._short_of_space() or (f"{here} of at least {least} machines are here" if here < least else "")
        self._paused_for_all = bool(why)  # otherwise those that do not contribute may, and only they
        if not why and len(window) == window.maxlen and (taking_part := len(self.participants())) < least:
            why = f"only {taking_part} machines contributed to the last {len(window)} arrivals, and at least {least} must"
        if bool(why) != bool(self.paused):
            self._paused_s = self.now_s
            with self._recording() as run:
                run.note("pause" if why else "go-on", self.now_s, reason=why)
        self.paused = why

    def _short_of_space(self) -> str:
        """Rounds are only handed out while there is room for what will come of them."""
        if self.recorded is None:
            return ""
        free, needed = shutil.disk_usage(self.folder).free, self.starts.layout.size + self.recorded.layout.size
        if free >= needed:
            return ""
        return f"{self.folder} has {free / 1e6:.1f} MB left, and a round needs {needed / 1e6:.1f}: free some space"

    def participants(self) -> set[str]:
        return set() if self.recorded is None else self.recorded.participants()


def run_id(folder: Path) -> str:
    """Names a run: random, made once, kept in its folder."""
    path = folder / "run-id"
    if not path.exists():
        path.write_text(secrets.token_hex(8))
    return path.read_text().strip()


def _clean(name: str | None) -> Any:
    """What a machine calls itself: it is shown, and stands in files."""
    if name is None:
        return None
    return "".join(c for c in name if c.isalnum() or c in "-_.#~")[:80] or "machine"
