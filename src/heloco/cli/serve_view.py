"""The display of `heloco serve` and `heloco status`: the run, and the machines that take part.

It reads only new lines of the run's files, so neither its memory nor its start-up time grows with the run."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from heloco.cluster.protocol.messages import Ended, MachineStatus, Status
from heloco.records.config_facts import ConfigFacts, read_config
from heloco.records.evaluations import EvaluationRecord
from heloco.records.events import PauseKind
from heloco.records.lines import RecordT, Tail
from heloco.records.machine_ids import name_of
from heloco.records.run_facts import RunFacts, read_facts
from heloco.records.run_files import CONFIG, EVALS, META, TAPE
from heloco.records.tape import ArrivalRecord
from heloco.report.fitted_table import FittedTable
from heloco.report.run_state import LABELS
from heloco.report.summary import read_summary
from heloco.report.terminal import tables
from heloco.report.wording import duration, number

if TYPE_CHECKING:
    from heloco.cli.serve import Engine

LOOK_EVERY_S = 0.25
TAIL_BYTES = 1 << 18


def follow(engine: "Engine", folder: Path, is_stopping: Callable[[], bool]) -> Ended | None:
    """Shows the run until it has ended, and returns why. None if `is_stopping` becomes true first."""
    console = Console()
    view = RunView(folder, console)
    if not console.is_terminal:
        return _look_on(engine, view, is_stopping, view.tell)
    with Live(console=console, refresh_per_second=4) as live:
        end = _look_on(engine, view, is_stopping, lambda status: live.update(view.panel(status)))
    for table in final_tables(folder):
        console.print(table)
    return end


def _look_on(engine: "Engine", view: "RunView", is_stopping: Callable[[], bool], show: Callable[[Status], Any]) -> Ended | None:
    trouble: str | None = None
    while True:
        status = engine.status()
        try:
            view.refresh()
            show(status)
            trouble = None
        except Exception as error:  # no descriptor left, or a damaged line: the run continues, and the next look tries again
            if str(error) != trouble:
                trouble = str(error)
                print(f"What the run has written cannot be shown at the moment: {error}", flush=True)
        if status.ended is not None and (status.ended.kind != "finished" or not status.evaluations_due):
            return status.ended
        if status.ended is None and not status.machines and (reason := engine.trouble()) is not None:
            engine.stop(f"its local workers could not start: {reason}")
        if is_stopping():
            return None
        time.sleep(LOOK_EVERY_S)


def final_tables(folder: Path) -> Iterator[RenderableType]:
    """What a run shows that has ended, from its whole tape, read line by line."""
    if (folder / META).exists():
        yield from tables(read_summary(folder, read_facts(folder / META)))


class NewRecords(Generic[RecordT]):
    """The records that are added to a file from now on, and the last one."""

    def __init__(self, path: Path, kind: type[RecordT], *, all_are_new: bool) -> None:
        """`all_are_new`: those that are in the file already are new, too."""
        self._path, self._kind = path, kind
        self.last: RecordT | None = None
        self._tail = Tail(path, kind, last_bytes=TAIL_BYTES)
        if not all_are_new:
            self._skip()

    def _skip(self) -> None:
        for _ in self.more():
            pass

    def more(self) -> Iterator[RecordT]:
        if self._tail.was_cut():  # the run was resumed from a checkpoint
            self._tail = Tail(self._path, self._kind, last_bytes=TAIL_BYTES)
            self._skip()
        for record in self._tail.more():
            self.last = record
            yield record


class RunView:
    """The state of a run from its folder, and what is new in it."""

    def __init__(self, folder: Path, console: Console) -> None:
        self.folder, self.console = folder, console
        self.facts: RunFacts | None = None
        self._config: ConfigFacts | None = None
        self._tape: NewRecords[ArrivalRecord] | None = None
        self._evals: NewRecords[EvaluationRecord] | None = None
        self._last_eval: EvaluationRecord | None = None
        """The last evaluation of the run's model, and not of a machine's own."""
        self._new_sentences: list[tuple[int, str]] = []
        """(arrival, a sentence about it)"""
        self._losses: list[float] = []
        self._machines: dict[str, str] = {}
        self._pause_kind: PauseKind | None = None
        self._saw_it_begin = False
        """Whether there was no run yet when somebody looked first."""

    def refresh(self) -> None:
        if self.facts is None or self._config is None or self._tape is None or self._evals is None:
            if not ((self.folder / CONFIG).exists() and (self.folder / META).exists()):
                self._saw_it_begin = True
                return
            self.facts, self._config = read_facts(self.folder / META), read_config(self.folder / CONFIG)
            self._evals = NewRecords(self.folder / EVALS, EvaluationRecord, all_are_new=self._saw_it_begin)
            self._tape = NewRecords(self.folder / TAPE, ArrivalRecord, all_are_new=self._saw_it_begin)
            if self._evals.last is not None:
                self._note_evaluation(self._evals.last, self.facts.unit)
            if not self._saw_it_begin:
                return
        for arrival in self._tape.more():
            if arrival.loss is not None:
                self._losses = [*self._losses[-99:], arrival.loss]
            if self.facts.is_external and arrival.verdict != "refused":
                self._new_sentences += self._training_sentence(arrival, self._config)
        for evaluation in self._evals.more():
            self._note_evaluation(evaluation, self.facts.unit)

    def _note_evaluation(self, evaluation: EvaluationRecord, unit: str) -> None:
        self._new_sentences.append(_evaluation_sentence(evaluation, unit))
        if evaluation.is_of_run:
            self._last_eval = evaluation

    def _training_sentence(self, arrival: ArrivalRecord, config: ConfigFacts) -> list[tuple[int, str]]:
        """If nothing is evaluated: now and then, what the machines say of their losses."""
        interval = config.run.milestone_interval
        if arrival.arrival % interval and arrival.arrival != config.run.arrivals:
            return []
        recent = self._losses[-interval:]
        loss = f"mean training loss {sum(recent) / len(recent):.3f}" if recent else "training loss not reported"
        return [(arrival.arrival, f"real {duration(arrival.time_s)}  {loss}")]

    @property
    def loss(self) -> str:
        last = self._last_eval
        if self.facts and self.facts.is_external and last is None:
            recent = self._losses[-20:]
            return f"training loss [b]{number(sum(recent) / len(recent) if recent else None)}[/] (nothing is evaluated)"
        return f"validation loss [b]{number(last.mean.get('loss') if last else None)}[/]"

    def panel(self, status: Status) -> RenderableType:
        self._new_sentences.clear()
        left_s = remaining_s(status)
        times = f"{duration(status.time_s)} gone" + ("" if left_s is None else f", {duration(left_s)} left")
        bar = Table.grid(padding=(0, 1), expand=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            ProgressBar(status.arrival_goal, status.arrivals), f"{status.arrivals}/{status.arrival_goal} arrivals · {times}"
        )
        facts = Table.grid(padding=(0, 3))
        facts.add_row(f"outer step [b]{status.outer_step}[/]", self.loss)
        title = f"[b]{self.facts.method if self.facts else 'a run without a model yet'}[/]"
        return Group(Panel(Group(bar, facts), title=title, title_align="left"), machines_table(status))

    def tell(self, status: Status) -> None:
        """Prints lines, if the output is not a terminal: for machines that come and go, pauses and evaluations."""
        present = {m.machine: m.name for m in status.machines if not m.is_away}
        for machine, name in present.items():
            if machine not in self._machines:
                print(f"{name} is here ({count_machines(len(present))}).", flush=True)
        for machine, name in self._machines.items():
            if machine not in present:
                print(f"{name} is gone ({count_machines(len(present))}).", flush=True)
        self._machines = present
        pause_kind = status.paused.kind if status.paused else None
        if pause_kind != self._pause_kind:
            self._pause_kind = pause_kind
            print(f"The run pauses: {status.paused.text}." if status.paused else "The run goes on.", flush=True)
        for arrival, sentence in self._new_sentences:
            print(f"arrival {arrival:>6}/{status.arrival_goal}  {sentence}", flush=True)
        self._new_sentences.clear()


def _evaluation_sentence(evaluation: EvaluationRecord, unit: str) -> tuple[int, str]:
    loss = f"mean validation loss {number(evaluation.mean.get('loss'))}"
    if not evaluation.is_of_run:
        loss += f", of {name_of(evaluation.machine)}'s own model {evaluation.own_steps} inner steps later"
    return evaluation.arrival, f"real {duration(evaluation.time_s)}  {evaluation.units:,} {unit}  {loss}"


def count_machines(count: int) -> str:
    return "1 machine" if count == 1 else f"{count} machines"


def machines_table(status: Status) -> RenderableType:
    """A table of the present machines, with their rounds and recent contributions."""
    window = status.participation_window
    contributed = (
        f"{len(status.participants)} contributed to the last {window} arrivals" if window else "nobody has contributed yet"
    )
    workers = "1 worker" if status.seats == 1 else f"{status.seats} workers"
    title = Text(f"{count_machines(len(status.machines))} for {workers}, {contributed}{per_minute(status)}", "italic")
    pause_line = [Text(f"paused: {status.paused.text}", "yellow")] if status.paused else []
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("machine", "worker", "doing", "pace", "arrivals", "share", "stale", "per min", "heard of"):
        table.add_column(name, justify="left" if name in ("machine", "doing") else "right")
    names = [m.name for m in status.machines]
    for machine in status.machines:
        table.add_row(*map(Text, _machine_cells(machine, is_unique=names.count(machine.name) == 1)))
    caption = f"share, mean staleness and arrivals per minute: over the last {window} arrivals"
    parts: list[RenderableType] = [*pause_line, title]
    if status.machines:
        parts += [FittedTable(table), *([Text(caption, "dim")] if window else [])]
    return Group(*parts)


def _machine_cells(machine: MachineStatus, *, is_unique: bool) -> list[str]:
    current_round, seat = machine.round, machine.seat
    return [
        machine.name if is_unique else machine.machine,
        ("spare" if seat is None else str(seat))
        + (f", now {current_round.worker}" if current_round and current_round.worker != seat else ""),
        "not back yet" if machine.is_away else f"step {machine.steps}" if current_round else "waits",
        _figure(machine.pace_s, " s"),
        str(machine.arrivals),
        "–" if machine.share is None else f"{machine.share:.0%}",
        number(machine.staleness, 1),
        _figure(machine.per_minute),
        f"{machine.silent_s:.0f} s ago",
    ]


def _figure(value: float | None, unit: str = "") -> str:
    return "–" if value is None else f"{value:,.0f}{unit}" if value >= 1000 else f"{value:.3g}{unit}"


def per_minute(status: Status) -> str:
    return "" if status.per_minute is None else f" ({_figure(status.per_minute)} a minute)"


def status_lines(status: Status) -> list[str]:
    """A run's state in a few sentences."""
    paused = f"paused: {status.paused.text}" if status.paused else "going"
    state = f"{LABELS[status.ended.kind]}: {status.ended.text}" if status.ended else paused
    left = "" if (left_s := remaining_s(status)) is None else f", about {duration(left_s)} left"
    return [
        f"Run {status.run} ({status.folder}): {state}.",
        f"{status.arrivals} of {status.arrival_goal} arrivals{per_minute(status)}, outer step {status.outer_step}, "
        f"{duration(status.time_s)} gone{left}.",
    ]


def remaining_s(status: Status) -> float | None:
    """Seconds until the last arrival at the rate of the last ones; None if that is not known, or if the run does not go on."""
    if not status.per_minute or status.paused or status.ended:
        return None
    return (status.arrival_goal - status.arrivals) / status.per_minute * 60
