"""How far a run is, as a line: in a notebook's output, or in a terminal. `heloco.simulate` shows it."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from heloco.records.evaluations import EvaluationRecord
from heloco.records.tape import ArrivalRecord

REDRAW_S = 0.2
"""A notebook's output is replaced at most this often: each time is a message to the browser."""
Draw = Callable[[int, str], None]
"""(arrivals, text) -> None: shows them in the place of what was shown before."""


def is_notebook() -> bool:
    """Whether this process computes the cells of a notebook."""
    module = sys.modules.get("IPython")
    shell = module.get_ipython() if module is not None else None
    return getattr(shell, "kernel", None) is not None


@dataclass
class ProgressBar:
    """Looks on at a run and draws how far it is."""

    goal: int
    draw: Draw
    interval_s: float = REDRAW_S
    arrivals: int = 0
    loss: float | None = None
    began_s: float = field(default_factory=time.monotonic)
    drawn_s: float = -1.0

    def on_arrival(self, record: ArrivalRecord) -> None:
        """Draws the arrival, if the last drawing is old enough or the run has reached its end."""
        self.arrivals = record.arrival
        if self.arrivals == self.goal or time.monotonic() - self.drawn_s >= self.interval_s:
            self._draw()

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Draws the new loss."""
        self.loss = record.mean.get("loss")
        self._draw()

    def _draw(self) -> None:
        self.drawn_s = time.monotonic()
        elapsed_s = self.drawn_s - self.began_s
        parts = [f"{self.arrivals:,} of {self.goal:,} arrivals"]
        parts += [] if self.loss is None else [f"validation loss {self.loss:.4g}"]
        left_s = elapsed_s / self.arrivals * (self.goal - self.arrivals) if self.arrivals else 0.0
        parts.append(f"{in_minutes(elapsed_s)} gone" + (f", {in_minutes(left_s)} left" if left_s else ""))
        self.draw(self.arrivals, " · ".join(parts))


def in_minutes(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{round(seconds) // 60}:{round(seconds) % 60:02d}"


@contextmanager
def progress_bar(goal: int, *, is_shown: bool | None) -> Iterator[list[ProgressBar]]:
    """A context with the bar as an observer of the run, or with none. `is_shown` None: a bar in notebooks alone."""
    if is_shown is False or (is_shown is None and not is_notebook()):
        yield []
    elif is_notebook():
        yield [ProgressBar(goal, notebook_drawing(goal))]
    else:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = BarColumn(), TextColumn("{task.description}")
        with Progress(*columns, console=Console(stderr=True), transient=False) as bars:
            task = bars.add_task("", total=goal)
            yield [ProgressBar(goal, lambda arrivals, text: bars.update(task, completed=arrivals, description=text))]


def notebook_drawing(goal: int) -> Draw:
    """Draws into the output of the cell that runs now. It needs nothing but IPython, which a notebook has."""
    from IPython.display import HTML, display

    def picture(arrivals: int, text: str) -> object:
        return HTML(f'<progress value="{arrivals}" max="{goal}" style="width: 20em"></progress> {text}')

    handle = display(picture(0, ""), display_id=True)

    def draw(arrivals: int, text: str) -> None:
        if handle is not None:  # an output that cannot be replaced is left as it is
            handle.update(picture(arrivals, text))

    return draw
