"""Preparation: right tokens, once; and right again after kills, damage, races and a full disk."""

import json
import lzma
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from heloco.corpus import LANGUAGES, languages, load_tokenizer, prepare, rich_progress
from heloco.corpus.encoding import Batch, encode_batches
from heloco.errors import UserError
from support.disks import mounted_disk
from support.repository import SHARED


def folder(path: Path, size: int = 3000, names: tuple[str, ...] = ("de", "en")) -> Path:
    path.mkdir(exist_ok=True)
    for i, name in enumerate(names):
        for part in ("train", "val"):
            (path / f"{name}.{part}.txt").write_text("\n\n".join(languages.documents(LANGUAGES[i], 0, part, size)))
    return path


def documents_of(tokens: np.ndarray) -> list[str]:
    return [bytes(d[:-1].astype(np.uint8)).decode() for d in np.split(tokens, np.flatnonzero(tokens == 256) + 1)[:-1]]


def entries(cache: Path) -> list[Path]:
    return sorted(path for path in cache.iterdir() if path.name != "fingerprints")


def start(code: str, **options: object) -> subprocess.Popen[str]:
    """Python code in a process of its own, with `options` as its variables."""
    setting = "".join(f"{name} = {value!r}\n" for name, value in options.items())
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", setting + code], env=environment, text=True, **pipes)


# Prepares, and stops to wait for a line at the first report: by then an entry is half written.
PREPARE = """
from pathlib import Path
from heloco.corpus import prepare
waited = []
def progress(*report):
    if not waited:
        print("writing", flush=True)
        waited.append(input())
print(prepare(data, tokenizer, cache=Path(cache), progress=progress).digest)
"""


def test_builtin_holds_what_the_languages_say(tmp_path):
    corpus = prepare("builtin", cache=tmp_path, limit_bytes=20_000, seed=5)
    assert tuple(source.name for source in corpus.sources) == LANGUAGES
    assert (corpus.tokenizer_name, corpus.vocab_size, corpus.end_of_text) == ("bytes", 257, 256)
    for source in corpus.sources:
        documents = list(languages.documents(source.name, 5, "train", 20_000))
        assert documents_of(source.train) == documents
        assert (source.train_documents, source.train_bytes) == (len(documents), sum(len(d.encode()) for d in documents))
        assert len(source.train) == source.train_bytes + source.train_documents
        assert documents_of(source.val) == list(languages.documents(source.name, 5, "val", 1200))


def test_a_second_time_nothing_is_written_and_the_tokens_are_mapped(tmp_path):
    data, reports = folder(tmp_path / "data"), []
    first = prepare(str(data), cache=tmp_path / "cache", progress=lambda *report: reports.append(report))
    assert {name for name, _, _ in reports} == {"de", "en"}
    for name in ("de", "en"):
        *_, (_, bytes_read, total) = (report for report in reports if report[0] == name)
        assert bytes_read == total == sum(path.stat().st_size for path in data.glob(f"{name}.*"))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.bin")}
    second = prepare(str(data), cache=tmp_path / "cache", progress=lambda *_: pytest.fail("tokenised again"))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.bin")} == before
    assert second.digest == first.digest
    assert isinstance(second.sources[0].train, np.memmap) and second.sources[0].train.dtype == np.dtype("<u2")
    with pytest.raises(ValueError, match="read-only"):
        second.sources[0].train[0] = 1


def test_the_entry_says_what_it_holds(tmp_path):
    corpus = prepare(str(folder(tmp_path / "data", names=("en",))), cache=tmp_path / "cache")
    (entry,) = entries(tmp_path / "cache")
    meta = json.loads((entry / "meta.json").read_text())
    assert (meta["name"], meta["tokenizer"], meta["dtype"]) == ("en", "bytes", "uint16")
    train = meta["parts"]["train"]
    assert train["tokens"] == len(corpus.sources[0].train)
    assert (train["text_bytes"], train["documents"]) == (corpus.sources[0].train_bytes, corpus.sources[0].train_documents)
    assert {path.name for path in entry.iterdir()} == {"meta.json", "train.bin", "val.bin"}


