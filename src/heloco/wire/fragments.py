"""A start in several fragments of about equal size: whole blocks that follow each other."""

from collections.abc import Sequence

from heloco.errors import UserError


def fragments_of(sizes: Sequence[int], count: int) -> list[int]:
    """The fragment of each block, for blocks of these sizes in bytes."""
    if count > len(sizes):
        raise UserError(f"fragments is {count}, but the model has only {len(sizes)} blocks: give a smaller number.")
    fragments, before, total = [], 0, max(1, sum(sizes))
    for size in sizes:
        fragments.append(min(count - 1, count * (2 * before + size) // (2 * total)))
        before += size
    return fragments


def share_after_fragments(sizes: Sequence[int], count: int) -> list[float]:
    """By block: which share of all bytes comes after the block's fragment."""
    fragments = fragments_of(sizes, count) if sizes else []
    by_fragment = [0] * count
    for fragment, size in zip(fragments, sizes, strict=True):
        by_fragment[fragment] += size
    return [sum(by_fragment[fragment + 1 :]) / max(1, sum(sizes)) for fragment in fragments]
