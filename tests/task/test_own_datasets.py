"""What people have their data in, given to `heloco.DatasetTask`: it is trained on, or a sentence says what to give."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import heloco

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
PAIRS = [(x, x.sum(0, keepdim=True)) for x in X]
ROWS = [{"x": x.tolist(), "y": [float(x.sum())]} for x in X]


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield PAIRS[0]


class KnowsItsLength(Endless):
    def __len__(self) -> int:
        return 5


def loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
    return F.mse_loss(model(x), y)


def task_of(data: Any, **options: Any) -> heloco.DatasetTask:
    torch.manual_seed(0)
    return heloco.DatasetTask(nn.Linear(3, 1), loss, {"mine": data}, **options)


def hugging_face(rows: list[dict[str, Any]]) -> Any:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    return datasets.Dataset.from_list(rows)


def losses(task: heloco.DatasetTask) -> list[float]:
    result = heloco.simulate(task, recipe="plain", paces=[1], arrivals=3, inner_steps=2, batch_size=4, lr=0.05)
    return [line.loss for line in result.tape]


def test_all_that_has_a_length_and_numbers_is_trained_on_alike():
    expected = losses(task_of(PAIRS))
    y = torch.stack([y for _, y in PAIRS])
    for data in (tuple(PAIRS), TensorDataset(X, y), Subset(TensorDataset(X, y), range(12)), list(iter(PAIRS))):
        assert losses(task_of(data)) == expected, type(data)
    arrays = np.concatenate([X.numpy(), y.numpy()], axis=1)

    def collate(rows: list[Any]) -> tuple[Tensor, Tensor]:
        table = torch.from_numpy(np.stack(rows))
        return table[:, :3], table[:, 3:]

    assert losses(task_of(arrays, collate=collate)) == expected
    assert losses(task_of(hugging_face(ROWS).with_format("torch"))) == pytest.approx(expected)
    assert losses(task_of(hugging_face(ROWS), collate=lambda rows: {k: torch.tensor([r[k] for r in rows]) for k in rows[0]})) == (
        pytest.approx(expected)
    )


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (DataLoader(PAIRS, batch_size=4), "shards['mine'] is a DataLoader: give its dataset. Batches are made of batch_size"),
        (
            Endless(),
            "shards['mine'] is of the type Endless, and rounds read samples by their numbers: give something with len() and [i]",
        ),
        (KnowsItsLength(), "such as list(data) if it ends and fits into memory."),
        (
            iter(PAIRS),
            "is of the type list_iterator, and rounds read samples by their numbers: give something with len() and [i], such as",
        ),
        ((pair for pair in PAIRS), "is of the type generator, and rounds read samples by their numbers"),
        (zip(X, X, strict=True), "is of the type zip, and rounds read"),
        ({"x": X}, "shards['mine'] is of the type dict: give a dataset, such as the list of its samples."),
        (7, "shards['mine'] is of the type int, and rounds read samples by their numbers: give something with len() and [i]."),
        ([], "shards['mine'] is empty: give it data or leave it out."),
    ],
)
def test_what_is_no_dataset_is_answered_with_what_to_give(data, says):
    with pytest.raises(heloco.UserError) as error:
        task_of(data)
    assert says in str(error.value)
    with pytest.raises(heloco.UserError) as error:
        task_of(PAIRS, validation={"mine": data})
    assert says.replace("shards", "validation") in str(error.value)


def test_a_hugging_face_dataset_of_lists_or_in_a_stream_is_answered_with_what_to_give():
    with pytest.raises(heloco.UserError, match=r'lists, of which no tensor is made: give data\.with_format\("torch"\), or a'):
        task_of(hugging_face(ROWS))
    with pytest.raises(heloco.UserError, match=r"is of the type IterableDataset, .* such as list\(data\) if it ends"):
        task_of(hugging_face(ROWS).to_iterable_dataset())


@pytest.mark.parametrize("shards", [PAIRS, TensorDataset(X), DataLoader(PAIRS), None])
def test_shards_without_names_are_answered_with_what_to_give(shards):
    with pytest.raises(
        heloco.UserError, match=r'^shards is of the type \w+: give a dict with a name for each dataset, such as shards={"a": '
    ):
        heloco.DatasetTask(nn.Linear(3, 1), loss, shards)
    with pytest.raises(heloco.UserError, match=r"^shards is empty: give at least one shard of training data\.$"):
        heloco.DatasetTask(nn.Linear(3, 1), loss, {})


def test_a_dataset_whose_first_sample_cannot_be_read_is_said_at_once():
    class Broken:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            raise FileNotFoundError("no such file: images/0.png")

    with pytest.raises(heloco.UserError, match=r"^shards\['mine'\]\[0\] cannot be read \(FileNotFoundError: no such file"):
        task_of(Broken())