def test_the_digest_names_data_tokenizer_and_order(tmp_path):
    data, cache = folder(tmp_path / "data"), tmp_path / "cache"
    digest = prepare(str(data), cache=cache).digest
    copy = folder(tmp_path / "copy")
    assert prepare(str(copy), cache=cache).digest == digest
    assert len(entries(cache)) == 2  # by content: the copy needed no new entries
    assert prepare(str(data), cache=cache, languages=["en", "de"]).digest != digest
    assert prepare(str(data), cache=cache, limit_bytes=500).digest != digest
    (copy / "en.train.txt").write_text((copy / "en.train.txt").read_text() + "x")
    assert prepare(str(copy), cache=cache).digest != digest


def test_a_change_that_keeps_size_and_time_just_after_a_look_is_seen(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "en.txt").write_text("aaaa\n\nbbbb")
    first = prepare(str(data), cache=tmp_path / "cache").digest
    state = (data / "en.txt").stat()
    (data / "en.txt").write_text("aaaa\n\ncccc")
    os.utime(data / "en.txt", ns=(state.st_atime_ns, state.st_mtime_ns))
    assert prepare(str(data), cache=tmp_path / "cache").digest != first


def test_many_batches_keep_their_order(tmp_path):
    data = folder(tmp_path / "data", size=1_200_000, names=("en",))
    corpus = prepare(str(data), cache=tmp_path / "cache")
    assert documents_of(corpus.sources[0].train) == list(languages.documents(LANGUAGES[0], 0, "train", 1_200_000))


def test_what_fails_while_encoding_fails_here():
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        list(encode_batches(load_tokenizer("bytes"), [Batch("train", ["\ud800"], 0)]))


def test_the_room_loads_without_torch_and_without_the_libraries_that_only_some_data_needs():
    code = """
import sys, heloco.corpus
heavy = {'torch', 'datasets', 'pyarrow', 'tiktoken', 'tokenizers', 'rich'}
print(heavy & {name.partition('.')[0] for name in sys.modules})
"""
    assert start(code).communicate(timeout=60) == ("set()\n", "")


def test_a_preparation_killed_half_way_leaves_nothing_that_counts(tmp_path):
    data, cache = folder(tmp_path / "data", size=700_000, names=("en",)), tmp_path / "cache"
    child = start(PREPARE, data=str(data), tokenizer="bytes", cache=str(cache))
    assert child.stdout is not None and child.stdout.readline() == "writing\n"
    (unfinished,) = entries(cache)
    assert unfinished.name.startswith(".unfinished-")
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=60)
    corpus = prepare(str(data), cache=cache)
    assert documents_of(corpus.sources[0].train) == list(languages.documents(LANGUAGES[0], 0, "train", 700_000))
    assert [entry.name[:3] for entry in entries(cache)] == ["en-"]  # what the killed one left is cleared away


def test_two_preparations_at_once_do_each_other_no_harm(tmp_path):
    data, cache = folder(tmp_path / "data", size=700_000), tmp_path / "cache"
    children = [start(PREPARE, data=str(data), tokenizer="bytes", cache=str(cache)) for _ in range(2)]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "writing\n"
    assert len(entries(cache)) == 2  # both are at the same source, each in its own folder
    digests = [child.communicate("go\n", timeout=60)[0] for child in children]
    expected = prepare(str(data), cache=tmp_path / "alone").digest
    assert digests == [f"{expected}\n"] * 2
    assert [entry.name[:3] for entry in entries(cache)] == ["de-", "en-"]


@pytest.mark.parametrize("damage", ["truncate", "empty meta", "no val", "not a folder"])
def test_a_damaged_entry_is_made_anew(tmp_path, damage):
    data, cache = folder(tmp_path / "data", names=("en",)), tmp_path / "cache"
    first = prepare(str(data), cache=cache)
    tokens = first.sources[0].train.copy()
    del first
    (entry,) = entries(cache)
    match damage:
        case "truncate":
            os.truncate(entry / "train.bin", 100)
        case "empty meta":
            (entry / "meta.json").write_text("")
        case "no val":
            (entry / "val.bin").unlink()
        case "not a folder":
            entry.rename(tmp_path / "away")
            entry.write_text("")
    second = prepare(str(data), cache=cache)
    assert (second.sources[0].train == tokens).all()
    assert entries(cache) == [entry]


