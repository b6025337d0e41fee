"""Folders of text: what is found in them, how it is read, and what is said when it cannot be."""

import gzip
import io
import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heloco.corpus.parts import divide
from heloco.corpus.streams import Meter
from heloco.corpus.text_files import LONGEST_CHARS, find_sources
from heloco.errors import UserError


def write(path: Path, content: str | bytes) -> Path:
    data = content.encode() if isinstance(content, str) else content
    pack = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": zstd}.get(path.suffix, bytes)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pack(data))
    return path


def zstd(data: bytes) -> bytes:
    compressor = pytest.importorskip("zstandard").ZstdCompressor()
    half = len(data) // 2
    return compressor.compress(data[:half]) + compressor.compress(data[half:])  # two frames, as parallel compressors write them


def rows(*texts: str, field: str = "text") -> str:
    return "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts))


def parquet(*texts: str | None) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    buffer = io.BytesIO()
    pytest.importorskip("pyarrow.parquet").write_table(
        pyarrow.table({"text": list(texts), "id": list(range(len(texts)))}), buffer
    )
    return buffer.getvalue()


def read(folder: Path, field: str = "text", limit_bytes: int | None = None) -> dict[str, dict[str, list[str]]]:
    documents: dict[str, dict[str, list[str]]] = {}
    for source in find_sources(folder):
        parts: dict[str, list[str]] = {"train": [], "val": []}
        for part, document in source.documents(field, limit_bytes, Meter()):
            parts[part].append(document)
        documents[source.name] = parts
    return documents


def refused(folder: Path, *words: str, **options: str) -> None:
    with pytest.raises(UserError) as refusal:
        read(folder, **options)
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize("packed", ["", ".gz", ".xz", ".zst"])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_every_kind_plain_and_compressed(tmp_path, kind, packed):
    contents = {"txt": "one\ntwo\n\nthree ü\n", "jsonl": rows("one\ntwo", "three ü"), "parquet": parquet("one\ntwo", "three ü")}
    write(tmp_path / f"en.train.{kind}{packed}", contents[kind])
    write(tmp_path / f"en.val.{kind}{packed}", contents[kind])
    assert read(tmp_path) == {"en": {"train": ["one\ntwo", "three ü"], "val": ["one\ntwo", "three ü"]}}


def test_sub_folders_parts_and_what_is_ignored(tmp_path):
    write(tmp_path / "de" / "train-00.txt", "a")
    write(tmp_path / "de" / "train" / "part.jsonl", rows("b"))
    write(tmp_path / "de" / "validation-0.txt", "c")
    write(tmp_path / "de" / "test.txt", "never read")
    write(tmp_path / "de" / "README.md", "notes")
    write(tmp_path / "fr" / "x.txt.gz", "d\n\ne")
    write(tmp_path / "it.txt", "f")
    write(tmp_path / "it.val.jsonl", rows("g"))
    for other in ("README.md", "LICENSE", ".hidden.csv", "gpt2.tiktoken", "gpt2/tokenizer.json"):
        write(tmp_path / other, "{}")
    assert read(tmp_path) == {
        "de": {"train": ["b", "a"], "val": ["c"]},
        "fr": {"train": ["d"], "val": ["e"]},
        "it": {"train": ["f"], "val": ["g"]},
    }


def test_a_bare_train_and_val_make_the_folder_the_source(tmp_path):
    write(tmp_path / "books" / "train.txt", "a")
    write(tmp_path / "books" / "val.txt", "b")
    assert read(tmp_path / "books") == {"books": {"train": ["a"], "val": ["b"]}}


def test_names_that_only_begin_like_a_part_are_names(tmp_path):
    write(tmp_path / "en" / "valencia.txt", "a\n\nb")
    write(tmp_path / "trains.txt", "c\n\nd")
    assert read(tmp_path) == {"en": {"train": ["a"], "val": ["b"]}, "trains": {"train": ["c"], "val": ["d"]}}


def test_languages_pick_and_order(tmp_path):
    for name in ("de", "en", "fr"):
        write(tmp_path / f"{name}.txt", "x\n\ny")
    assert [source.name for source in find_sources(tmp_path)] == ["de", "en", "fr"]
    assert [source.name for source in find_sources(tmp_path, ["fr", "de"])] == ["fr", "de"]
    with pytest.raises(UserError, match=r"no source 'es' in .* which has de, en, fr"):
        find_sources(tmp_path, ["de", "es"])


def test_blank_lines_carriage_returns_and_byte_order_marks(tmp_path):
    write(tmp_path / "en.train.txt", b"\xef\xbb\xbf\n\n  indented\r\nsecond\r\n \t\r\n\r\nnext  \r\n")
    write(tmp_path / "en.val.txt", "v")
    assert read(tmp_path)["en"]["train"] == ["  indented\nsecond", "next  "]


