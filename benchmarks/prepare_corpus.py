"""How long a corpus takes to prepare, and to open again once it is prepared.

python benchmarks/prepare_corpus.py --data ../shared/corpus --tokenizer gpt2
"""

import argparse
import tempfile
import time
from pathlib import Path

from heloco.corpus import Corpus, prepare, rich_progress


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="builtin", help="'builtin', a folder or hf:DATASET")
    parser.add_argument("--tokenizer", default="bytes", help="'bytes', 'gpt2' or the path of a tokenizer.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="heloco-benchmark-") as folder:
        first_s, corpus = timed(arguments, Path(folder))
        second_s, cached_corpus = timed(arguments, Path(folder))
        assert cached_corpus.digest == corpus.digest
        show(corpus, first_s, second_s)


def timed(arguments: argparse.Namespace, cache: Path) -> tuple[float, Corpus]:
    start = time.perf_counter()
    with rich_progress() as progress:
        corpus = prepare(arguments.data, arguments.tokenizer, cache=cache, progress=progress)
    return time.perf_counter() - start, corpus


def show(corpus: Corpus, first_s: float, second_s: float) -> None:
    print(f"{'source':12} {'train tokens':>14} {'val tokens':>12} {'text MB':>9} {'documents':>10} {'bytes/token':>12}")
    text = 0
    for source in corpus.sources:
        size = source.train_bytes + source.val_bytes
        train, val = len(source.train), len(source.val)
        documents = source.train_documents + source.val_documents
        print(f"{source.name:12} {train:14,} {val:12,} {size / 1e6:9.2f} {documents:10,} {size / (train + val):12.2f}")
        text += size
    print(f"\nfirst   {first_s:8.2f} s   {text / 1e6 / first_s:8.1f} MB/s   {corpus.tokenizer_name}, {text / 1e6:.1f} MB of text")
    print(f"cached  {second_s:8.4f} s")


if __name__ == "__main__":
    main()
