"""Randomness without a global generator: every draw has a name, and its seed is derived from the run's seed and that name."""

import hashlib


def derive(seed: int, *name: int | str) -> int:
    """A 63-bit seed for the draw called `name`, e.g. derive(seed, "round", worker, index). The same on every machine."""
    text = "/".join(map(str, (seed, *name)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
