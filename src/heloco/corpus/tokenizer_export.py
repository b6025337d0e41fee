"""A run's tokenizer as the files that Hugging Face's AutoTokenizer reads."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from heloco.places import cache_folder

from . import gpt2
from .libraries import library
from .tokenizer import END_OF_TEXT, ByteTokenizer, JsonTokenizer

TOKENIZER, ABOUT = "tokenizer.json", "tokenizer_config.json"
_COMPANIONS = (ABOUT, "special_tokens_map.json", "chat_template.jinja")


def write_tokenizer(spec: str, data: str, folder: Path) -> int | None:
    """Writes what the setting `spec` names into the folder; GPT-2's vocabulary is looked for where it is for `data`. Returns the
    id that ends a text, or None, and nothing is written, where the tokenizer is no longer there."""
    path = _file(spec, data)
    if path is None and spec != "bytes":
        return None
    if path is None:
        content = byte_level({bytes([b]): b for b in range(256)}, [], ByteTokenizer.end_of_text)
    elif path.suffix == ".tiktoken":
        content = from_ranks(gpt2.read_ranks(path))
    else:
        content = path.read_bytes()
    (folder / TOKENIZER).write_bytes(content)
    for companion in [path.with_name(name) for name in _COMPANIONS] if path else []:
        if companion.is_file():
            shutil.copyfile(companion, folder / companion.name)
    coder = JsonTokenizer(spec, folder / TOKENIZER)
    if not (folder / ABOUT).is_file():  # else the model's type would decide, and a GPT-2 need not have GPT-2's vocabulary
        end = coder.decode([coder.end_of_text])
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end}
        (folder / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
    return coder.end_of_text


def _file(spec: str, data: str) -> Path | None:
    if spec == "bytes":
        return None
    if spec == "gpt2":
        return gpt2.look(None if data == "builtin" or data.startswith("hf:") else Path(data), cache_folder())
    path = Path(spec) / TOKENIZER if Path(spec).is_dir() else Path(spec)
    return path if path.is_file() else None


def from_ranks(ranks: Mapping[bytes, int]) -> bytes:
    """GPT-2's tokenizer.json from its ranks, in which the merges are implied."""
    tokens = sorted(ranks, key=ranks.__getitem__)
    return byte_level(ranks, [_last_merge(token, ranks) for token in tokens[256:]], gpt2.END_OF_TEXT)


def _last_merge(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes]:
    """The two parts of a token: those that are left when everything inside it is merged, lowest rank first."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        pairs = [ranks.get(parts[i] + parts[i + 1], len(ranks)) for i in range(len(parts) - 1)]
        at = pairs.index(min(pairs))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def byte_level(ids: Mapping[bytes, int], merges: Sequence[tuple[bytes, bytes]], end_of_text: int) -> bytes:
    """A tokenizer.json of byte-level BPE: tokens' bytes -> ids, and the merges in their order."""
    tokenizers = library("tokenizers", "A tokenizer.json")
    character_of = {byte: character for character, byte in gpt2.byte_of_character().items()}

    def text(token: bytes) -> str:
        return "".join(character_of[byte] for byte in token)

    vocabulary = {text(token): id_ for token, id_ in ids.items()} | {END_OF_TEXT: end_of_text}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [(text(a), text(b)) for a, b in merges]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_TEXT])
    return str(tokenizer.to_str()).encode()
