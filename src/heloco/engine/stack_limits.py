"""How wide a stack may be on a device."""

import os

import torch
from torch import nn

from heloco.run import RunConfig

WIDEST = {"cuda": 96, "cpu": 8}
SLICE_COPIES = 8  # of a model's parameters: what one slice of a stack takes at most, activations included


def model_bytes(model: nn.Module) -> int:
    """The bytes of a model's parameters."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def run_bytes(config: RunConfig, model: nn.Module) -> int:
    """What a run holds at most: parameters, momentum and a sum; for each worker what it started from and its result, and where
    AdamW's two moments are kept, those before and mostly also those after the round."""
    models_per_worker = 5 if config.inner.keep_state else 2
    return (3 + models_per_worker * len(config.rounds.paces)) * model_bytes(model)


def free_memory(device: torch.device) -> float:
    """Bytes that runs may take."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return 0.5 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
