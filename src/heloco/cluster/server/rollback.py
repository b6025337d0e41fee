"""Returning a run to an earlier point of its journal, with or without the later contributions of other machines.

The run is computed again in a new folder, from the newest checkpoint before the point and the events after that. A
contribution that is left out becomes an abandoned round. Later contributions of other machines are applied with the
staleness that they have now. When the new folder is complete, the folders change places, and the old one is kept."""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from heloco.cluster.server import checkpoints
from heloco.cluster.server.checkpoints import ServedState
from heloco.cluster.server.evaluation_queue import evaluations_after
from heloco.cluster.server.journaled_run import JournaledRun
from heloco.errors import UserError
from heloco.records.events import Abandon, Dispatch, Evaluate, Event, Join, Part, Receive
from heloco.records.journal import Journal
from heloco.records.journal_reader import FOLDER, JournalDamaged, contribution_path, read_events, segments
from heloco.records.machine_ids import name_of
from heloco.records.run_files import CHECKPOINTS, CONFIG, CREDENTIALS, EVALS, META, RUN_ID, TAPE
from heloco.run import RunFolder, checkpoint
from heloco.run.checkpoint import CheckpointDamaged
from heloco.run.folder import whole_lines

COPIED = (CONFIG, META, RUN_ID, CREDENTIALS)


@dataclass(frozen=True)
class RollbackResult:
    """What a rollback did: where the run stands now, and what was left out."""

    arrivals: int
    """Arrivals of the run now."""
    left_out: int
    """How many contributions were left out."""
    machines: tuple[str, ...]
    """Ids of the machines whose contributions were left out."""
    old_folder: Path
    """Folder with the run as it was before."""


