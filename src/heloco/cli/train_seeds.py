"""`heloco train --seeds N`: runs that differ in the seed alone, and their mean."""

import argparse
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from heloco.cli.flags import fail
from heloco.errors import UserError

if TYPE_CHECKING:
    from heloco.engine.fleet import PlannedRun
    from heloco.engine.seed_runs import SeedRuns
    from heloco.engine.trainer import Execution
    from heloco.report.seeds_terminal import SeedsProgress
    from heloco.run import RunConfig


def seed_count(arguments: argparse.Namespace) -> int:
    """What --seeds says; 0 if it is not there. Raises UserError if it does not go with the other flags."""
    if arguments.seeds is None:
        return 0
    try:
        count = int(arguments.seeds)
    except ValueError:
        count = 0
    if count < 1:
        raise UserError(f"--seeds cannot be {arguments.seeds!r}: give the number of seeds, such as 3.")
    if arguments.engine == "ray":
        raise UserError("--seeds is for simulations, and --engine ray has real workers: leave one of them out.")
    return count


@dataclass(frozen=True)
class Sweep:
    """The runs of all seeds, before they begin."""

    folder: Path
    """The folder that the runs' folders are in."""
    planned_runs: "list[PlannedRun]"
    execution: "Execution"

    @property
    def pattern(self) -> str:
        """All folders of the runs, as a shell takes them."""
        return f"{shlex.quote(str(self.folder))}/*"

    @property
    def paths(self) -> list[Path]:
        """The folder of each run."""
        return [each.folder.path for each in self.planned_runs if each.folder is not None]


def train_seeds(config: "RunConfig", seeds: int, out: Path | None, logs: list[str]) -> int:
    """Trains with the config's seed and those after it. Each run gets a folder under `out`."""
    from rich.console import Console

    from heloco.engine.build import pick_device
    from heloco.engine.local import StopRequested
    from heloco.engine.seed_runs import SeedRuns
    from heloco.report.mirrors import check_several
    from heloco.report.seeds_terminal import SeedsProgress

    check_several(logs)
    with ExitStack() as stack:
        sweep = prepare_sweep(config, seeds, out, stack)
        unit = sweep.planned_runs[0].task.unit
        numbers = [each.config.run.seed for each in sweep.planned_runs]
        display = SeedsProgress(numbers, config.run.arrivals, unit, Console())
        observed_runs = [observe(each, display, logs, stack) for each in sweep.planned_runs]
        runs = SeedRuns(observed_runs, sweep.execution, pick_device(config.run.device))
        try:
            with stops_on_signals(runs) as signals, display:
                runs.run()
        except StopRequested:
            arrivals = ", ".join(f"seed {seed} at arrival {each.arrivals}" for seed, each in display.observers.items())
            print(f"Stopped and checkpointed: {arrivals} of {config.run.arrivals}. `heloco resume {sweep.pattern}` goes on.")
            return 128 + signals[0]
    return show_outcome(sweep, runs)


def prepare_sweep(config: "RunConfig", seeds: int, out: Path | None, stack: ExitStack) -> Sweep:
    """Builds the task of each seed and makes the folders, which are closed with `stack`."""
    from heloco.cli.main import show_preparation
    from heloco.engine.build import build_task
    from heloco.engine.fleet import PlannedRun
    from heloco.engine.local import LocalRun, describe
    from heloco.records.run_files import seed_folder
    from heloco.run import RunFolder, make_next

    configs = [replace(config, run=replace(config.run, seed=config.run.seed + i)) for i in range(seeds)]
    with show_preparation() as progress:
        tasks = [build_task(each, progress) for each in configs]
    first = LocalRun(*tasks[0])
    execution = first.execution  # a refusal comes before a folder is claimed
    parent = out or make_next(Path("runs"), config.outer.method)
    planned_runs = []
    for task, effective in tasks:
        path = parent / seed_folder(effective.run.seed)
        folder = RunFolder.create(path, effective, describe(task, effective, first.model, execution=execution))
        stack.callback(folder.close)
        folder.start_writing()
        planned_runs.append(PlannedRun(path.name, task, effective, folder))
    return Sweep(parent, planned_runs, execution)


def observe(planned_run: "PlannedRun", display: "SeedsProgress", logs: Sequence[str], stack: ExitStack) -> "PlannedRun":
    """The run with what looks on at it. Logs are closed with `stack`."""
    from heloco.report.mirrors import open_mirrors
    from heloco.run.config import by_section

    assert planned_run.folder is not None
    mirrors = stack.enter_context(open_mirrors(logs, planned_run.folder.path, by_section(planned_run.config)))
    return replace(planned_run, observers=[*mirrors, display.observers[planned_run.config.run.seed]])


@contextmanager
def stops_on_signals(runs: "SeedRuns") -> Iterator[list[int]]:
    """Inside, SIGINT and SIGTERM ask the runs to stop. It gives a list that the signals' numbers are added to."""
    signals: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        signals.append(number)
        runs.request_stop()

    old_handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)


def show_outcome(sweep: Sweep, runs: "SeedRuns") -> int:
    """Prints the mean over the seeds, and what to do next. Returns the exit code: 2 if a run did not reach its end."""
    from heloco.report.run_reader import read_runs
    from heloco.report.seeds_terminal import seeds_table
    from heloco.report.table_text import in_terminal, wide_console

    wide_console().print(in_terminal(seeds_table(read_runs(sweep.paths))))
    print(f"To compare them: heloco compare {sweep.pattern}")
    print(f"To look at them: heloco report {sweep.pattern}")
    print(f"The runs' folders are in {sweep.folder}")
    diverged_runs = {key: reason for key, reason in runs.ends.items() if reason}
    for key, reason in diverged_runs.items():
        fail(f"{key} ended early: {reason}")
    return 2 if diverged_runs else 0
