"""A contribution in a file is read window by window: a step needs memory for one window, and changes no number."""

import mmap
import sys
from pathlib import Path

import pytest
import torch

from heloco.disk import drop_mapped_pages
from heloco.finite import all_finite
from heloco.ledger import Ledger
from heloco.methods import METHODS
from heloco.outer.kernels import native
from heloco.outer.kernels.windows import WINDOW, parts
from heloco.policy import make_choice, make_weight
from heloco.synchronizer import Contribution, Synchronizer
from heloco.wire import blocks
from heloco.wire.layout import Layout, map_tensors, write
from support.process_memory import read_peak_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how much memory a process has")
SHAPES = ((5 * WINDOW + 7,), (3, 11), *[(1000, 1000)] * 24)
"""One block of several windows, a tiny one, and many that share a window: 180 MB."""
BYTES = 4 * sum(torch.Size(shape).numel() for shape in SHAPES)
ROOM = 4 * 4 * WINDOW
"""Bytes that a step may take beside θ and m: of a window, and of what is computed with it."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Layout]:
    """A contribution in a file."""
    numbers = torch.Generator().manual_seed(0)
    tensors = blocks.name_contribution([torch.randn(shape, generator=numbers) * 1e-3 for shape in SHAPES], [])
    path, layout = tmp_path_factory.mktemp("stored") / "file", Layout.from_tensors(tensors)
    with path.open("wb", buffering=0) as file:
        write(file, layout, tensors)
    return path, layout


def peak_growth(work) -> int:
    """Bytes that this process held more at most while it worked."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what is held now
    except OSError as error:
        pytest.skip(f"the peak of this process cannot be measured here ({error})")
    before = read_peak_bytes("self")
    work()
    return read_peak_bytes("self") - before


def synchronizer(method: str) -> Synchronizer:
    chosen = METHODS[method]
    parameters = [torch.zeros(shape) for shape in SHAPES]
    return Synchronizer(
        chosen.build(parameters, workers=1), inner_steps=[1], windows_per_step=1, ledger=Ledger([1000]),
        choose_shard=make_choice("fixed", workers=1, shards=1, seed=0), weight=make_weight(chosen.weight), barrier=chosen.barrier,
    )  # fmt: skip


def receive(synchronizer: Synchronizer, stored: tuple[Path, Layout], release) -> None:
    current_round = synchronizer.dispatch(0, with_start=False)
    deltas = blocks.blocks_of(blocks.PSEUDO_GRADIENT, map_tensors(*stored))
    arrival = synchronizer.receive(Contribution(0, current_round.index, current_round.version, deltas, release=release))
    assert arrival.verdict == "applied"


def test_what_is_dropped_is_no_memory_any_more_and_comes_back(stored):
    deltas = blocks.blocks_of(blocks.PSEUDO_GRADIENT, map_tensors(*stored))
    before, total = resident_bytes(), sum(float(d.sum()) for d in deltas)
    assert resident_bytes() > before + 0.9 * BYTES
    for delta in deltas:
        drop_mapped_pages(delta.data_ptr(), delta.nbytes)
    assert resident_bytes() < before + 0.1 * BYTES
    assert sum(float(d.sum()) for d in deltas) == total


def test_a_check_for_nan_needs_memory_for_a_window(stored):
    deltas = blocks.blocks_of(blocks.PSEUDO_GRADIENT, map_tensors(*stored))
    assert peak_growth(lambda: all_finite(parts(deltas, drop_mapped_pages))) < ROOM
    deltas[-1][0, 0] = torch.nan  # a copy of its page, in this process alone
    assert not all_finite(parts(deltas, None))


@pytest.mark.parametrize("method", ["heloco-ramp", "heloco", "mla", "delayed-nesterov", "async-nesterov", "sync-nesterov"])
def test_a_step_needs_memory_for_a_window_and_gives_the_same_bits(stored, method):
    ours, plain = synchronizer(method), synchronizer(method)
    for _ in range(2):  # with the second step the momentum is no longer zero
        receive(plain, stored, None)
    receive(ours, stored, drop_mapped_pages)
    in_memory = 0 if native.available else 1  # blocks; the portable kernels release one at a time
    if "nesterov" in method:
        in_memory = 2  # torch's own SGD needs a copy of each block
    assert peak_growth(lambda: receive(ours, stored, drop_mapped_pages)) < ROOM + in_memory * 4 * SHAPES[0][0]
    assert all(map(torch.equal, ours.thetas, plain.thetas))
