"""The global generators, seeded for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds the generators that a model's own randomness (dropout) draws from, here and on its device; no other device's. At the
    end they are as they were."""
    is_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if is_gpu else []):
        torch.default_generator.manual_seed(seed)
        if is_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield
