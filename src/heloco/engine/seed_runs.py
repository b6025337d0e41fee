"""Runs that differ in the seed alone: as one stack of models where their settings allow that, else one after the other.

Each has a folder of its own, and is there what it would be alone: it can be resumed, reported and compared by itself.
"""

import sys
from collections.abc import Sequence

import torch

from heloco.engine.fleet import Fleet, PlannedRun
from heloco.engine.fleet import carry_out as carry_out_fleet
from heloco.engine.local import STOPPED_TEXT, Collector, LocalRun, StopRequested, describe_failure
from heloco.engine.trainer import Execution
from heloco.errors import RunStopped, UserError
from heloco.inner.seeding import seeded
from heloco.records.events import EndKind
from heloco.seeds import derive


class SeedRuns:
    """Carries out runs that have folders. `ends` says how those ended that did: empty for the last arrival, else why not."""

    def __init__(self, planned_runs: Sequence[PlannedRun], execution: Execution, device: torch.device) -> None:
        self.planned_runs, self.execution, self.device = list(planned_runs), execution, device
        self.ends: dict[str, str] = {}
        self._is_stopping = False
        self._current: LocalRun | None = None
        """The run that is computed alone."""

    def request_stop(self) -> None:
        """Makes `run` save what there is and raise `StopRequested`. A signal handler may call it."""
        self._is_stopping = True
        if self._current is not None:
            self._current.stop_requested = True

    def run(self) -> None:
        """Carries out all runs. One that diverges does not end the others."""
        try:
            self._run_all()
        except BaseException as error:
            is_stop = isinstance(error, StopRequested | KeyboardInterrupt)
            self._note_end(*(("stopped", STOPPED_TEXT) if is_stop else ("failed", describe_failure(error))))
            raise

    def _note_end(self, kind: EndKind, text: str) -> None:
        """Notes in the folders of the runs that have not ended how they ended."""
        for planned_run in self.planned_runs:
            if planned_run.key not in self.ends and planned_run.folder is not None:
                planned_run.folder.note_end(kind, text)

    def _run_all(self) -> None:
        begun: dict[str, LocalRun] = {}
        if self.execution == "stacked" and len(self.planned_runs) > 1:
            begun = self._run_together()
        for planned_run in self.planned_runs:
            if planned_run.key not in self.ends:
                self._run_alone(planned_run, begun.pop(planned_run.key, None))

    def _run_together(self) -> dict[str, LocalRun]:
        """Computes the rounds of all runs as one stack. Returns the runs that go on alone, if the stack failed."""
        first_seed = self.planned_runs[0].config.run.seed
        fleet = Fleet(self.planned_runs, self, self.device, lambda: self._is_stopping)
        try:
            with seeded(derive(first_seed, "seeds"), self.device):
                carry_out_fleet(fleet)
        except (UserError, StopRequested):
            raise
        except Exception as error:  # whatever the model or torch raises: each run has its own way to go on without a stack
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            print(
                f"heloco: the seeds cannot be computed together ({reason:.160}): they go on one after the other.", file=sys.stderr
            )
        return {member.planned_run.key: member.run for member in fleet.running if member.run is not None}

    def _run_alone(self, planned_run: PlannedRun, begun: LocalRun | None) -> None:
        run = begun or LocalRun(
            planned_run.task, planned_run.config, folder=planned_run.folder, observers=list(planned_run.observers)
        )
        self._current, run.stop_requested = run, self._is_stopping
        try:
            run.run()
            self.ends[planned_run.key] = ""
        except RunStopped as stopped:
            self.ends[planned_run.key] = str(stopped)
        finally:
            self._current = None

    # ---- as the fleet's watcher

    def on_progress(self, steps_done: int, steps_total: int) -> None:
        """Nothing: what shows the runs gets their records."""

    def on_finish(self, key: str, collector: Collector) -> None:  # noqa: ARG002
        """Notes that a run reached its last arrival."""
        self.ends[key] = ""

    def on_divergence(self, key: str, reason: str, collector: Collector) -> None:  # noqa: ARG002
        """Notes why a run did not reach its last arrival."""
        self.ends[key] = reason
        for planned_run in self.planned_runs:
            if planned_run.key == key and planned_run.folder is not None:
                planned_run.folder.note_end("failed", reason.removesuffix("."))