@pytest.fixture
def small_disk(tmp_path):
    with mounted_disk(tmp_path / "disk", "256k") as disk:
        yield disk


def test_a_full_disk_is_told_of_and_left_clean(tmp_path, small_disk):
    data = folder(tmp_path / "data", size=700_000, names=("en",))
    with pytest.raises(UserError, match=f"disk is full while writing tokens to {small_disk}.*HELOCO_CACHE"):
        prepare(str(data), cache=small_disk)
    assert entries(small_disk) == []
    small = folder(tmp_path / "small", size=1000, names=("en",))
    assert prepare(str(small), cache=small_disk).sources[0].train_bytes >= 1000


def test_a_cache_that_cannot_be_written_is_told_of(tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=r"cannot be written .*HELOCO_CACHE"):
        prepare("builtin", cache=tmp_path / "cache", limit_bytes=1000)


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("HELOCO_CACHE", str(tmp_path / "chosen"))
    prepare("builtin", languages=["auren"], limit_bytes=1000)
    assert [entry.name[:6] for entry in entries(tmp_path / "chosen")] == ["auren-"]


def test_what_cannot_be_prepared_is_refused(tmp_path):
    data = folder(tmp_path / "data")
    (data / "en.val.txt").write_text(" \n\n ")
    with pytest.raises(UserError, match="'en' has no val text"):
        prepare(str(data), cache=tmp_path / "cache")
    assert [entry.name[:3] for entry in entries(tmp_path / "cache")] == ["de-"]
    with pytest.raises(UserError, match=r"no source 'auron' in the built-in languages.*did you mean 'auren'"):
        prepare("builtin", languages=["auron"], cache=tmp_path)
    with pytest.raises(UserError, match="'auren' is named twice"):
        prepare("builtin", languages=["auren", "auren"], cache=tmp_path)
    with pytest.raises(UserError, match="limit of 0 bytes"):
        prepare("builtin", limit_bytes=0, cache=tmp_path)


def test_the_progress_bar_shows_each_source(tmp_path, capsys):
    with rich_progress() as progress:
        prepare(str(folder(tmp_path / "data")), cache=tmp_path / "cache", progress=progress)
    captured = capsys.readouterr()
    assert "tokenising de" in captured.err and "tokenising en" in captured.err and not captured.out


@pytest.mark.skipif(
    not (SHARED / "corpus").is_dir() or not (SHARED / "gpt2").is_dir(), reason="needs ../shared/corpus and ../shared/gpt2"
)
def test_the_shared_corpus_with_gpt2s_vocabulary(tmp_path):
    """A slice of it: the first half megabyte of each language."""
    pytest.importorskip("tiktoken")
    corpus = prepare(str(SHARED / "corpus"), "gpt2", limit_bytes=500_000, cache=tmp_path)
    assert [source.name for source in corpus.sources] == ["de", "en", "es", "fr", "it"]
    assert (corpus.vocab_size, corpus.end_of_text) == (50257, 50256)
    tokenizer = load_tokenizer("gpt2", SHARED / "corpus")
    with lzma.open(SHARED / "corpus" / "de.train.txt.xz", "rt", encoding="utf-8") as file:
        first = file.read(400_000).split("\n\n")[0]
    tokens = corpus.sources[0].train
    assert tokenizer.decode(tokens[: np.flatnonzero(tokens == 50256)[0]].tolist()) == first
    for source in corpus.sources:
        assert int((source.train == 50256).sum()) == source.train_documents
        assert source.train_bytes >= 500_000
    bytes_per_token = {source.name: source.train_bytes / len(source.train) for source in corpus.sources}
    assert bytes_per_token["en"] > 4 > 3 > bytes_per_token["de"]
