"""A run's numbers where people already look: TensorBoard, Weights & Biases, Trackio.

A mirror looks on like any observer and passes on what the tape says, with the arrival as the step. The tape stays the record; a
mirror can be added when a run is resumed.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from heloco.errors import UserError, nearest
from heloco.records.evaluations import EvaluationRecord
from heloco.records.tape import CASES, ArrivalRecord

Numbers = dict[str, float]


class Mirror(Protocol):
    """A tool for tracking experiments that gets the numbers of a run."""

    def log(self, numbers: Numbers, step: int) -> None: ...
    def close(self) -> None: ...


class Mirroring:
    """The observer: from the lines of tape and evaluations to named numbers."""

    def __init__(self, mirror: Mirror) -> None:
        self.mirror = mirror

    def on_arrival(self, record: ArrivalRecord) -> None:
        if record.verdict == "refused":
            return
        numbers: dict[str, float | None] = {
            f"worker {record.worker}/training loss": record.loss,
            f"worker {record.worker}/staleness": record.staleness,
            "arrival/staleness": record.staleness,
            "arrival/weight": record.weight,
            "arrival/virtual time in s": record.time_s,
            "arrival/outer step": record.outer_step,
        }
        cases = record.blocks.case if record.blocks else ""
        numbers |= {f"correction/{name}": cases.count(letter) / len(cases) for letter, name in CASES.items() if cases}
        self._log(numbers, record.arrival)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        numbers = {f"validation/{measure}": value for measure, value in record.mean.items()}
        for source, scores in record.scores.items():
            numbers |= {f"validation {measure}/{source}": value for measure, value in scores.items()}
        self._log({**numbers, "validation/virtual time in s": record.time_s}, record.arrival)

    def _log(self, numbers: dict[str, float | None], step: int) -> None:
        self.mirror.log({name: float(value) for name, value in numbers.items() if value is not None}, step)


class TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir RUN`."""

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:  # noqa: ARG002
        from tensorboard.summary import Writer

        self._writer = Writer(str(folder / "tensorboard"))

    def log(self, numbers: Numbers, step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases, in whatever mode its own settings say; files of its own in the run's folder."""

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        import wandb

        quiet = wandb.Settings(silent=True)
        self._run = wandb.init(
            project="heloco", name=folder.name, dir=str(folder), config=dict(config), reinit="create_new", settings=quiet
        )

    def log(self, numbers: Numbers, step: int) -> None:
        self._run.log({**numbers, "arrival": step})  # its own steps must not go back, and a resumed run's do

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """Trackio's database on this machine: `trackio show`."""

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        import trackio

        self._trackio: Any = trackio
        trackio.init(project="heloco", name=folder.name, config=config, resume="allow", embed=False)

    def log(self, numbers: Numbers, step: int) -> None:
        self._trackio.log(numbers, step=step)

    def close(self) -> None:
        self._trackio.finish()


MIRRORS: dict[str, Callable[[Path, Mapping[str, object]], Mirror]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
}


def check_mirrors(names: Sequence[str]) -> None:
    """Refuses mirrors that are not known or not installed, before anything is begun."""
    for name in names:
        if name not in MIRRORS:
            raise UserError(f"There is no log {name!r}; {nearest(name, list(MIRRORS))}")
        if importlib.util.find_spec(name) is None:
            raise UserError(f"--log {name} needs {name}, which is not installed: pip install {name}")


@contextmanager
def open_mirrors(names: Sequence[str], folder: Path, config: Mapping[str, object]) -> Iterator[list[Any]]:
    """Observers for these mirrors, closed at the end whatever happens."""
    check_mirrors(names)
    with ExitStack() as stack:
        observers = []
        for name in names:
            try:
                mirror = MIRRORS[name](folder, config)
            except Exception as error:  # whatever such a library raises: no account, no network, …
                raise UserError(
                    f"--log {name} cannot begin ({error}). `heloco resume {folder}` goes on with or without it."
                ) from error
            stack.callback(mirror.close)
            observers.append(Mirroring(mirror))
        yield observers