class Rollback:
    """`to` is the arrival to return to, by default the last one that is complete. `without` names machines
    whose later contributions are left out, while those of other machines stay. If it is empty, nothing after `to` stays."""

    def __init__(self, folder: RunFolder, *, to: int | None = None, without: frozenset[str] = frozenset()) -> None:
        self.folder, self.to, self.without = folder, to, without
        self.target = folder.path.with_name(f"{folder.path.name}.rollback")
        self._left_out = 0

    def run(self, build: Callable[[RunFolder], JournaledRun]) -> RollbackResult:
        """Carries out the rollback. `build` makes the run of a folder, not begun yet."""
        self.folder.take()
        try:
            self.without = frozenset(map(self._find_machine, self.without))
            state, path = self._choose_checkpoint()
            self._copy(state, path)
            run = build(RunFolder.open(self.target))
            try:
                arrivals = self._make_again(run, path)
            finally:
                run.close()
            machines = tuple(sorted(self.without))
            return RollbackResult(arrivals, self._left_out, machines, self._exchange())
        finally:
            self.folder.close()

    def _find_machine(self, name: str) -> str:
        """The id of a machine that joined the run, by its id or by its name."""
        machines = sorted({event.machine for event, _ in read_events(self.folder.path / FOLDER) if isinstance(event, Join)})
        matches = [machine for machine in machines if name in (machine, name_of(machine))]
        if len(matches) == 1:
            return matches[0]
        which = f"is called by {len(matches)} machines" if matches else "never joined this run"
        raise UserError(f"{name!r} {which}: give one of {', '.join(matches or machines)}.")

    def _choose_checkpoint(self) -> tuple[ServedState, Path]:
        earliest = ""
        for path in reversed(self.folder.checkpoints()):
            try:
                state, _ = checkpoint.load(path, ServedState)
            except CheckpointDamaged:
                continue
            if self.to is None or state.arrival <= self.to:
                return state, path
            earliest = f" The earliest is {state.arrival}."
        raise UserError(f"{self.folder.path} has no checkpoint from which arrival {self.to} could be made again.{earliest}")

    def _copy(self, state: ServedState, checkpoint_path: Path) -> None:
        """Copies the run as it was at the checkpoint."""
        shutil.rmtree(self.target, ignore_errors=True)
        self.target.mkdir(mode=self.folder.path.stat().st_mode & 0o777)
        for name in COPIED:
            if (source := self.folder.path / name).is_dir():
                shutil.copytree(source, self.target / name)
            elif source.exists():
                shutil.copy2(source, self.target / name)
        for path in {checkpoint_path, self.folder.checkpoints()[0]}:
            shutil.copytree(path, self.target / CHECKPOINTS / path.name)
        for name, size in ((TAPE, state.lines.tape_bytes), (EVALS, state.lines.evals_bytes)):
            _copy_start(self.folder.path / name, self.target / name, whole_lines(self.folder.path / name, size))
        (self.target / FOLDER).mkdir()
        mark = state.journal
        for base, path in segments(self.folder.path / FOLDER):
            if base < mark.position:
                _copy_start(path, self.target / FOLDER / path.name, mark.position - base)
        for path in (self.folder.path / FOLDER).glob("[0-9]" * 12 + ".safetensors"):
            if int(path.stem) <= mark.number:
                _link(path, self.target / FOLDER / path.name)
        (self.target / FOLDER / "acknowledged").write_text(f"{mark.number:020d}\n")

    def _make_again(self, run: JournaledRun, checkpoint_path: Path) -> int:
        assert run.folder is not None
        run.folder.take()
        state, tensors = checkpoint.load(checkpoint_path, ServedState)
        checkpoints.load(run, state, tensors)
        run.folder.start_writing(state.lines, accept_shorter=True)
        run.take_up_evaluations(state.evaluations_due, evaluations_after(self.folder.path, state.lines.evals_bytes))
        run.start_evaluations()
        run.open_journal(Journal(self.target, state.journal, may_begin_at_mark=True))
        try:
            for event, mark_after in read_events(self.folder.path / FOLDER, state.journal):
                if self._is_reached(run) and not self.without:
                    break
                if not self._record(run, event, mark_after.number):
                    break
        except JournalDamaged:
            if self.to is not None and run.synchronizer.arrivals < self.to:
                raise
        self._check_reached(run)
        for worker in list(run.synchronizer.rounds_under_way):
            run.abandon(worker, "rolled-back", "the run returned to an earlier point", run.time_s)
        for machine in sorted(self.without):
            run.note(Part(time_s=run.time_s, machine=machine, kind="evicted", text="its contributions were left out"))
        run.finish_evaluations()
        checkpoints.save(run)
        run.folder.note_end("stopped", f"it was returned to arrival {run.synchronizer.arrivals}")
        return run.synchronizer.arrivals

    def _is_reached(self, run: JournaledRun) -> bool:
        return self.to is not None and run.synchronizer.arrivals >= self.to

    def _check_reached(self, run: JournaledRun) -> None:
        if self.to is not None and run.synchronizer.arrivals < self.to and not self.without:
            arrivals = run.synchronizer.arrivals
            raise UserError(
                f"The run stands at arrival {arrivals} only: give a smaller --to, or leave it out for the last whole one."
            )

    def _record(self, run: JournaledRun, event: Event, number: int) -> bool:
        """Writes an event of the old journal to the new one and follows it. False if its contribution is missing."""
        if isinstance(event, Dispatch):
            run.dispatch(event.worker, event.machine, event.steps, event.start_digest, event.time_s)
        elif isinstance(event, Abandon):
            run.abandon(event.worker, event.kind, event.text, event.time_s)
        elif isinstance(event, Evaluate):
            if self.to is None or event.arrival <= self.to:  # later the parameters are others
                run.note(event)
        elif not isinstance(event, Receive):
            run.note(event)
        elif event.machine in self.without and self._is_reached(run):
            self._left_out += 1
            run.abandon(event.worker, "rolled-back", "its contributions were left out", event.time_s)
        else:
            return self._receive(run, event, number)
        return True

    def _receive(self, run: JournaledRun, event: Receive, number: int) -> bool:
        source = contribution_path(self.folder.path / FOLDER, number)
        if not source.is_file():
            if self.to is None:
                return False
            raise UserError(f"{source}, an acknowledged contribution, is missing: the run can only return to before it.")
        upload = self.target / "contribution.partial"
        _link(source, upload)
        run.journal.take_in(upload)
        terms = run.synchronizer.rounds_under_way[event.worker]
        event_now = structs.replace(event, round=terms.index, version=terms.version)
        run.follow(event_now, run.journal.append(event_now))
        return True

    def _exchange(self) -> Path:
        """Moves the old folder aside and puts the new one in its place."""
        number = 1
        while (old_folder := self.folder.path.with_name(f"{self.folder.path.name}.before-rollback-{number}")).exists():
            number += 1
        self.folder.path.rename(old_folder)
        self.target.rename(self.folder.path)
        return old_folder


def _copy_start(source: Path, target: Path, size: int) -> None:
    """Copies the first `size` bytes of a file."""
    with source.open("rb") as source_file, target.open("wb") as target_file:
        while size > 0 and (piece := source_file.read(min(size, 1 << 20))):
            target_file.write(piece)
            size -= len(piece)


def _link(source: Path, target: Path) -> None:
    """A hard link to a file, or a copy if the file system has no links."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
