"""Tokenizers: exact ids, the same whichever library and file they come from, and the same in another process."""

import json
import lzma
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heloco.corpus import gpt2
from heloco.corpus.languages import documents
from heloco.corpus.tokenizer import JsonTokenizer, RankTokenizer, load_tokenizer, token_dtype
from heloco.errors import UserError
from support.repository import SHARED

pytest.importorskip("tiktoken")
pytest.importorskip("tokenizers")

needs_gpt2 = pytest.mark.skipif(not (SHARED / "gpt2").is_dir(), reason="GPT-2's vocabulary is not in ../shared/gpt2")
needs_corpus = pytest.mark.skipif(not (SHARED / "corpus").is_dir(), reason="there is no ../shared/corpus")


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer.encode_batch([text])[0].tolist()


def small_tokenizer(path: Path, end: str = "</s>", prefix: bool = False) -> Path:
    """A tokenizer.json trained on a built-in language: byte-level BPE, or words with a space put before each text."""
    import tokenizers as tk

    tokenizer = tk.Tokenizer(tk.models.BPE())
    tokenizer.pre_tokenizer = tk.pre_tokenizers.Metaspace() if prefix else tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tk.decoders.Metaspace() if prefix else tk.decoders.ByteLevel()
    alphabet = [] if prefix else tk.pre_tokenizers.ByteLevel.alphabet()
    trainer = tk.trainers.BpeTrainer(vocab_size=400, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(documents("auren", 0, "train", 50_000), trainer)
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return path


@given(st.text())
def test_bytes_go_there_and_back(text):
    tokenizer = load_tokenizer("bytes")
    assert ids(tokenizer, text) == list(text.encode())
    assert tokenizer.decode(ids(tokenizer, text)) == text


def test_bytes_have_an_end_of_text():
    tokenizer = load_tokenizer("bytes")
    assert (tokenizer.vocab_size, tokenizer.end_of_text) == (257, 256)
    assert tokenizer.decode([104, 105, 256, 0xC3]) == "hi<|endoftext|>�"


def test_the_smallest_dtype_that_holds_the_vocabulary():
    assert [token_dtype(size) for size in (257, 65536, 65537)] == [np.dtype("<u2"), np.dtype("<u2"), np.dtype("<u4")]


@needs_gpt2
@pytest.mark.parametrize(
    "kind, file", [(RankTokenizer, "gpt2.tiktoken"), (RankTokenizer, "tokenizer.json"), (JsonTokenizer, "tokenizer.json")]
)
def test_gpt2_is_the_same_from_either_file_and_library(kind, file):
    tokenizer = kind("x", SHARED / "gpt2" / file)
    assert ids(tokenizer, "Hello world") == [15496, 995]
    assert (tokenizer.vocab_size, tokenizer.end_of_text, tokenizer.digest) == (50257, 50256, gpt2.DIGEST)
    assert tokenizer.decode([15496, 995, 50256]) == "Hello world<|endoftext|>"
    assert ids(tokenizer, "<|endoftext|>") != [50256]  # in a text it is text


@needs_gpt2
@needs_corpus
@pytest.mark.parametrize("language", ["de", "en", "es", "fr", "it"])
def test_both_libraries_tokenise_the_corpus_alike(language):
    with lzma.open(SHARED / "corpus" / f"{language}.val.txt.xz", "rt", encoding="utf-8") as file:
        texts = file.read(60_000).split("\n\n")
    rank, other = (kind("x", SHARED / "gpt2" / "tokenizer.json") for kind in (RankTokenizer, JsonTokenizer))
    for a, b, text in zip(rank.encode_batch(texts), other.encode_batch(texts), texts, strict=True):
        assert a.tolist() == b.tolist()
        assert rank.decode(a) == text


@needs_gpt2
@pytest.mark.parametrize("kind", [RankTokenizer, JsonTokenizer])
def test_a_long_text_in_pieces_gives_the_ids_of_the_whole(kind):
    import tiktoken

    path = SHARED / "gpt2" / "tokenizer.json"
    odd = "  two  spaces\n\n and\tlines 's don't 12 345…\u00a0 end   \n"
    long = " ".join([*documents("auren", 0, "train", 150_000), odd * 2000])
    whole = tiktoken.Encoding(
        "x", pat_str=gpt2.PATTERN, mergeable_ranks=gpt2.read_ranks(path), special_tokens={}
    ).encode_ordinary(long)
    assert ids(kind("x", path), long) == whole


@pytest.mark.parametrize("prefix", [False, True])
def test_a_long_text_in_pieces_with_any_tokenizer_json(tmp_path, prefix):
    import tokenizers

    path = small_tokenizer(tmp_path / "tokenizer.json", prefix=prefix)
    long = " ".join(documents("auren", 0, "val", 200_000))
    whole = tokenizers.Tokenizer.from_file(str(path)).encode(long, add_special_tokens=False).ids
    tokenizer = load_tokenizer(str(path))
    assert ids(tokenizer, long) == whole
    assert tokenizer.decode(whole) == long


@pytest.mark.parametrize("end", ["<|endoftext|>", "</s>", "<eos>", "[SEP]"])
def test_the_end_of_text_is_found_by_its_usual_names(tmp_path, end):
    tokenizer = load_tokenizer(str(small_tokenizer(tmp_path / "t.json", end).parent / "t.json"))
    assert tokenizer.end_of_text == 0 and tokenizer.decode([0]) == end
    assert tokenizer.vocab_size == 400
    assert ids(tokenizer, end) != [0]


def test_a_tokenizer_without_one_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"no special token that ends a text, only \[MASK\].*</s>"):
        load_tokenizer(str(small_tokenizer(tmp_path / "t.json", "[MASK]")))


