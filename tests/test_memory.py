"""What a synchronizer forgets of mapped files is not lost, and changes no number."""

import pytest
import torch

from heloco.cluster.server import resident_memory as memory
from heloco.wire.layout import Layout, map_tensors, write

linux = pytest.mark.skipif(not memory.LINUX, reason="only Linux tells how much memory a process has")


@linux
def test_what_is_forgotten_is_no_memory_any_more_and_comes_back(tmp_path):
    size = 50_000_000
    tensors = {"pseudo_gradient.0": torch.arange(size // 4, dtype=torch.float32)}
    layout = Layout.of(tensors)
    with (tmp_path / "file").open("wb", buffering=0) as file:
        write(file, layout, tensors)
    found = map_tensors(tmp_path / "file", layout)["pseudo_gradient.0"]
    before = memory.resident_bytes()
    assert torch.equal(found, tensors["pseudo_gradient.0"])
    assert memory.resident_bytes() > before + 0.9 * size
    memory.forget(found.data_ptr(), found.nbytes)
    assert memory.resident_bytes() < before + 0.1 * size
    assert torch.equal(found, tensors["pseudo_gradient.0"])
