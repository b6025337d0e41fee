"""What a real run offers to the machines that take part, whatever connects them: Ray's actor and the HTTPS gateway are thin.

A contribution comes in as bytes at an offset, so that a transfer goes on where it was cut; it counts when `commit` has answered.
"""

import contextlib
import errno
import shutil
from typing import Any

from heloco.engine.cluster.attendance import Attendance
from heloco.engine.cluster.files import Denied, Incoming, Key, checked, full_disk
from heloco.engine.cluster.machines import Machine
from heloco.engine.cluster.memory import lean
from heloco.engine.cluster.recorded import Ack, RecordedRun, as_contribution
from heloco.outer.finite import all_finite
from heloco.run.tensors import Layout, mapped
from heloco.synchronizer import NOT_FINITE, Contribution

__all__ = ["Denied", "Service"]

READABLE = ("config.toml", "run.json", "tape.jsonl", "evals.jsonl", "journal/events.jsonl")
READ_AT_ONCE = 1 << 20
ROOM_FOR_LINES = 1 << 16
"""Bytes that must be free before an arrival is written down: once the journal has it, the tape must have it too."""
NO_RATES = dict.fromkeys(("per_minute", "share", "staleness"))


class Service(Attendance):
    # ---- contributions

    def received(self, machine: str, key: Key) -> dict[str, Any]:
        """How much of a contribution is here, or its acknowledgement."""
        with self.lock:
            if ack := self._ack(key):
                return {"ack": ack}
            self._holding(machine, key)
            return {"size": self._incoming[key].size if key in self._incoming else 0}

    def _ack(self, key: Key) -> Ack | None:
        if self.recorded is None or not 0 <= key[0] < self.machines.seats:
            return None
        ack = self.recorded.ack_of(key[0], key[1])
        return ack if ack and ack["version"] == key[2] else None

    def incoming(self, machine: str, key: Key) -> Incoming:
        with self.lock:
            self._holding(machine, key)
            assert self.recorded is not None
            if key not in self._incoming:
                try:
                    self._incoming[key] = Incoming(self.recorded.journal.tensors(*key), self.recorded.layout)
                except OSError as error:
                    raise full_disk(error, self.recorded.journal.path / "x") from error
            return self._incoming[key]

    def commit(self, machine: str, key: Key, report: dict[str, Any]) -> Ack:
        """The contribution is all here: it is checked, written down, applied, and answered. The same again: the same answer."""
        with self.lock:
            if ack := self._ack(key):
                return ack
            found, incoming = self._holding(machine, key), self._incoming.get(key)
            assert self.recorded is not None
            layout = self.recorded.layout
            found.committing = True  # from here on the machine can only wait for us
        try:
            return self._commit(machine, key, report, incoming, layout)
        finally:
            found.committing = False
            self.moved(machine)

    def _commit(self, machine: str, key: Key, report: dict[str, Any], incoming: Incoming | None, layout: Layout) -> Ack:
        if incoming is None or incoming.size < layout.size:
            size = incoming.size if incoming else 0
            raise Denied("incomplete", f"{size} of {layout.size} bytes are here: send the rest.", size=size)
        told = checked(report)
        if incoming.digest() != told["digest"]:
            incoming.restart()
            raise Denied("corrupted", "what arrived is not what was sent (its digest differs): send it again.", size=0)
        with incoming.sealed():
            return self._taken_in(machine, key, told, incoming)

    def _taken_in(self, machine: str, key: Key, told: dict[str, Any], incoming: Incoming) -> Ack:
        event = {"worker": key[0], "round": key[1], "version": key[2], **told}
        tensors = mapped(incoming.path, incoming.layout)
        assert self.recorded is not None
        with lean(tensors, self.recorded.synchronizer.theta_bytes):
            return self._used(machine, key, as_contribution(event, tensors), told["digest"])

    def _used(self, machine: str, key: Key, contribution: Contribution, digest: str) -> Ack:
        if not all_finite(contribution.pseudo_gradient):
            return self._refuse(machine, key, NOT_FINITE)
        with self._recording() as run:
            if ack := self._ack(key):
                return ack
            found = self._holding(machine, key)
            self._check_room_for_lines()
            ack = run.receive(
                contribution,
                digest=digest,
                machine=machine,
                time_s=self.now_s,
                meanwhile=lambda: self._prepare_start(run),
            )
            self._forget(found, keep_tensors=True)
            if ack["verdict"] == "refused":
                found.refused += 1
            else:
                found.refused = 0
            self.machines.progressed(found, self.now_s)
            self._turn_away_if_hopeless(found)
            if run.finished:
                self.ended = "finished"
            return ack

    def _prepare_start(self, run: RecordedRun) -> None:
        """What the next round starts from, which is asked for in a moment; unless another contribution comes first. Without room
        for it, whoever asks is told so."""
        if sum(machine.committing for machine in self.machines) == 1:
            with contextlib.suppress(Denied):
                self.starts.write(run.synchronizer)

    def _check_room_for_lines(self) -> None:
        if shutil.disk_usage(self.folder).free < ROOM_FOR_LINES:
            raise full_disk(OSError(errno.ENOSPC, ""), self.folder / "tape.jsonl")

    def _refuse(self, machine: str, key: Key, reason: str) -> Ack:
        """Nothing of it is kept; the data of its round goes back to the ledger."""
        with self.changed:
            found = self._holding(machine, key)
            found.refused += 1
            self._abandon(found, reason)
            self._turn_away_if_hopeless(found)
        raise Denied("not-finite", f"The contribution was refused: {reason}. Take a fresh round.")

    def _turn_away_if_hopeless(self, machine: Machine) -> None:
        if machine.refused >= self.config.run.max_refusals:
            self._turned_away.add(machine.id)
            self._part_with(machine, "turned-away", f"{machine.refused} of its contributions in a row were refused")

    # ---- a model from outside

    def incoming_model(self, machine: str, layout: Layout) -> Incoming:
        with self.lock:
            self.machine(machine)
            self._check_open()
            if self.recorded is not None:
                raise Denied("has-model", "the run has its model.")
            if untrainable := layout.untrainable():
                raise Denied("layout", untrainable)
            if self._model is not None and (self._model_from, self._model.layout) != (machine, layout):
                if self._model_from != machine and self._model_from in self.machines.present:
                    raise Denied("busy", "another machine is sending the run its model.")
                self._model.close(remove=True)
                self._model = None
            if self._model is None:
                self._model, self._model_from = Incoming(self.folder / "model.partial", layout), machine
            return self._model

    def commit_model(self, machine: str, names: list[str], digest: str) -> None:
        """The first machine's model is what the run starts from."""
        with self.changed:
            self.machine(machine)
            if self.recorded is not None:
                return
            assert self._found is not None
            model = self._model
            if model is None or model.size < model.layout.size:
                raise Denied("incomplete", "the model is not all here: send the rest.", size=model.size if model else 0)
            if model.digest() != digest:
                model.restart()
                raise Denied("corrupted", "what arrived is not what was sent (its digest differs): send it again.", size=0)
            tensors = mapped(model.path, model.layout)
            if not all_finite(t for name, t in tensors.items() if name.startswith("parameter.")):  # a buffer may be a mask of −∞
                raise Denied("not-finite", "the model holds NaN or Inf.")
            self._take_up(self._found(model.layout, tensors, names))
            model.close(remove=True)
            for present in self.machines:
                with self._recording() as run:
                    run.note("join", self.now_s, machine=present.id, seat=present.seat)
            self._consider_pause()

    # ---- the whole

    def stop(self, reason: str = "stopped") -> None:
        """Ends the run for now: what is there is saved, and `heloco serve` goes on with it."""
        with self.changed:
            if not self.ended:
                if self.recorded is not None:
                    for machine in list(self.machines):
                        if machine.round:
                            self._abandon(machine, reason)
                    self.recorded.save()
                self.ended = reason
            self.changed.notify_all()

    def close(self) -> None:
        with self.lock:
            for incoming in self._incoming.values():
                incoming.close(remove=False)  # the journal may have it already
            self._incoming.clear()
            if self.recorded is not None:
                self.recorded.journal.remove_unfinished()
                self.recorded.close()

    def read(self, name: str, offset: int) -> bytes:
        """More of one of the run's files that anybody who takes part may see, from a byte on."""
        if name not in READABLE or not 0 <= offset < 1 << 62:
            raise Denied("path", f"{name!r} at {offset} is nothing of {', '.join(READABLE)}.")
        path = self.folder / name
        if not path.exists():
            return b""
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(READ_AT_ONCE)

    def status(self) -> dict[str, Any]:
        with self.lock:
            run, now_s = self.recorded, self.now_s
            return {
                "run": self.run_id, "folder": str(self.folder), "ended": self.ended, "paused": self.paused, "time_s": now_s,
                "arrivals": run.synchronizer.arrivals if run else 0, "planned": self.config.run.arrivals,
                "outer_step": run.synchronizer.outer_step if run else 0, "seats": self.machines.seats,
                "participants": sorted(self.participants()),
                "participation_over": len(run.contributors) if run else 0,
                "min_workers": self.config.cluster.min_workers,
                "per_minute": run.lately(now_s)["per_minute"] if run else None,
                "machines": [
                    {
                        "machine": m.id, "name": m.name, "seat": m.seat, "round": m.round, "steps": m.steps, "pace_s": m.pace_s,
                        "arrivals": run.contributions[m.name] if run else 0, "silent_s": now_s - m.seen_s, "away": m.away,
                        **(run.lately(now_s, m.id) if run else NO_RATES),
                    }
                    for m in self.machines
                ],
            }  # fmt: skip