def test_digests_tell_vocabularies_apart(tmp_path):
    one, two = (small_tokenizer(tmp_path / f"{i}.json", end) for i, end in enumerate(["</s>", "<eos>"]))
    copy = tmp_path / "copy.json"
    copy.write_bytes(one.read_bytes())
    digests = [load_tokenizer(str(path)).digest for path in (one, two, copy)]
    assert digests[0] == digests[2] != digests[1]
    assert load_tokenizer("bytes").digest not in digests


@needs_gpt2
@pytest.mark.parametrize(
    "place",
    ["data/gpt2/tokenizer.json", "data/gpt2/gpt2.tiktoken", "data/gpt2.tiktoken", "gpt2/gpt2.tiktoken", "cache/gpt2.tiktoken"],
)
def test_gpt2_is_looked_for_in_the_data_folder_next_to_it_and_in_the_cache(tmp_path, place):
    path = tmp_path / place
    path.parent.mkdir(parents=True)
    path.write_bytes((SHARED / "gpt2" / path.name).read_bytes())
    tokenizer = load_tokenizer("gpt2", tmp_path / "data", tmp_path / "cache")
    assert isinstance(tokenizer, RankTokenizer) and tokenizer.path == path
    assert (tokenizer.name, ids(tokenizer, "Hello world")) == ("gpt2", [15496, 995])


def test_another_vocabulary_under_gpt2s_name_is_refused(tmp_path):
    small_tokenizer(tmp_path / "gpt2" / "tokenizer.json", "<|endoftext|>")
    with pytest.raises(UserError, match="is not GPT-2's vocabulary"):
        load_tokenizer("gpt2", tmp_path, tmp_path / "cache")


def test_without_a_network_gpt2_is_asked_for_as_a_file(tmp_path):
    """In a process of its own: a proxy that refuses connections stands for the missing network."""
    code = "from heloco.corpus import load_tokenizer; load_tokenizer('gpt2')"
    nowhere = dict.fromkeys(("https_proxy", "HTTPS_PROXY"), "http://127.0.0.1:9")
    folders = {
        "HELOCO_CACHE": str(tmp_path / "cache"),
        "TIKTOKEN_CACHE_DIR": str(tmp_path / "none"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    process = subprocess.run([sys.executable, "-c", code], env=os.environ | nowhere | folders, capture_output=True, text=True)
    assert "UserError: GPT-2's vocabulary is in none of" in process.stderr
    assert "--tokenizer path/to/tokenizer.json" in process.stderr


def test_what_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match="did you mean 'gpt2'"):
        load_tokenizer("gpt-2")
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 1}))
    with pytest.raises(UserError, match=r"not a tokenizer\.json that tokenizers can read"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "a.tiktoken").write_text("IQ== 0\nnonsense\n")
    with pytest.raises(UserError, match=r"a\.tiktoken:2 is not 'base64 rank'"):
        load_tokenizer(str(tmp_path / "a.tiktoken"))
    (tmp_path / "a.tiktoken").write_text("IQ== 0\n")
    with pytest.raises(UserError, match="does not hold the 50256 tokens"):
        load_tokenizer(str(tmp_path / "a.tiktoken"))
