"""A run's numbers where people already look: TensorBoard, Weights & Biases, Trackio, MLflow.

A mirror looks on like any observer and passes on what the tape says, with the arrival as the step. The tape stays the record; a
mirror can be added when a run is resumed.
"""

import importlib.util
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from heloco.errors import UserError, nearest
from heloco.records.evaluations import EvaluationRecord
from heloco.records.machine_ids import name_of
from heloco.records.run_files import SEED_FOLDER
from heloco.records.tape import CASES, ArrivalRecord

Numbers = dict[str, float]
PROJECT = "heloco"
"""The project, or experiment, that the tools file runs under."""
PARAMS_AT_ONCE, PARAM_LENGTH = 100, 500
"""MLflow's limits."""
NOT_IN_NAMES = re.compile(r"[^\w ./:-]", re.ASCII)
"""What MLflow does not take in the name of a number."""


class Mirror(Protocol):
    """A tool for tracking experiments that gets the numbers of a run."""

    def log(self, numbers: Numbers, step: int) -> None: ...
    def close(self) -> None: ...


def run_name(folder: Path) -> str:
    """What a run is called: by its folder, and by the folder around it if that tells the runs of several seeds apart."""
    path = folder.resolve()
    return f"{path.parent.name}/{path.name}" if path.name.startswith(f"{SEED_FOLDER}-") else path.name


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
        if not record.is_of_run:
            machine = f"machine {name_of(record.machine)}"
            self._log({f"{machine}/own validation {name}": value for name, value in record.mean.items()}, record.arrival)
            return
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
            project=PROJECT, name=run_name(folder), dir=str(folder), config=dict(config), reinit="create_new", settings=quiet
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
        trackio.init(project=PROJECT, name=run_name(folder), config=config, resume="allow", embed=False)

    def log(self, numbers: Numbers, step: int) -> None:
        self._trackio.log(numbers, step=step)

    def close(self) -> None:
        self._trackio.finish()


class MLflow:
    """MLflow's tracking, where its own settings say, such as MLFLOW_TRACKING_URI: a server, or a database in this folder."""

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric, self._client = Metric, MlflowClient()
        experiment = self._client.get_experiment_by_name(PROJECT)
        experiment_id = self._client.create_experiment(PROJECT) if experiment is None else experiment.experiment_id
        self._run_id = self._client.create_run(experiment_id, run_name=run_name(folder)).info.run_id
        settings = [Param(name, text[:PARAM_LENGTH]) for name, text in _flat(config).items()]
        for first in range(0, len(settings), PARAMS_AT_ONCE):
            self._client.log_batch(self._run_id, params=settings[first : first + PARAMS_AT_ONCE])
        self._last_batch: Any = None

    def log(self, numbers: Numbers, step: int) -> None:
        """Hands the numbers to MLflow's own thread, so that the run does not wait for a server."""
        now_ms = int(1000 * time.time())
        metrics = [self._metric(NOT_IN_NAMES.sub("_", name), value, now_ms, step) for name, value in numbers.items()]
        self._last_batch = self._client.log_batch(self._run_id, metrics=metrics, synchronous=False)

    def close(self) -> None:
        try:
            if self._last_batch is not None:
                self._last_batch.wait()
            self._client.set_terminated(self._run_id)
        except Exception as error:  # whatever MLflow raises: the run itself has ended well
            print(f"heloco: MLflow did not get all numbers ({error}). The run's tape has them.", file=sys.stderr)


def _flat(config: Mapping[str, object]) -> dict[str, str]:
    """The settings by section and name, such as "outer.method", as text."""
    sections = {section: entries for section, entries in config.items() if isinstance(entries, Mapping)}
    return {f"{section}.{name}": str(value) for section, entries in sections.items() for name, value in entries.items()}


MIRRORS: dict[str, Callable[[Path, Mapping[str, object]], Mirror]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "trackio": Trackio,
    "mlflow": MLflow,
}
ONE_AT_A_TIME = ("trackio",)
"""The mirrors of which a process can have a single one."""


def check_mirrors(names: Sequence[str]) -> None:
    """Refuses mirrors that are not known or not installed, before anything is begun."""
    for name in names:
        if name not in MIRRORS:
            raise UserError(f"There is no log {name!r}; {nearest(name, list(MIRRORS))}")
        if importlib.util.find_spec(name) is None:
            raise UserError(f"--log {name} needs {name}, which is not installed: pip install {name}")


def check_several(names: Sequence[str]) -> None:
    """Refuses mirrors of which a process that carries out several runs would need more than it can have."""
    for name in names:
        if name in ONE_AT_A_TIME:
            raise UserError(f"--log {name} follows one run at a time: leave it out, or train with one seed after the other.")


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
