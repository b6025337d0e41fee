"""What a synchronizer forgets of mapped files is not lost, and changes no number."""

import pytest
import torch

from conftest import tape
from heloco.engine.cluster import memory
from heloco.engine.cluster.link import LocalLink
from heloco.engine.cluster.serving import external_run
from heloco.methods import METHODS
from heloco.run.tensors import Layout, mapped, write
from small_cluster import REPORT, config

linux = pytest.mark.skipif(not memory.LINUX, reason="only Linux tells how much memory a process has")


@linux
def test_what_is_forgotten_is_no_memory_any_more_and_comes_back(tmp_path):
    size = 50_000_000
    tensors = {"pseudo_gradient.0": torch.arange(size // 4, dtype=torch.float32)}
    layout = Layout.of(tensors)
    with (tmp_path / "file").open("wb", buffering=0) as file:
        write(file, layout, tensors)
    found = mapped(tmp_path / "file", layout)["pseudo_gradient.0"]
    before = memory.resident_bytes()
    assert torch.equal(found, tensors["pseudo_gradient.0"])
    assert memory.resident_bytes() > before + 0.9 * size
    memory.forget(found.data_ptr(), found.nbytes)
    assert memory.resident_bytes() < before + 0.1 * size
    assert torch.equal(found, tensors["pseudo_gradient.0"])


SETTINGS = [*({"method": method} for method in METHODS), {"norm_limit": 1.5, "norm_policy": "clip"}]
BLOCKS = {f"parameter.{i}": torch.full((300, 100), 0.1 * i) for i in range(3)}
"""Of many pages each."""


@linux
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_a_run_that_forgets_all_the_time_has_the_same_numbers(settings, tmp_path, monkeypatch):
    forgotten: list[int] = []
    real = memory.forget
    monkeypatch.setattr(memory, "forget", lambda address, size: forgotten.append(size) or real(address, size))
    monkeypatch.setattr(memory, "FROM", 0.0)
    monkeypatch.setattr(memory, "LOOK_S", 0.0)
    as_it_is = history(tmp_path / "as it is", settings)
    assert not forgotten
    monkeypatch.setattr(memory, "WORTH", 0)
    assert history(tmp_path / "forgets", settings) == as_it_is
    assert set(forgotten) == {120_000}


def history(folder, settings):
    """(verdict, digest of the parameters) of twelve arrivals of two machines."""
    service = external_run(config(arrivals=12, paces=[1.0, 1.0], participation=100, **settings), folder)
    link, layout = LocalLink(service), Layout.of(BLOCKS)
    machines = [link.join(f"m{i}", returning=None, pace_s=None, layout=layout)["machine"] for i in range(2)]
    link.send_model(machines[0], layout, BLOCKS, ["a", "b", "c"])
    numbers = torch.Generator().manual_seed(0)
    for step in range(6):
        taken = [link.next_round(machine, 0.0) for machine in machines]
        for machine, held in zip(machines, taken, strict=True):
            delta = {f"pseudo_gradient.{i}": torch.randn(300, 100, generator=numbers) * 0.01 * (1 + step % 3) for i in range(3)}
            key = (held["worker"], held["round"], held["version"])
            link.hand_in(machine, key, service.recorded.layout, delta, REPORT)
    service.close()
    lines = [(line["verdict"], line["digest"]) for line in tape(folder)]
    assert len(lines) == 12
    return lines
