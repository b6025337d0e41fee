"""Resuming a run from a checkpoint and the events after it, with repair of damaged files in its folder.

Two things cannot be computed again: checkpoints, of which there are two, and the journal. The tape,
the evaluations and the start files of rounds are derived from them. If one of these is damaged, the
run resumes from an older checkpoint, from which the journal gives it again. If there is no such
checkpoint, the run continues without it."""

import contextlib
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from heloco.cluster.server import checkpoints
from heloco.cluster.server.checkpoints import ServedState
from heloco.cluster.server.evaluation_queue import EvaluationDue, evaluations_after
from heloco.cluster.server.journaled_run import JournaledRun
from heloco.cluster.server.transfers import SnapshotStore
from heloco.disk import make_durable
from heloco.records.events import Abandon, Dispatch, Receive
from heloco.records.journal import Journal
from heloco.records.journal_reader import FOLDER, JournalDamaged, Mark, contribution_path, read_events
from heloco.records.run_files import CHECKPOINTS, EVALS
from heloco.run import checkpoint
from heloco.run.checkpoint import NO_LINES, CheckpointDamaged

StartPoint = tuple[ServedState, Mapping[str, Tensor]]
"""The state and the tensors of a checkpoint."""


class Resumption:
    """Begins a run, or resumes it from its last checkpoint and the journal after that."""

    def __init__(self, run: JournaledRun, starts: SnapshotStore) -> None:
        assert run.folder is not None
        self.run, self.starts, self.folder = run, starts, run.folder
        self.notices: list[str] = []
        """Sentences about the folder, for the person who serves the run."""

    def begin(self) -> None:
        """Takes the folder, loads the best checkpoint, follows the journal after it, and opens the journal for new events."""
        self.folder.take()
        start_point = self._choose_checkpoint()
        mark, lines = Mark(), NO_LINES
        evaluations_due: tuple[EvaluationDue, ...] = ()
        if start_point is not None:
            checkpoints.load(self.run, *start_point)
            mark, lines, evaluations_due = start_point[0].journal, start_point[0].lines, start_point[0].evaluations_due
            self._adopt_starts()
        earlier = evaluations_after(self.folder.path, lines.evals_bytes)
        self.folder.start_writing(lines, accept_shorter=True)
        self.run.take_up_evaluations(evaluations_due, earlier)
        self.run.open_journal(Journal(self.folder.path, mark))
        if start_point is None:
            self.run.evaluate_if(True)
        last_received = self._follow(mark)
        self.run.journal.remove_orphans()
        self._settle(last_received)
        self._give_up_lost_starts()
        if start_point is None:
            checkpoints.save(self.run)
        self.run.start_evaluations()

    def _choose_checkpoint(self) -> StartPoint | None:
        """The newest checkpoint from which every file is intact or can be computed again."""
        paths = self.folder.checkpoints()[::-1]
        damage_of_path: dict[Path, CheckpointDamaged] = {}
        second_best: tuple[StartPoint, str] | None = None
        for path in paths:
            try:
                start_point = checkpoint.load(path, ServedState)
                lost_file = self._lost_at(start_point[0], is_newest=path == paths[0])
            except CheckpointDamaged as error:
                damage_of_path[path] = error
                continue
            if lost_file is None:
                self._note_choice(path.name, damage_of_path, second_best)
                return start_point
            second_best = second_best or (start_point, lost_file)
        if second_best is not None:
            self._set_aside(damage_of_path)
            self.notices.append(f"{second_best[1]} is damaged and cannot be made again: the run continues without it.")
            return second_best[0]
        if damage_of_path:
            raise next(iter(damage_of_path.values()))
        if self._has_events():
            self.notices.append(f"{self.folder.path / CHECKPOINTS} is gone: the run is made again from its journal.")
        return None

    def _note_choice(self, name: str, damages: dict[Path, CheckpointDamaged], second_best: tuple[StartPoint, str] | None) -> None:
        for damage in damages.values():
            sentence = str(damage).partition(". ")[0]
            self.notices.append(f"{sentence}. The run continues from {name} and its journal; nothing is lost.")
        self._set_aside(damages)
        if second_best is not None:
            self.notices.append(f"{second_best[1]} was damaged and is made again from {name} and the journal.")

    def _set_aside(self, damages: Iterable[Path]) -> None:
        for path in damages:
            target = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(target, ignore_errors=True)
            path.rename(target)

    def _has_events(self) -> bool:
        return any(True for _ in read_events(self.folder.path / FOLDER)) if (self.folder.path / FOLDER).is_dir() else False

    def _lost_at(self, state: ServedState, *, is_newest: bool) -> str | None:
        """A file that is damaged and cannot be computed again from this checkpoint; None if there is none."""
        if short := self.folder.shorter_than(state.lines):
            return str(short)
        for version in self._versions_still_held(state):
            if version < state.books.outer_step and not self.starts.adopt(version, state.start_digests[version]):
                return str(self.starts.path(version))
        earlier = evaluations_after(self.folder.path, state.lines.evals_bytes)
        if any(not self.run.can_evaluate(due, earlier, state.arrival) for due in state.evaluations_due):
            return str(self.folder.path / EVALS)
        return None if is_newest else self._missing_contribution(state.journal)

    def _versions_still_held(self, state: ServedState) -> set[int]:
        """Versions of the rounds that were under way at the checkpoint and still are at the end of the journal."""
        versions = {terms.worker: terms.version for terms in state.books.rounds_under_way}
        with contextlib.suppress(JournalDamaged):  # opening the journal reports the damage
            for event, _ in read_events(self.folder.path / FOLDER, state.journal):
                if isinstance(event, Receive | Abandon):
                    versions.pop(event.worker, None)
        return set(versions.values())

    def _missing_contribution(self, since: Mark) -> str | None:
        folder = self.folder.path / FOLDER
        try:
            for event, mark in read_events(folder, since):
                if isinstance(event, Receive) and not contribution_path(folder, mark.number).is_file():
                    return str(contribution_path(folder, mark.number))
        except JournalDamaged as damage:
            return str(damage)
        return None

    def _adopt_starts(self) -> None:
        """Takes over the start files of rounds that were under way at the checkpoint. Those of its
        own version can be written again."""
        for version, digest in self.run.start_digests.items():
            if not self.starts.adopt(version, digest) and version == self.run.synchronizer.outer_step:
                self.run.write_start(self.starts)

    def _follow(self, since: Mark) -> int:
        """Follows the events after a checkpoint. Returns the number of the last contribution, or 0 if there is none."""
        folder, last_received = self.run.journal.folder, 0
        under_way = _still_under_way(folder, since)
        for event, mark in read_events(folder, since):
            self.run.follow(event, mark.number)
            if isinstance(event, Receive):
                last_received = mark.number
            elif mark.number in under_way and isinstance(event, Dispatch):
                version = self.run.synchronizer.outer_step
                if not self.starts.adopt(version, event.start_digest):
                    self.run.write_start(self.starts)
        return last_received

    def _settle(self, last_received: int) -> None:
        """Makes contributions durable that were written before the restart but not acknowledged. Their machines will commit again
        and get the acknowledgement."""
        journal = self.run.journal
        for number in range(journal.acknowledged + 1, last_received + 1):
            path = contribution_path(journal.folder, number)
            if path.is_file():
                with path.open("rb") as file:
                    make_durable(file.fileno(), path)
        journal.make_durable()
        if last_received > journal.acknowledged:
            journal.acknowledge(last_received)

    def _give_up_lost_starts(self) -> None:
        """Abandons rounds whose start file is lost for good: no machine could begin them."""
        run = self.run
        for worker, terms in list(run.synchronizer.rounds_under_way.items()):
            if not self.starts.has(terms.version):
                run.abandon(worker, "start-gone", "its start file is gone", run.time_s)


def _still_under_way(folder: Path, since: Mark) -> set[int]:
    """Numbers of the dispatches whose rounds have neither arrived nor been given up by the end of the journal."""
    number_by_worker: dict[int, int] = {}
    for event, mark in read_events(folder, since):
        if isinstance(event, Dispatch):
            number_by_worker[event.worker] = mark.number
        elif isinstance(event, Receive | Abandon):
            number_by_worker.pop(event.worker, None)
    return set(number_by_worker.values())
