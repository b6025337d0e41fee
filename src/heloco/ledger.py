"""The ledger of the data: which windows of each shard were handed out, so that each is used once per epoch.

A shard is an endless stream. Position p is window p mod N of epoch p div N; the task knows the order of each epoch. A round gets
spans of positions. The positions of a refused or abandoned round are handed out again before new ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

Span = tuple[int, int]
"""(first position, count)"""


@dataclass(slots=True)
class ShardPage:
    """One shard's page in the ledger."""

    windows: int
    cursor: int = 0
    visits: int = 0
    steps: int = 0
    returned_spans: list[Span] = field(default_factory=list)
    """Given back by rounds that ended without an accepted contribution, in order. They are handed out again before new ones."""

    @property
    def windows_taken(self) -> int:
        """How many positions were handed out and not given back."""
        return self.cursor - sum(count for _, count in self.returned_spans)


class Ledger:
    """The pages of all shards. Each position of a shard goes to one round, unless that round gives it back."""

    def __init__(self, windows: Sequence[int]) -> None:
        self.pages = [ShardPage(n) for n in windows]

    def take(self, shard: int, count: int, steps: int) -> tuple[Span, ...]:
        """The next `count` positions of a shard for a round of `steps` inner steps: returned ones first, then new ones."""
        page = self.pages[shard]
        page.visits += 1
        page.steps += steps
        if not page.returned_spans:  # nearly always
            page.cursor += count
            return ((page.cursor - count, count),)
        spans: list[Span] = []
        while count and page.returned_spans:
            start, length = page.returned_spans.pop(0)
            length_taken = min(length, count)
            spans.append((start, length_taken))
            count -= length_taken
            if length_taken < length:
                page.returned_spans.insert(0, (start + length_taken, length - length_taken))
        if count:
            spans.append((page.cursor, count))
            page.cursor += count
        return tuple(spans)

    def give_back(self, shard: int, spans: Sequence[Span], steps: int) -> None:
        """Takes back the positions of a refused or abandoned round. The next round of the shard gets them, earliest first."""
        page = self.pages[shard]
        page.visits -= 1
        page.steps -= steps
        page.returned_spans = sorted([*page.returned_spans, *spans])

    def copy_pages(self) -> list[ShardPage]:
        """A copy of all pages, for a checkpoint. Later rounds do not change it."""
        return [replace(page, returned_spans=list(page.returned_spans)) for page in self.pages]

    def load(self, pages: Sequence[ShardPage]) -> None:
        """Takes over copies of the pages."""
        assert [page.windows for page in pages] == [page.windows for page in self.pages], "another set of shards"
        self.pages = [replace(page, returned_spans=list(page.returned_spans)) for page in pages]
