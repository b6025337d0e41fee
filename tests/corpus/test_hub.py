"""`hf:` datasets, streamed for real through `datasets` from a local dataset folder."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from heloco.corpus import prepare
from heloco.errors import UserError

pytest.importorskip("datasets")


def dataset(folder: Path, configs: dict[str, dict[str, list[str]]]) -> str:
    """A dataset folder as on the hub: configurations with splits, declared in its README. Returns its hf: name."""
    lines = ["---", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split, texts in splits.items():
            path = folder / "data" / f"{config}-{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps({"text": text, "url": "u"}) + "\n" for text in texts))
            lines += [f"  - split: {split}", f"    path: data/{path.name}"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    return f"hf:{folder}"


def texts(name: str, count: int) -> list[str]:
    return [f"{name} {i:03}" for i in range(count)]


def decoded(tokens: np.ndarray) -> list[str]:
    return [
        bytes(document[:-1].astype(np.uint8)).decode() for document in np.split(tokens, np.flatnonzero(tokens == 256) + 1)[:-1]
    ]


def test_each_configuration_is_a_source_and_validation_is_used_where_it_is(tmp_path):
    name = dataset(
        tmp_path / "d", {"en": {"train": texts("en", 30), "validation": texts("val", 4)}, "de": {"train": texts("de", 30)}}
    )
    corpus = prepare(name, cache=tmp_path / "cache")
    en, de = corpus.sources
    assert (en.name, de.name) == ("en", "de")
    assert decoded(en.train) == texts("en", 30)
    assert decoded(en.val) == texts("val", 4)
    assert (de.train_documents + de.val_documents, de.val_documents) == (30, 1)
    assert [s.name for s in prepare(name, languages=["de"], cache=tmp_path / "cache").sources] == ["de"]


def test_rows_are_taken_until_the_limit(tmp_path):
    name = dataset(tmp_path / "d", {"en": {"train": ["x" * 100] * 1000, "validation": ["y" * 100] * 1000}})
    (source,) = prepare(name, limit_bytes=5000, cache=tmp_path / "cache").sources
    assert (source.train_bytes, source.val_bytes) == (5000, 300)


def test_a_local_dataset_that_changed_is_read_again(tmp_path):
    first = prepare(dataset(tmp_path / "d", {"en": {"train": texts("a", 10)}}), cache=tmp_path / "cache")
    second = prepare(dataset(tmp_path / "d", {"en": {"train": texts("bb", 10)}}), cache=tmp_path / "cache")
    assert first.digest != second.digest


def test_what_cannot_be_read_is_said_in_a_sentence(tmp_path):
    name = dataset(tmp_path / "d", {"en": {"train": texts("en", 3)}, "xx": {"test": texts("x", 3)}})
    cache = tmp_path / "cache"
    with pytest.raises(UserError, match=r"hf:.*\(es\) cannot be read: .*'en', 'xx'.*Check its name"):
        prepare(name, languages=["es"], cache=cache)
    with pytest.raises(UserError, match="has no field 'body', only text, url"):
        prepare(name, languages=["en"], field="body", cache=cache)
    with pytest.raises(UserError, match="no split 'train', only test"):
        prepare(name, languages=["xx"], cache=cache)
    many = dataset(tmp_path / "many", {f"c{i:02}": {"train": ["a"]} for i in range(33)})
    with pytest.raises(UserError, match=r"has 33 configurations .*name the languages"):
        prepare(many, cache=cache)


def test_without_a_network_it_says_so(tmp_path):
    code = "from heloco.corpus import prepare; prepare('hf:allenai/c4', languages=['de'])"
    settings = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path),
        "HELOCO_CACHE": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    process = subprocess.run([sys.executable, "-c", code], env=os.environ | settings, capture_output=True, text=True)
    assert "UserError: The dataset hf:allenai/c4 (de) cannot be read" in process.stderr
    assert "without a network, use --data FOLDER" in process.stderr
