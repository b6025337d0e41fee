"""What `heloco join` shows of its machine: a panel that changes, or a line now and then if the output is not a terminal."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from heloco.cluster.client.activity import MachineActivity, Transfer
from heloco.cluster.protocol.messages import WaitKind
from heloco.report.wording import number

LINE_EVERY_S = 30.0
"""Seconds between two lines about rounds, if the output is not a terminal."""
WAIT_SHOWN_AFTER_S = 5.0
"""A shorter wait for a round is not worth a line."""
DOING = {
    "joining": "joins", "waiting": "waits for a round", "receiving": "receives the round's start", "training": "trains",
    "sending": "sends its contribution", "evaluating": "evaluates the run's model",
}  # fmt: skip


class JoinView:
    """Shows the activity of one machine while `display` lasts."""

    def __init__(self, name: str, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._console, self._clock = name, console or Console(), clock
        self._activity: Callable[[], MachineActivity] | None = None
        self._line_s = self._wait_s = -math.inf
        """When the last line about a round was printed, and since when it waits."""
        self._wait_kind: WaitKind | None = None
        self._is_wait_told = False

    @contextlib.contextmanager
    def display(self, activity: Callable[[], MachineActivity]) -> Iterator[None]:
        """Shows what `activity` returns, several times a second on a terminal."""
        self._activity = activity
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, refresh_per_second=4, get_renderable=self.panel):
            yield

    def panel(self) -> RenderableType:
        """The machine's state, for a terminal."""
        assert self._activity is not None
        now = self._activity()
        facts = Text(" · ".join(f"{name} {value}" for name, value in figures(now)))  # wraps where the terminal is narrow
        parts: list[RenderableType] = [self._progress(now), facts]
        if now.is_suspended or now.waits_for:
            reason = f"waits: {now.waits_for}" if now.waits_for else "the run is suspended: this machine keeps its round"
            parts.append(Text(reason, "yellow"))
        return Panel(Group(*parts), title=Text(f"{self._name}, {DOING[now.doing]}"), title_align="left")

    def _progress(self, now: MachineActivity) -> RenderableType:
        row = Table.grid(padding=(0, 1), expand=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        is_training = now.doing == "training"
        where = f"round {now.round} of worker {now.worker}" if now.worker is not None else "no round yet"
        steps = f", step {now.steps} of {now.inner_steps}" if is_training else ""
        row.add_row(ProgressBar(max(1, now.inner_steps), now.steps if is_training else 0), f"{where}{steps}")
        return row

    def note_round(self) -> None:
        """A round was handed in."""
        self._wait_kind, self._is_wait_told = None, False
        if self._activity is None or self._console.is_terminal or self._clock() < self._line_s + LINE_EVERY_S:
            return
        self._line_s = self._clock()
        now = self._activity()
        facts = ", ".join(f"{name} {value}" for name, value in figures(now))
        print(f"Round {now.round} of worker {now.worker} is in: {facts}.", flush=True)

    def note_request(self) -> None:
        """The machine is about to ask for a round. If it has waited for some time, a line says why."""
        if self._activity is None or self._console.is_terminal:
            return
        now = self._activity()
        if now.wait_kind is None:
            return
        if now.wait_kind != self._wait_kind:
            self._wait_kind, self._wait_s, self._is_wait_told = now.wait_kind, self._clock(), False
        elif not self._is_wait_told and self._clock() >= self._wait_s + WAIT_SHOWN_AFTER_S:
            self._is_wait_told = True
            print(f"Waits for a round: {now.waits_for}.", flush=True)


def figures(now: MachineActivity) -> list[tuple[str, str]]:
    """What is shown of a machine: names and values."""
    refused = f" ({now.rounds - now.accepted} refused)" if now.rounds > now.accepted else ""
    return [
        ("loss", number(now.loss)),
        ("step", "–" if now.pace_s is None else f"{now.pace_s:.3g} s"),
        ("rounds", f"{now.rounds}{refused}"),
        ("share", "–" if now.share is None else f"{now.share:.0%}"),
        ("sent", rate(now.upload)),
        ("received", rate(now.download)),
        ("run", f"{now.arrivals}/{now.planned_arrivals} arrivals"),
    ]


def rate(transfer: Transfer | None) -> str:
    """A transfer's size and speed."""
    return "–" if transfer is None else f"{transfer.bytes / 1e6:.3g} MB at {transfer.bytes_per_s / 1e6:.3g} MB/s"
