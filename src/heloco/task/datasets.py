"""A task made of the user's own parts: a model, a loss, and one dataset per shard."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate

from heloco.corpus.sharding import EpochOrder
from heloco.dtypes import CAN_BE_TRAINED, TRAINABLE
from heloco.errors import UserError
from heloco.task.base import Positions, Scores, ShardInfo, batch_size, to_device


class DatasetTask:
    """A task from a model, a loss and datasets of your own, for `heloco.simulate` and `heloco.register_task`.

    `shards` maps the name of each shard to its data: anything with `len()` and `[i]`, such as a list, a torch `Dataset` or a
    Hugging Face dataset in the format "torch". What can only be iterated over, give as `list(data)`. `loss(model, batch)` returns
    a scalar tensor; its batches are made by `collate` from a list of samples. `validation` maps names to datasets, and each is
    reported under its name. If the mean loss is not what you want to see, give `evaluate(model)`, which returns
    {name: {"loss": …}}.

    `seed` decides the order of the samples. `digest` identifies the data: machines that join and runs that are resumed are
    refused if theirs is another. Without it, only names and sizes of the shards are compared.

        model = torch.nn.Linear(3, 1)
        data = [(x, x.sum(0, keepdim=True)) for x in torch.randn(64, 3)]
        loss = lambda model, batch: (model(batch[0]) - batch[1]).square().mean()
        task = heloco.DatasetTask(model, loss, {"left": data[:32], "right": data[32:]}, validation={"all": data[::4]})
        result = heloco.simulate(task, paces=[1, 3], arrivals=10)
    """

    unit = "samples"

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[nn.Module, Any], Tensor],
        shards: Mapping[str, Any],
        *,
        validation: Mapping[str, Any] | None = None,
        evaluate: Callable[[nn.Module], Scores] | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
        eval_batch_size: int = 64,
        seed: int = 0,
        digest: str = "",
    ) -> None:
        for argument, datasets in (("shards", shards), ("validation", {} if validation is None else validation)):
            _check_datasets(argument, datasets, is_collated=collate is default_collate)
        if not shards:
            raise UserError("shards is empty: give at least one shard of training data.")
        for name, parameter in model.named_parameters():
            if parameter.dtype not in TRAINABLE:
                raise UserError(f"The parameter {name!r} is {parameter.dtype}: {CAN_BE_TRAINED} Make it a buffer, or convert it.")
        self.shards: Sequence[ShardInfo] = tuple(ShardInfo(name, len(data)) for name, data in shards.items())
        self.digest = digest or ",".join(f"{s.name}:{s.windows}" for s in self.shards)
        self._model = copy.deepcopy(model)
        self._loss = loss
        self._data = list(shards.values())
        self._orders = [EpochOrder(shard.windows, seed, i) for i, shard in enumerate(self.shards)]
        self._collate = collate
        self._validation = validation or {}
        self._evaluate = evaluate
        self._eval_batch_size = eval_batch_size

    def build_model(self) -> nn.Module:
        """A copy of the model as it was given, with its initial parameters."""
        return copy.deepcopy(self._model)

    def batch(self, shard: int, positions: Positions) -> Any:
        """The samples at these positions of a shard, collated. Each epoch has its own order, derived from the seed."""
        return self._collate([self._data[shard][int(i)] for i in self._orders[shard].locate(positions)])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The user's loss of a batch."""
        return self._loss(model, batch)

    def units(self, batch: Any) -> int:
        """The number of samples in a batch: the length of its first tensor."""
        return batch_size(batch)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> Scores:
        """What the user's `evaluate` returns, or the mean loss on each validation dataset. The model is in eval mode."""
        training = model.training
        model.eval()
        if self._evaluate is not None:
            scores = self._evaluate(model)
        else:
            scores = {name: {"loss": self._mean_loss(model, data)} for name, data in self._validation.items()}
        model.train(training)
        return scores

    def _mean_loss(self, model: nn.Module, data: Any) -> float:
        device = next(model.parameters()).device
        total = 0.0
        for start in range(0, len(data), self._eval_batch_size):
            samples = [data[i] for i in range(start, min(len(data), start + self._eval_batch_size))]
            total += float(self._loss(model, to_device(self._collate(samples), device))) * len(samples)
        return total / len(data)


def _check_datasets(argument: str, datasets: Any, *, is_collated: bool) -> None:
    """Raises UserError for what is no mapping of names to datasets. `is_collated`: torch's default_collate makes the batches."""
    if not isinstance(datasets, Mapping):
        raise UserError(
            f"{argument} is of the type {type(datasets).__name__}: give a dict with a name for each dataset, such as "
            f'{argument}={{"a": data_a, "b": data_b}}.'
        )
    for name, data in datasets.items():
        where = f"{argument}[{name!r}]"
        _check_dataset(where, data)
        if not len(data):
            raise UserError(f"{where} is empty: give it data or leave it out.")
        try:
            sample = data[0]
        except Exception as error:  # whatever the user's class or library raises
            raise UserError(
                f"{where}[0] cannot be read ({type(error).__name__}: {error}): give a dataset whose samples are data[0] to "
                "data[len(data) - 1]."
            ) from error
        if is_collated and hasattr(data, "with_format") and _has_lists(sample):
            raise UserError(
                f"{where} is a Hugging Face dataset whose numbers come as lists, of which no tensor is made: give "
                'data.with_format("torch"), or a collate function.'
            )


def _check_dataset(where: str, data: Any) -> None:
    kind = type(data).__name__
    if isinstance(data, DataLoader):
        raise UserError(f"{where} is a DataLoader: give its dataset. Batches are made of batch_size samples, by collate.")
    if isinstance(data, Mapping):
        raise UserError(f"{where} is of the type {kind}: give a dataset, such as the list of its samples.")
    is_numbered = hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)
    if not is_numbered:
        can_be_listed = isinstance(data, Iterable)
        remedy = ", such as list(data) if it ends and fits into memory" if can_be_listed else ""
        raise UserError(
            f"{where} is of the type {kind}, and rounds read samples by their numbers: give something with len() and [i]{remedy}."
        )


def _has_lists(sample: Any) -> bool:
    return isinstance(sample, Mapping) and any(isinstance(value, list) for value in sample.values())
