"""A run on real machines as a sequence of events. Each event is in the journal before it takes effect.

In a live run an event is written and then followed. After a restart and in a replay the same events
are followed again and give the same parameters to the bit. There is no network and no clock here:
the caller passes times in, and they are part of the events."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
import xxhash
from msgspec.structs import asdict, replace
from torch import Tensor

from heloco.cluster.protocol.messages import Acknowledgement, ContributionReport, Paused, RoundKey
from heloco.cluster.server.derived_lines import DerivedLines
from heloco.cluster.server.evaluation_queue import EvaluationDue, EvaluationQueue, Scorer
from heloco.cluster.server.machine_book import MachineBook
from heloco.cluster.server.machine_scores import MachineScores, record_of
from heloco.cluster.server.tensor_readers import TensorReaders
from heloco.cluster.server.transfers import SnapshotStore, Upload
from heloco.disk import file_digest, release_for
from heloco.engine.local import Observer, evaluation_record, is_due
from heloco.errors import RunStopped, UserError
from heloco.records.evaluations import EvaluationRecord
from heloco.records.events import WASTED, Abandon, AbandonKind, Dispatch, Evaluate, Event, Join, Part, Pause, Receive, Resume
from heloco.records.journal import Journal
from heloco.records.journal_reader import FOLDER, contribution_path
from heloco.records.json_numbers import finite_or_none
from heloco.records.run_facts import participation_window
from heloco.records.tape import Traffic
from heloco.run import RunConfig, RunFolder
from heloco.run.tape_writer import arrival_record
from heloco.synchronizer import Arrival, Contribution, Synchronizer
from heloco.task import Scores
from heloco.wire import blocks
from heloco.wire.encoder import NO_ROUND
from heloco.wire.formats import find_format, layout_of
from heloco.wire.layout import Layout, map_tensors

ACKS_KEPT = 16
"""Acknowledgements kept per worker. A machine repeats a commit only if it got no answer to its last one."""


class JournaledRun:
    """A synchronizer whose events are in a journal. Without a `folder` nothing is written: that is
    a replay of the run at `path`. `scorer` evaluates the run's model. With `machines_evaluate` only machines do, and they report
    what they find."""

    def __init__(
        self,
        synchronizer: Synchronizer,
        config: RunConfig,
        *,
        task_digest: str,
        folder: RunFolder | None,
        path: Path | None = None,
        scorer: Scorer | None = None,
        machines_evaluate: bool = False,
        observers: list[Observer] | None = None,
    ) -> None:
        self.synchronizer, self.config, self.task_digest, self.folder = synchronizer, config, task_digest, folder
        self.path, self.lines = (folder.path if folder else path), DerivedLines(folder, observers or [])
        self.start_layout = Layout.from_tensors(blocks.name_start(synchronizer.parameters, synchronizer.buffers))
        self.format = find_format(config.links.wire)
        self.contribution_layout = layout_of(self.format, blocks.PSEUDO_GRADIENT, synchronizer.parameters, synchronizer.buffers)
        self.book, self.readers = MachineBook(), TensorReaders()
        self.time_s = 0.0
        """Time of the last event."""
        self.units = 0
        self.paused: Paused | None = None
        """Why the run paused at the last event."""
        self.holders: dict[int, str] = {}
        """Worker -> the machine that holds its round."""
        self.last_machines: dict[int, str] = {}
        """Worker -> the machine that made its last accepted contribution."""
        self.start_digests: dict[int, str] = {}
        """Version -> the digest of the start file of its rounds, while at least one of them is under way."""
        self.start_places: dict[int, EvaluationDue] = {}
        """Worker -> where the run was when its round was handed out."""
        self.machines_evaluate, self.machine_scores = machines_evaluate, MachineScores()
        self.started_s: dict[int, float] = {}
        """Worker -> the time at which its round was handed out."""
        self.acks: dict[int, deque[Acknowledgement]] = {w: deque(maxlen=ACKS_KEPT) for w in range(synchronizer.workers)}
        window = participation_window(config.cluster.participation, synchronizer.workers)
        self.contributors: deque[str] = deque(maxlen=window)
        """The machines of the last arrivals."""
        self.recent: deque[tuple[float, str, int]] = deque(maxlen=window + 1)
        """(time, machine, staleness) of the arrivals in the window and of the one before it, for rates. Empty after a restart."""
        self.saved_at = -1
        """Arrivals at the last checkpoint."""
        self.checkpoint_under_way: Future[int | None] | None = None
        """The checkpoint that is being written."""
        self.evaluations = self._evaluation_queue(scorer)
        self._journal: Journal | None = None
        self._background = ThreadPoolExecutor(2, thread_name_prefix="background")
        """Threads for the digest, which only reads the parameters, and for fsync."""
        self.slow_work = ThreadPoolExecutor(1, thread_name_prefix="slow-work")
        """A thread for what nobody waits for: checkpoints, and removing files."""

    def _evaluation_queue(self, scorer: Scorer | None) -> EvaluationQueue | None:
        if self.folder is None or (scorer is None and not self.machines_evaluate):
            return None
        return EvaluationQueue(self.folder.path, self.start_layout, scorer, self._note_scores, self.readers)

    def open_journal(self, journal: Journal) -> None:
        """Events go to this journal from now on."""
        self._journal = journal
        self.slow_work.submit(int)  # starts its thread now: later there may be none left

    @property
    def journal(self) -> Journal:
        """The open journal. Before `open_journal` there is none, and this fails."""
        assert self._journal is not None, "the run was not begun"
        return self._journal

    @property
    def is_finished(self) -> bool:
        """Whether all arrivals of the config are in."""
        return self.synchronizer.arrivals >= self.config.run.arrivals

    # ---- events, live

    def note(self, event: Join | Part | Pause | Resume | Evaluate) -> None:
        """Records an event that changes no parameters: a machine that joined, left or evaluated, a pause."""
        self.journal.append(event)
        self.follow(event)

    def dispatch(self, worker: int, machine: str, steps: int, start_digest: str, time_s: float) -> None:
        """Records that a machine was handed a round of `steps` inner steps, and follows the event."""
        event = Dispatch(time_s=time_s, worker=worker, steps=steps, machine=machine, start_digest=start_digest)
        self.journal.append(event)
        self.follow(event)

    def abandon(self, worker: int, kind: AbandonKind, text: str, time_s: float) -> None:
        """Records that the worker's round ended without an accepted contribution. Its data goes back to the ledger."""
        event = Abandon(
            time_s=time_s, worker=worker, round=self.synchronizer.rounds_under_way[worker].index, kind=kind, text=text
        )
        self.journal.append(event)
        self.follow(event)

    def receive(
        self,
        key: RoundKey,
        report: ContributionReport,
        upload: Upload,
        *,
        machine: str,
        time_s: float,
        concurrent_work: Callable[[], None] = lambda: None,
    ) -> Acknowledgement:
        """Takes in a contribution that has arrived whole and was checked.

        1. Its file moves to the journal's folder, and its line is written. After an error up to here nothing has changed.
        2. While both become durable, it is applied, and `concurrent_work` is called. An error from here on ends the process: a
           restart follows the journal.
        3. When both are durable, it is acknowledged. Only then is the acknowledgement kept for repeated commits."""
        event = Receive(
            time_s=time_s, worker=key.worker, round=key.round, version=key.version, machine=machine,
            bytes=upload.layout.size, digest=upload.digest(), loss=finite_or_none(report.loss),
            last_loss=finite_or_none(report.last_loss), samples=report.samples, units=report.units,
        )  # fmt: skip
        contribution = self._contribution(event, map_tensors(upload.fileno(), upload.layout))
        path = self.journal.take_in(upload.path)
        try:
            number = self.journal.append(event)
        except BaseException:
            self.journal.give_back(path, upload.path)
            raise
        durable = self._background.submit(self.journal.make_durable, upload.fileno())
        try:
            ack = self._arrive(event, contribution, concurrent_work)
        finally:
            durable.result()
        self._check_saving()
        self.journal.acknowledge(number)
        self.acks[ack.worker].append(ack)
        return ack

    def _check_saving(self) -> None:
        """Raises the error if an fsync of the checkpoint in the background failed: then nothing more is acknowledged."""
        under_way = self.checkpoint_under_way
        if under_way is not None and under_way.done() and isinstance(error := under_way.exception(), RunStopped):
            raise error

    # ---- what follows from an event

    def follow(self, event: Event, number: int = 0) -> None:
        """Applies an event of the journal. `number` is the event's number, by which a contribution's tensors are found."""
        self.time_s = event.time_s
        if isinstance(event, Receive):
            ack = self._arrive(event, self._read(event, number), lambda: None)
            self.acks[ack.worker].append(ack)
        elif isinstance(event, Dispatch):
            self._follow_dispatch(event)
        elif isinstance(event, Abandon):
            self.synchronizer.abandon(event.worker)
            machine = self.holders.pop(event.worker, "")
            if event.kind in WASTED:
                self.book.note_wasted_round(machine)
            self._forget_digests()
        elif isinstance(event, Join):
            self.book.note_join(event.machine, event.secret_hash, event.token, event.seat)
        elif isinstance(event, Part):
            self.book.note_part(event.machine, event.kind, event.text)
        elif isinstance(event, Evaluate):
            self._follow_evaluation(event)
        elif isinstance(event, Pause):
            self.paused = Paused(kind=event.kind, text=event.text)
        else:
            self.paused = None

    def _follow_dispatch(self, event: Dispatch) -> None:
        self.synchronizer.inner_steps[event.worker] = event.steps
        self.holders[event.worker], self.started_s[event.worker] = event.machine, event.time_s
        terms = self.synchronizer.dispatch(event.worker, with_start=False)
        self.start_digests[terms.version] = event.start_digest
        self.start_places[event.worker] = self._place()

    def _follow_evaluation(self, event: Evaluate) -> None:
        self.machine_scores = self.machine_scores.after(event)
        if self.evaluations is not None and not event.own_steps:
            self.evaluations.settle(event.arrival)
        self.lines.on_evaluation(record_of(event))

    def _forget_digests(self) -> None:
        versions = {terms.version for terms in self.synchronizer.rounds_under_way.values()}
        self.start_digests = {version: digest for version, digest in self.start_digests.items() if version in versions}

    def _read(self, event: Receive, number: int) -> Contribution:
        assert self.path is not None
        path = contribution_path(self.path / FOLDER, number)
        remedy = f"Restore it from a copy, or return to before it with `heloco rollback {self.path}`."
        try:
            digest = file_digest(path)
            tensors = map_tensors(path, self.contribution_layout)
        except (OSError, ValueError) as error:
            raise UserError(f"{path}, an acknowledged contribution, is missing or cut. {remedy}") from error
        if digest != event.digest:
            raise UserError(f"{path}, an acknowledged contribution, was changed. {remedy}")
        return self._contribution(event, tensors)

    def _contribution(self, event: Receive, tensors: dict[str, torch.Tensor]) -> Contribution:
        pseudo_gradient = [
            self.format.block(blocks.parts_of(blocks.PSEUDO_GRADIENT, index, tensors), parameter.shape)
            for index, parameter in enumerate(self.synchronizer.parameters)
        ]
        return Contribution(
            event.worker, event.round, event.version, pseudo_gradient, blocks.blocks_of(blocks.BUFFER, tensors),
            event.loss, event.last_loss, event.samples, event.units, release=release_for(event.bytes),
        )  # fmt: skip

    def _arrive(self, event: Receive, contribution: Contribution, concurrent_work: Callable[[], None]) -> Acknowledgement:
        self.time_s = event.time_s
        self.readers.wait()  # in a live run nobody reads any more (`Contributions`)
        arrival = self.synchronizer.receive(contribution)
        digest = self._background.submit(self.digest)
        concurrent_work()
        self.holders.pop(arrival.worker, None)
        self._forget_digests()
        started_s = self.started_s[arrival.worker]
        if arrival.verdict == "refused":
            self.book.note_wasted_round(event.machine)
        else:
            self._count(event, arrival, started_s)
        traffic = Traffic(self.start_layout.size, event.bytes)
        record = arrival_record(arrival, contribution, time_s=event.time_s, start_s=started_s, traffic=traffic)
        self.lines.on_arrival(
            replace(record, machine=event.machine, participants=len(self.participants()), digest=digest.result())
        )
        if arrival.verdict != "refused":
            self.evaluate_if(self.is_finished or is_due(self.synchronizer.arrivals, self.config.run.eval_every))
        return _acknowledgement(arrival)

    def _count(self, event: Receive, arrival: Arrival, started_s: float) -> None:
        self.units += event.units
        self.contributors.append(event.machine)
        self.recent.append((event.time_s, event.machine, arrival.staleness))
        self.last_machines[arrival.worker] = event.machine
        self.book.note_arrival(event.machine, (event.time_s - started_s) / arrival.inner_steps)

    def participants(self) -> set[str]:
        """The machines that contributed to the last arrivals."""
        return set(self.contributors)

    def evaluate_if(self, condition: bool) -> None:
        """Begins an evaluation if one is due."""
        if not condition or self.evaluations is None:
            return
        if earlier := self.evaluations.add(self._place(), self.final_model()):
            self.lines.on_evaluation(earlier)

    def _place(self) -> EvaluationDue:
        """Where the run is now."""
        synchronizer = self.synchronizer
        return EvaluationDue(
            arrival=synchronizer.arrivals, outer_step=synchronizer.outer_step, time_s=self.time_s,
            inner_steps=synchronizer.steps_accepted, units=self.units,
        )  # fmt: skip

    def _note_scores(self, due: EvaluationDue, scores: Scores, machine: str) -> None:
        self.lines.on_evaluation(evaluation_record(scores, **asdict(due), machine=machine))

    def take_up_evaluations(self, due: Iterable[EvaluationDue], earlier: list[EvaluationRecord]) -> None:
        """After a restart: `due` at the checkpoint, and lines that were written after it."""
        if self.evaluations is not None:
            for record in self.evaluations.take_up(due, earlier, self.synchronizer.arrivals, self.final_model()):
                self.lines.on_evaluation(record)
            if self.machines_evaluate and self.synchronizer.arrivals == 0 and self.evaluations.newest < 0:
                self.evaluate_if(True)  # if a machine was about to evaluate what the run begins with

    def can_evaluate(self, due: EvaluationDue, earlier: list[EvaluationRecord], arrival: int) -> bool:
        """Whether an evaluation that was due before a restart is there, or can be made from the checkpoint at this arrival."""
        return self.evaluations is None or any(map(due.matches, earlier)) or self.evaluations.is_possible(due, arrival)

    def start_evaluations(self) -> None:
        """Until then evaluations are only collected."""
        if self.evaluations is not None:
            self.evaluations.start()

    def finish_evaluations(self) -> None:
        """Waits until no evaluation is due any more."""
        if self.evaluations is not None:
            self.evaluations.wait()

    @contextmanager
    def hold_evaluations(self) -> Iterator[tuple[EvaluationDue, ...]]:
        """The evaluations that are still due. None is finished inside this context."""
        if self.evaluations is None:
            yield ()
        else:
            with self.evaluations.hold_due() as due:
                yield due

    # ---- looking at it

    def ack_of(self, key: RoundKey) -> Acknowledgement | None:
        """The answer to a contribution that was acknowledged."""
        acks = self.acks.get(key.worker, ())
        return next((ack for ack in acks if (ack.round, ack.version) == (key.round, key.version)), None)

    def last_accepted(self, worker: int, machine: str) -> int:
        """The worker's last accepted round if this machine did it, and its acknowledgement is still kept; else `NO_ROUND`."""
        if self.last_machines.get(worker) != machine:
            return NO_ROUND
        return next((ack.round for ack in reversed(self.acks[worker]) if ack.verdict != "refused"), NO_ROUND)

    def rates(self, now_s: float, machine: str | None = None) -> dict[str, float | None]:
        """Arrivals per minute, share of arrivals and mean staleness over the window, of one machine or of all."""
        recent, window = list(self.recent), len(self.contributors)
        staleness = [stale for _, name, stale in recent[-window:] if machine in (None, name)]
        arrivals = sum(machine in (None, name) for _, name, _ in recent[1:])  # the first marks where the span begins
        span_s = now_s - recent[0][0] if len(recent) > 1 else 0.0
        return {
            "per_minute": 60 * arrivals / span_s if span_s > 0 else None,
            "share": self.contributors.count(machine) / window if window and machine else None,
            "staleness": sum(staleness) / len(staleness) if staleness else None,
        }

    def digest(self) -> str:
        """xxh3-64 of the outer parameters."""
        digest = xxhash.xxh3_64()
        for parameter in self.synchronizer.thetas:
            digest.update(parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def write_start(self, starts: SnapshotStore) -> str:
        """Writes the file that rounds of the current version begin with, and returns its digest."""
        return starts.write(self.synchronizer.outer_step, self.synchronizer.start(starts.layout.names))

    def final_model(self) -> dict[str, Tensor]:
        """The outer parameters and buffers by name. They are no copies."""
        return blocks.name_start(self.synchronizer.parameters, self.synchronizer.buffers)

    def close(self) -> None:
        """Ends the evaluations and threads, and closes the run's files. It waits for slow work that was begun."""
        if self.evaluations is not None:
            self.evaluations.close()
        self._background.shutdown()
        self.slow_work.shutdown()
        if self._journal is not None:
            self._journal.close()
        if self.folder is not None:
            self.folder.close()


def _acknowledgement(arrival: Arrival) -> Acknowledgement:
    return Acknowledgement(
        worker=arrival.worker, round=arrival.round, version=arrival.version, verdict=arrival.verdict, code=arrival.code,
        reason=arrival.reason, arrival=arrival.arrival, outer_step=arrival.outer_step, staleness=arrival.staleness,
    )  # fmt: skip
