"""Where things are."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
REPOSITORY = TESTS.parent
SHARED = REPOSITORY.parent / "shared"
"""Real text and GPT-2's vocabulary, where they are."""
