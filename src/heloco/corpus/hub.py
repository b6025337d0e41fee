"""Text from the Hugging Face hub, streamed: `hf:DATASET`, each language a configuration of the dataset.

Only the rows that are kept are ever fetched, so five languages of a terabyte-sized dataset cost what was asked for.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from heloco.errors import UserError

from .libraries import library
from .parts import Labelled, Recipe, divide, label_documents, pick, until, val_limit
from .streams import Meter

LIMIT_BYTES = 20_000_000
CONFIGS_LIMIT = 32


def hub_recipes(dataset: str, languages: Sequence[str] | None, limit_bytes: int | None, field: str) -> list[Recipe]:
    """A recipe for each language, read from the dataset's `train` split until `limit_bytes`."""
    limit = limit_bytes or LIMIT_BYTES
    if languages is None:
        languages = _config_names(dataset)
    configs = pick(list(dict.fromkeys(languages)), languages, dataset)  # names nobody knows are found out when they are read
    identity = {"hub": dataset, "limit": limit, "field": field, **_local_state(dataset)}
    return [_recipe(dataset, config, limit, field, identity) for config in configs]


def _recipe(dataset: str, config: str, limit: int, field: str, identity: dict[str, object]) -> Recipe:
    def read(meter: Meter) -> Iterator[Labelled]:
        return _labelled_rows(dataset, config, limit, field, meter)

    return Recipe(config, {**identity, "config": config}, limit + val_limit(limit), read)


def _config_names(dataset: str) -> list[str]:
    with _in_words(dataset, None):
        names: list[str] = _library().get_dataset_config_names(dataset)
    if len(names) > CONFIGS_LIMIT:
        examples = ", ".join(names[:8])
        raise UserError(
            f"{dataset} has {len(names)} configurations ({examples}, …), too many to take all of: name the languages you want."
        )
    return names


def _labelled_rows(dataset: str, config: str, limit: int, field: str, meter: Meter) -> Iterator[Labelled]:
    with _in_words(dataset, config):
        splits = _library().get_dataset_split_names(dataset, config)
    if "train" not in splits:
        raise UserError(f"{dataset} ({config}) has no split 'train', only {', '.join(splits)}: choose a dataset that has one.")
    train = until(_rows(dataset, config, "train", field, meter), limit)
    if "validation" not in splits:
        yield from divide(train, config)
        return
    yield from label_documents("train", train)
    yield from label_documents("val", until(_rows(dataset, config, "validation", field, meter), val_limit(limit)))


def _rows(dataset: str, config: str, split: str, field: str, meter: Meter) -> Iterator[str]:
    with _in_words(dataset, config):
        for row in _library().load_dataset(dataset, config, split=split, streaming=True):
            if field not in row:
                raise UserError(
                    f"{dataset} ({config}) has no field {field!r}, only {', '.join(row)}: name the field that holds the text."
                )
            text = row[field]
            if text is not None and not isinstance(text, str):
                raise UserError(
                    f"{dataset} ({config}): the field {field!r} holds {type(text).__name__}: name the one that holds the text."
                )
            if text and text.strip():
                meter.bytes_read += len(text.encode())
                yield text


@contextmanager
def _in_words(dataset: str, config: str | None) -> Iterator[None]:
    """Turns an error of `datasets`, or of one of the HTTP libraries that it uses, into a UserError with one sentence."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        part = f" ({config})" if config else ""
        cause = " ".join(str(error).split())[:400].rstrip(".") or type(error).__name__
        raise UserError(
            f"The dataset hf:{dataset}{part} cannot be read: {cause}. Check its name, the language names and the network; "
            f"without a network, use --data FOLDER or --data builtin."
        ) from error


def _library() -> Any:
    return library("datasets", "Reading hf: datasets")


def _local_state(dataset: str) -> dict[str, object]:
    """A dataset in a local folder may change under its name: its files' sizes and times are part of its identity."""
    folder = Path(dataset).expanduser()
    if not folder.is_dir():
        return {}
    files = [
        (str(f.relative_to(folder)), f.stat().st_size, f.stat().st_mtime_ns) for f in sorted(folder.rglob("*")) if f.is_file()
    ]
    return {"local": hashlib.sha256(json.dumps([str(folder.resolve()), files]).encode()).hexdigest()}
