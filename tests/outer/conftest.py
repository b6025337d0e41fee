"""Outer steps through the GPU kernels, with or without a GPU."""

from collections.abc import Iterator
from operator import attrgetter

import pytest
import torch

from heloco.outer import kernels


@pytest.fixture(scope="session")
def triton_runs() -> None:
    """Some releases of Triton's interpreter and numpy do not go together."""
    from support.gpu_blocks import DEVICE, counted

    out = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    try:
        counted[(1,)](torch.full_like(out, 3), out)
    except Exception as error:
        pytest.skip(f"Triton does not run here: {error!r}")
    assert out.item() == 3


@pytest.fixture
def through_the_gpu_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from support.gpu_blocks import DEVICE

    monkeypatch.setattr(kernels, "on_gpu", attrgetter(f"is_{DEVICE}"))
    kernels.gpu_kernels.cache_clear()
    yield
    kernels.gpu_kernels.cache_clear()
