"""GPT-2's vocabulary: where it lies, how its two file formats are read, and how it is known again."""

import base64
import hashlib
import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

from heloco.errors import UserError

from .libraries import library

END_OF_TEXT = 50256
VOCAB_SIZE = 50257
DIGEST = "e0a75dbf98d28d2afb76c19470ad49d3efe4c1c5b25b9e0290afe9b226b25353"

# GPT-2's way of cutting text into words, in the possessive form that needs no backtracking.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"

_FILES = (Path("gpt2", "gpt2.tiktoken"), Path("gpt2.tiktoken"), Path("gpt2", "tokenizer.json"))


def find(data_folder: Path | None, cache: Path) -> Path:
    """The vocabulary's file: in the data folder, next to it, in the cache, or else downloaded into the cache."""
    path = look(data_folder, cache, ranks=has_tiktoken())
    return path or _download(cache, ", ".join(map(str, _places(data_folder, cache))))


def look(data_folder: Path | None, cache: Path, *, ranks: bool = True) -> Path | None:
    """The vocabulary's file, if it is on this machine; as a rank file only where `ranks`."""
    for place in _places(data_folder, cache):
        for file in _FILES:
            if (place / file).is_file() and (ranks or file.suffix == ".json"):
                return (place / file).resolve()
    return None


def _places(data_folder: Path | None, cache: Path) -> list[Path]:
    near: tuple[Path, ...] = (data_folder, data_folder.resolve().parent) if data_folder else ()
    return [*near, cache]


def has_tiktoken() -> bool:
    return importlib.util.find_spec("tiktoken") is not None


def _download(cache: Path, places_searched: str) -> Path:
    tiktoken = library("tiktoken", f"GPT-2's vocabulary, which is in none of {places_searched},")
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as error:  # whatever the HTTP library below raises
        raise UserError(
            f"GPT-2's vocabulary is in none of {places_searched} and cannot be downloaded ({type(error).__name__}): "
            f"get its tokenizer.json on a machine with a network and pass --tokenizer path/to/tokenizer.json."
        ) from error
    tokens = sorted(encoding.token_byte_values(), key=encoding.encode_single_token)
    lines = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=cache, prefix=".gpt2-", delete=False) as file:
        file.write(lines)
    return Path(file.name).replace(cache / "gpt2.tiktoken")


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes to id, from a rank file (`base64 rank` a line) or from GPT-2's tokenizer.json."""
    ranks = _ranks_from_lines(path) if path.suffix == ".tiktoken" else ranks_from_json(path.read_bytes())
    if ranks is None or sorted(ranks.values()) != list(range(END_OF_TEXT)):
        raise UserError(
            f"{path} does not hold the {END_OF_TEXT} tokens of GPT-2's vocabulary: use a tokenizer.json for any other one."
        )
    return ranks


def _ranks_from_lines(path: Path) -> dict[bytes, int]:
    ranks = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise UserError(f"{path}:{number} is not 'base64 rank' ({error}): download the rank file again.") from error
    return ranks


def ranks_from_json(content: bytes) -> dict[bytes, int] | None:
    """The ranks in a tokenizer.json that works as GPT-2's does (byte-level BPE, ids in the order of its merges), or None."""
    try:
        spec = json.loads(content)
        model, before = spec["model"], spec["pre_tokenizer"]
        plain = spec.get("normalizer") is None and before["type"] == "ByteLevel" and not before["add_prefix_space"]
        if not plain or not before.get("use_regex", True) or len(spec["added_tokens"]) != 1:
            return None
        merges = ["".join(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
        vocabulary: dict[str, Any] = dict(model["vocab"])
        vocabulary.pop(spec["added_tokens"][0]["content"], None)
        if any(vocabulary.get(token) != 256 + place for place, token in enumerate(merges)):
            return None
        bytes_of = byte_of_character()
        return {bytes(bytes_of[c] for c in token): int(id_) for token, id_ in vocabulary.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # of another shape: not GPT-2's


def is_gpt2(content: bytes) -> bool:
    """Whether a tokenizer.json is GPT-2's own, so that tiktoken may stand in for it."""
    ranks = ranks_from_json(content)
    return ranks is not None and digest(ranks) == DIGEST


def byte_of_character() -> dict[str, int]:
    """Byte-level BPE writes printable Latin-1 bytes as themselves and the others as the characters from U+0100 on, in order."""
    printable_bytes = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
    other_bytes = [b for b in range(256) if b not in set(printable_bytes)]
    return {chr(b): b for b in printable_bytes} | {chr(256 + i): b for i, b in enumerate(other_bytes)}


def digest(ranks: dict[bytes, int]) -> str:
    """The SHA-256 of the tokens in the order of their ids."""
    content = hashlib.sha256(PATTERN.encode())
    for token in sorted(ranks, key=ranks.__getitem__):
        content.update(len(token).to_bytes(4, "little") + token)
    return content.hexdigest()
