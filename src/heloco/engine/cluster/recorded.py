"""A run of real machines as a sequence of events: each is in the journal before it counts, and what follows from it is computed.

Live, an event is written and then followed; after a restart, and in a replay, the same events are followed again and give the
same parameters to the bit. No network and no clock here: times are handed in, and are part of the events.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from heloco.engine.cluster.machines import name_of
from heloco.engine.local import Observer, due, evaluation_line
from heloco.errors import UserError
from heloco.run import RunConfig, RunFolder
from heloco.run.folder import TAPE
from heloco.run.journal import Event, Journal, tensors_of
from heloco.run.lines import read_lines
from heloco.run.tape import record
from heloco.run.tensors import Layout, mapped
from heloco.synchronizer import Arrival, Contribution, Synchronizer
from heloco.task import Scores

Ack = dict[str, Any]
PARTINGS = ("leave", "lost", "turned-away")
ACKS_KEPT = 16
"""Per worker: a contribution is sent again only by who got no answer to its last one."""


def start_layout(synchronizer: Synchronizer) -> Layout:
    """What a round's start is as a file."""
    named = {f"parameter.{i}": p for i, p in enumerate(synchronizer.parameters)}
    return Layout.of(named | {f"buffer.{i}": b for i, b in enumerate(synchronizer.buffers)})


def contribution_layout(synchronizer: Synchronizer) -> Layout:
    """What a contribution is as a file."""
    named = {f"pseudo_gradient.{i}": p for i, p in enumerate(synchronizer.parameters)}
    return Layout.of(named | {f"buffer.{i}": b for i, b in enumerate(synchronizer.buffers)})


def as_contribution(event: Event, tensors: dict[str, Tensor]) -> Contribution:
    def numbered(kind: str) -> list[Tensor]:
        return [tensors[f"{kind}.{i}"] for i in range(sum(name.startswith(f"{kind}.") for name in tensors))]

    told = (event["loss"], event["last_loss"], event["samples"], event["units"])
    key = (event["worker"], event["round"], event["version"])
    return Contribution(*key, numbered("pseudo_gradient"), numbered("buffer"), *told)


