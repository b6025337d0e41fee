"""The corpus room: text from anywhere, tokenised once, dealt to shards. numpy and files only; no torch."""

from .languages import LANGUAGES
from .prepare import Corpus, Source, prepare
from .progress import Progress, rich_progress
from .sharding import EpochOrder, Shard, split, windows
from .text_files import SourceFiles, find_sources
from .tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "LANGUAGES",
    "Corpus",
    "EpochOrder",
    "Progress",
    "Shard",
    "Source",
    "SourceFiles",
    "Tokenizer",
    "find_sources",
    "load_tokenizer",
    "prepare",
    "rich_progress",
    "split",
    "windows",
]
