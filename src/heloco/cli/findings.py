"""What `heloco doctor` finds out."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What `heloco doctor` found out about one subject, and whether it is as it should be."""

    subject: str
    is_good: bool
    text: str