class RecordedRun:
    """`folder` None: nothing is written, for a replay of the run at `path`."""

    def __init__(
        self,
        synchronizer: Synchronizer,
        config: RunConfig,
        *,
        task_digest: str,
        folder: RunFolder | None,
        path: Path | None = None,
        evaluate: Callable[[], Scores] | None = None,
        observers: list[Observer] | None = None,
    ) -> None:
        self.synchronizer = synchronizer
        self.config = config
        self.task_digest = task_digest
        self.folder = folder
        self._path = folder.path if folder else path
        self.evaluate = evaluate
        self.observers = observers or []
        self.layout = contribution_layout(synchronizer)
        self.time_s = 0.0
        """Of the last event."""
        self.units = 0
        self.paused = ""
        """Why the run rested at the last event."""
        self.machine_of: dict[int, str] = {}
        """Worker -> the machine that holds its round."""
        self.seats: dict[str, int] = {}
        """Machine -> the seat it was given: it gets it back after a restart."""
        self.acks: dict[int, deque[Ack]] = {worker: deque(maxlen=ACKS_KEPT) for worker in range(synchronizer.workers)}
        window = config.cluster.participation or 4 * synchronizer.workers
        self.contributors: deque[str] = deque(maxlen=window)
        """The machines behind the last arrivals."""
        self.contributions: Counter[str] = Counter()
        """Machine -> how many of its contributions were taken; one that came back under its name is the same."""
        self.recent: deque[tuple[float, str, int]] = deque(maxlen=window + 1)
        """(time, machine, staleness) of the last arrivals and the one before them, for rates. After a restart it fills anew."""
        self._started_s: dict[int, float] = {}
        self._evaluated_at = self._saved_at = -1
        self._journal: Journal | None = None
        self._beside = ThreadPoolExecutor(2, thread_name_prefix="beside")
        """For what only looks at the numbers, or waits for the disk: the digest, fsync."""

    @property
    def journal(self) -> Journal:
        assert self._journal is not None, "the run was not begun"
        return self._journal

    @property
    def finished(self) -> bool:
        return self.synchronizer.arrivals >= self.config.run.arrivals

    # ---- beginning, and beginning again

    def begin(self) -> None:
        """Takes the run up where its last checkpoint and the journal behind it left it, or starts it."""
        assert self.folder is not None
        loaded = self.folder.load_latest()
        state: dict[str, Any] = {"tape_bytes": 0, "evals_bytes": 0, "journal": 0}
        if loaded:
            state = loaded[0]
            self.load(*loaded)
        told = sum(1 for _ in read_lines(self.folder.path / TAPE))
        self.folder.start_writing(state["tape_bytes"], state["evals_bytes"])
        self._journal = Journal(self.folder.path)
        if self._journal.last < state["journal"]:
            raise UserError(
                f"{self._journal.path} is cut short: it has {self._journal.last} events, and the last checkpoint was made after "
                f"{state['journal']}. Restore it, or start the run anew."
            )
        begun = sum(1 for _ in read_lines(self.folder.path / TAPE))
        received = 0
        for event in self._journal.read(state["journal"]):
            received += event["event"] == "receive"
            self.follow(event)
        if begun + received < told:
            raise UserError(
                f"{self._journal.path} is cut short: the tape has {told} lines and the journal reaches to {begun + received}. "
                "Restore it, or start the run anew."
            )
        self._journal.remove_unfinished()
        if not loaded:
            self._evaluate_if(True)
            self.save()

    def load(self, state: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        if state["config_digest"] != self.config.digest():
            raise UserError("The run's config is not the one its checkpoint was made with: restore config.toml.")
        if state["task_digest"] != self.task_digest:
            raise UserError("The data or the tokenizer is not the one this run was started with: give the same text.")
        self.synchronizer.load_state_dict({"books": state["books"], "tensors": tensors})
        self.time_s, self.units, self.paused = state["time_s"], state["units"], state.get("paused", "")
        self._evaluated_at, self._saved_at = state["evaluated_at"], self.synchronizer.arrivals
        self._started_s = {int(worker): s for worker, s in state["started_s"].items()}
        self.machine_of = {int(worker): name for worker, name in state["machine_of"].items()}
        self.seats = dict(state["seats"])
        self.contributors.extend(state["contributors"])
        self.contributions.update(state.get("contributions", {}))
        for worker, acks in state["acks"].items():
            self.acks[int(worker)].extend(acks)

    def save(self) -> None:
        """A checkpoint. The journal's tensors that it stands for may go, and with them the oldest checkpoint."""
        assert self.folder is not None
        books = self.synchronizer.state_dict()
        state = {
            "config_digest": self.config.digest(),
            "task_digest": self.task_digest,
            "books": books["books"],
            "units": self.units,
            "paused": self.paused,
            "evaluated_at": self._evaluated_at,
            "journal": self.journal.last,
            "time_s": self.time_s,
            "started_s": self._started_s,
            "machine_of": self.machine_of,
            "seats": self.seats,
            "contributors": list(self.contributors),
            "contributions": dict(self.contributions),
            "acks": {worker: list(acks) for worker, acks in self.acks.items()},
        }
        self.journal.sync()
        whole = self.journal.whole_since == 0
        self.folder.save_checkpoint(self.synchronizer.arrivals, state, books["tensors"], keep_first=whole)
        self._saved_at = self.synchronizer.arrivals
        self.journal.prune(self.folder.journal_mark(), self.config.cluster.journal_gb * 1e9)

    # ---- events, live

    def note(self, kind: str, time_s: float, **about: Any) -> None:
        """Something worth knowing that changes nothing: a machine came, a pause."""
        self.follow(self.journal.append({"event": kind, "time_s": time_s, **about}))

    def dispatch(self, worker: int, machine: str, steps: int, time_s: float) -> None:
        self.follow(self.journal.append(
            {"event": "dispatch", "time_s": time_s, "worker": worker, "steps": steps, "machine": machine}
        ))  # fmt: skip

    def abandon(self, worker: int, reason: str, time_s: float) -> None:
        held = self.synchronizer.held[worker]
        self.follow(self.journal.append(
            {"event": "abandon", "time_s": time_s, "worker": worker, "round": held.index, "reason": reason}
        ))  # fmt: skip

    def receive(
        self, contribution: Contribution, *, digest: str, machine: str, time_s: float, meanwhile: Callable[[], None]
    ) -> Ack:
        """Takes a contribution in whose tensors lie in the journal's folder. It is applied, and `meanwhile` called, while they
        become durable; the answer is given when all is done."""
        key = (contribution.worker, contribution.index, contribution.version)
        path = self.journal.tensors(*key)
        event = self.journal.append({
            "event": "receive", "time_s": time_s, "worker": key[0], "round": key[1], "version": key[2], "machine": machine,
            "bytes": self.layout.size, "xxh3": digest, "loss": _finite(contribution.loss),
            "last_loss": _finite(contribution.last_loss), "samples": contribution.samples, "units": contribution.units,
        })  # fmt: skip
        durable = self._beside.submit(self.journal.sync, path)
        try:
            self.follow(event, contribution, meanwhile)
        finally:
            durable.result()
        return self.acks[contribution.worker][-1]

    # ---- what follows from an event

    def follow(
        self, event: Event, contribution: Contribution | None = None, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        self.time_s = event["time_s"]
        if event["event"] == "dispatch":
            worker = event["worker"]
            self.synchronizer.inner_steps[worker] = event["steps"]
            self.machine_of[worker], self._started_s[worker] = event["machine"], event["time_s"]
            self.synchronizer.dispatch(worker, with_start=False)
        elif event["event"] == "abandon":
            self.synchronizer.abandon(event["worker"])
            self.machine_of.pop(event["worker"], None)
        elif event["event"] == "join" and event["seat"] is not None:
            self.seats[event["machine"]] = event["seat"]
        elif event["event"] in ("pause", "go-on"):
            self.paused = event["reason"]
        elif event["event"] in PARTINGS:
            self.seats.pop(event["machine"], None)
        elif event["event"] == "receive":
            self._arrive(event, self._read(event) if contribution is None else contribution, meanwhile)

    def _read(self, event: Event) -> Contribution:
        assert self._path is not None
        path = tensors_of(self._path, event)
        remedy = "Restore it, or start the run anew."
        try:
            tensors = mapped(path, self.layout)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}, a contribution that was acknowledged, is missing or cut. {remedy}") from error
        if file_digest(path) != event["xxh3"]:
            raise UserError(f"{path}, a contribution that was acknowledged, was changed. {remedy}")
        return as_contribution(event, tensors)

    def _arrive(self, event: Event, contribution: Contribution, meanwhile: Callable[[], None]) -> None:
        contribution = replace(contribution, loss=_finite(contribution.loss), last_loss=_finite(contribution.last_loss))
        arrival = self.synchronizer.receive(contribution)
        digest = self._beside.submit(self.digest)
        meanwhile()
        self.machine_of.pop(arrival.worker, None)
        if arrival.verdict != "refused":
            self.units += contribution.units
            self.contributors.append(event["machine"])
            self.contributions[name_of(event["machine"])] += 1
            self.recent.append((event["time_s"], event["machine"], arrival.staleness))
        self.acks[arrival.worker].append(_acknowledged(arrival))
        line = record(arrival, contribution, time_s=event["time_s"], start_s=self._started_s[arrival.worker])
        line |= {"machine": event["machine"], "participants": len(self.participants()), "digest": digest.result()}
        if self.folder is not None:
            self.folder.write_arrival(line)
        for observer in self.observers:
            observer.arrived(line)
        if arrival.verdict != "refused":
            self._evaluate_if(self.finished or due(self.synchronizer.arrivals, self.config.run.eval_every))

    def participants(self) -> set[str]:
        """The names of those that contributed to the last arrivals; one that came back is the same."""
        return set(map(name_of, self.contributors))

    def save_if_due(self) -> None:
        """After an arrival was answered: a checkpoint may take a while."""
        since, every = self.synchronizer.arrivals - self._saved_at, self.config.run.checkpoint_every
        if (since and self.finished) or (every and since >= every):
            self.save()

    def lately(self, now_s: float, machine: str | None = None) -> dict[str, float | None]:
        """Over the last arrivals, of one machine or of all: how many came per minute, their share, how stale they were."""
        recent, window = list(self.recent), len(self.contributors)
        stale = [staleness for _, name, staleness in recent[-window:] if machine in (None, name)]
        since = [name for _, name, _ in recent[1:] if machine in (None, name)]  # the first is the mark that time runs from
        span_s = now_s - recent[0][0] if len(recent) > 1 else 0.0
        return {
            "per_minute": 60 * len(since) / span_s if span_s > 0 else None,
            "share": self.contributors.count(machine) / window if window and machine else None,
            "staleness": sum(stale) / len(stale) if stale else None,
        }

    def digest(self) -> str:
        """Of the outer parameters, to the bit."""
        found = xxhash.xxh3_64()
        for parameter in self.synchronizer.thetas:
            found.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()

    def _evaluate_if(self, wanted: bool) -> None:
        if not wanted or self.evaluate is None or self._evaluated_at == self.synchronizer.arrivals:
            return
        line = evaluation_line(self.evaluate(), self.synchronizer, time_s=self.time_s, units=self.units)
        self._evaluated_at = self.synchronizer.arrivals
        if self.folder is not None:
            self.folder.write_eval(line)
        for observer in self.observers:
            observer.evaluated(line)

    def ack_of(self, worker: int, index: int) -> Ack | None:
        return next((ack for ack in self.acks[worker] if ack["round"] == index), None)

    def close(self) -> None:
        self._beside.shutdown()
        if self._journal is not None:
            self._journal.close()
        if self.folder is not None:
            self.folder.close()


def file_digest(path: Path) -> str:
    found = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(1 << 22):
            found.update(piece)
    return found.hexdigest()


def _acknowledged(arrival: Arrival) -> Ack:
    return {
        "worker": arrival.worker, "round": arrival.round, "version": arrival.version, "verdict": arrival.verdict,
        "arrival": arrival.arrival, "outer_step": arrival.outer_step, "staleness": arrival.staleness, "reason": arrival.reason,
    }  # fmt: skip


def _finite(value: float | None) -> float | None:
    """JSON has no NaN: a loss that is none is null, on the wire, in the journal and on the tape."""
    return value if value is not None and math.isfinite(value) else None
