"""What is trained, as the rest of the package sees it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from heloco.errors import UserError
from heloco.registry import Registry

Positions = npt.NDArray[np.int64]
Scores = dict[str, dict[str, float]]
"""What was evaluated (a language, a domain) -> measure -> value. Every task has the measure `loss`."""


@dataclass(frozen=True)
class ShardInfo:
    """A part of the training data that goes to one worker at a time, in windows: what one sample of a batch is."""

    name: str
    windows: int


class Task(Protocol):
    """A model, its data in shards, its loss and its evaluation. Knows nothing of workers, outer rules or time."""

    @property
    def shards(self) -> Sequence[ShardInfo]:
        """The parts of the training data, in a fixed order: `batch` gets their numbers."""

    @property
    def unit(self) -> str:
        """What a batch is counted in: tokens, images, …"""

    @property
    def digest(self) -> str:
        """Identifies the data; a run refuses to be resumed with another."""

    def build_model(self) -> nn.Module:
        """A new model with the initial parameters, the same each time."""

    def batch(self, shard: int, positions: Positions) -> Any:
        """The samples at these positions of the shard's endless stream, on the host."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Mean loss of a batch that is on the model's device."""

    def units(self, batch: Any) -> int:
        """How many units a batch has, see `unit`."""

    def evaluate(self, model: nn.Module) -> Scores:
        """Scores of a model on validation data, each with the measure `loss`. Leaves the model as it was."""


BUILT_IN_TASKS = ("language", "images", "external")


def _prepare(name: str, item: Any) -> Callable[[Any], Task]:
    if not callable(item):
        raise UserError(f"The task {name!r} is {item!r}: give a function of the run's config that returns a task.")
    return item  # type: ignore[no-any-return]


TASKS: Registry[Callable[[Any], Task]] = Registry("task", "heloco.tasks", _prepare, {}, reserved=BUILT_IN_TASKS)
"""Tasks that are not of this package."""


def register_task(name: str, build: Callable[[Any], Task]) -> None:
    """Adds a task of your own to this process: a function of the run's config that returns a `heloco.Task`.

        def build(config):
            return heloco.DatasetTask(model, loss, shards={"a": data_a, "b": data_b}, seed=config.run.seed)

        heloco.register_task("mine", build)
        heloco.simulate("mine", paces=[1, 4])

    The config has the run's settings by section: `config.run.seed`, `config.input.data` (what `--data` says), and so on. The same
    config must give the same task in every process. Installed packages: entry point group `heloco.tasks`. See docs/extend.md.
    """
    TASKS.register(name, build)


def check_scores(scores: Any) -> Scores:
    """The scores of a user's own task as strings and numbers that every file of the run can hold. Raises UserError if they are
    none, or if one source has other measures than another."""
    try:
        checked = {source: {name: float(value) for name, value in measures.items()} for source, measures in scores.items()}
        for name in (*checked, *(name for measures in checked.values() for name in measures)):
            name.encode()
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        example = '{"validation": {"loss": 1.5}}'
        raise UserError(
            f"The task's evaluation gave {scores!r:.200}: give a dict with a dict of numbers for each source, such as {example}."
        ) from error
    if len({frozenset(measures) for measures in checked.values()}) > 1:
        raise UserError(f"The task's evaluation gave {scores!r:.200}: each source must have the same measures.")
    return checked


def mean_scores(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The plain mean over what was evaluated, measure by measure."""
    measures = next(iter(scores.values()), {})
    return {measure: sum(score[measure] for score in scores.values()) / len(scores) for measure in measures}


def to_device(batch: Any, device: Any) -> Any:
    """A batch moved: a tensor, or tuples (named or not), lists and dicts of them."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [to_device(value, device) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def batch_size(batch: Any) -> int:
    """The number of samples in a batch: the length of its first tensor that has one; 0 if there is none."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 0
    if isinstance(batch, Mapping | tuple | list):
        parts = batch.values() if isinstance(batch, Mapping) else batch
        return next((size for size in map(batch_size, parts) if size), 0)
    return 0