def test_documents_are_cut_alike_wherever_blocks_of_the_file_end(tmp_path):
    line = "0123456789 abcdef\n"
    long = line * (3 * LONGEST_CHARS // len(line))
    texts = {}
    for shift in (0, 1, 7, LONGEST_CHARS - 2, LONGEST_CHARS - 1):
        write(tmp_path / "en.train.txt", "x" * shift + "\n\n" + long + "\n\nend")
        write(tmp_path / "en.val.txt", "v")
        texts[shift] = [t for t in read(tmp_path)["en"]["train"] if not t.startswith("x")]
    assert all(cut == texts[0] for cut in texts.values())
    assert len(texts[0]) == 5 and max(map(len, texts[0])) <= LONGEST_CHARS
    assert "\n".join(texts[0][:-1]) + "\n" == long
    assert texts[0][-1] == "end"


def test_a_limit_takes_documents_until_it_is_reached(tmp_path):
    write(tmp_path / "en.train.txt", "\n\n".join("x" * 100 for _ in range(50)))
    write(tmp_path / "en.val.txt", "\n\n".join("y" * 100 for _ in range(50)))
    parts = read(tmp_path, limit_bytes=2000)["en"]
    assert (len(parts["train"]), len(parts["val"])) == (20, 2)  # val: 6 % of the limit


def test_the_split_is_by_content_about_one_in_a_hundred():
    texts = [f"document {i}" for i in range(20_000)]
    labelled = list(divide(texts, "x"))
    val = {text for part, text in labelled if part == "val"}
    assert sorted(text for _, text in labelled) == sorted(texts)
    assert 140 < len(val) < 260
    assert {text for part, text in divide([*reversed(texts), "more"], "x") if part == "val"} == val


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=2, max_size=6))
def test_neither_side_of_a_split_is_empty(texts):
    labelled = list(divide(texts, "x"))
    assert sorted(text for _, text in labelled) == sorted(texts)
    assert {part for part, _ in labelled} == {"train", "val"}


def test_a_lone_document_is_cut_in_two_and_a_lone_word_refused():
    lines = "".join(f"line {i}\n" for i in range(1000))
    (_, head), (part, tail) = divide([lines], "x")
    assert part == "val" and f"{head}\n{tail}" == lines
    assert 0 < len(tail) < 0.02 * len(lines)
    with pytest.raises(UserError, match="too short to set a part aside"):
        list(divide(["word"], "x"))


def test_what_is_wrong_with_a_folder(tmp_path):
    refused(tmp_path / "nowhere", "does not exist", "--data")
    refused(tmp_path, "no training text")
    (tmp_path / "en").mkdir()
    refused(tmp_path, str(tmp_path / "en"), "is empty")
    (tmp_path / "en").rmdir()
    table = write(tmp_path / "en.csv", "a,b")
    refused(tmp_path, str(table), ".csv", ".txt, .jsonl, .parquet", ".zst")
    table.unlink()
    write(tmp_path / "en.val.txt", "x")
    refused(tmp_path, "'en'", "en.val.txt", "no en.train")


def test_bytes_that_are_not_utf8_are_found(tmp_path):
    path = write(tmp_path / "en.txt.gz", b"fine\n" * 100_000 + b"caf\xe9\n")
    refused(tmp_path, str(path), "byte 500003", "line 100001", "iconv")
    write(path, "ü".encode()[:1])
    refused(tmp_path, "byte 0", "line 1")


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"text": "cut', "en.jsonl:3 is not valid JSON"),
        ('["text"]', "en.jsonl:3 is a JSON list"),
        ('{"body": "x", "url": ""}', "en.jsonl:3 has no field 'text', only body, url"),
        ('{"text": 7}', "holds int, not text"),
        ('{"text": "\\\\ud800"}'.replace("\\\\", "\\"), "half a surrogate pair"),
    ],
)
def test_what_is_wrong_with_a_row(tmp_path, line, message):
    write(tmp_path / "en.jsonl", rows("a") + "\n" + line + "\n")
    refused(tmp_path, message)


def test_the_field_can_be_named_and_nulls_are_nothing(tmp_path):
    write(tmp_path / "en.jsonl", rows("a", "b", field="body") + '{"body": null}\n')
    assert read(tmp_path, field="body") == {"en": {"train": ["a"], "val": ["b"]}}
    (tmp_path / "en.jsonl").unlink()
    write(tmp_path / "en.parquet", parquet("a", None, "b"))
    refused(tmp_path, "no column 'body', only text, id", field="body")
    assert read(tmp_path) == {"en": {"train": ["a"], "val": ["b"]}}


@pytest.mark.parametrize("name", ["en.txt.gz", "en.txt.xz", "en.txt.zst", "en.parquet"])
def test_a_file_cut_short_is_said_to_be(tmp_path, name):
    texts = [f"{i * 7919 % 1000} document" for i in range(5000)]
    path = write(tmp_path / name, parquet(*texts) if name.endswith("parquet") else "\n\n".join(texts))
    path.write_bytes(path.read_bytes()[:-500])
    refused(tmp_path, str(path), "cut short or damaged", "again")


def test_the_meter_counts_the_bytes_on_disk(tmp_path):
    path = write(tmp_path / "en.txt.xz", "\n\n".join(f"text {i}" for i in range(10_000)))
    meter = Meter()
    (source,) = find_sources(tmp_path)
    assert len(list(source.documents("text", None, meter))) == 10_000
    assert meter.bytes_read == path.stat().st_size
