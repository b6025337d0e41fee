"""What computed the numbers of a run: with another device or other rounding they differ by more than their last bits."""

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct


class Provenance(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The device, and how exact it computed."""

    device: str
    """cpu, or the name of the GPU."""
    precision: str
    """To what the operands of products were rounded: fp32 (not at all), tf32 or bf16."""
    torch: str

    def in_words(self) -> str:
        """For example: NVIDIA H200, tf32, torch 2.11.0."""
        return f"{self.device}, {self.precision}, torch {self.torch.partition('+')[0]}"


def note_if_mixed(provenances: Iterable[Provenance]) -> str:
    """A sentence if runs were not all computed alike; else empty."""
    counts = Counter(each.in_words() for each in provenances)
    if len(counts) < 2:
        return ""
    return f"Not all of it was computed alike: {'; '.join(f'{words} ({count})' for words, count in sorted(counts.items()))}."
