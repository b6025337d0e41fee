"""The attacks of `tests/attack/`, in short: real processes over loopback. `make attack` runs them in full."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

for part in ("starlette", "httptools", "cryptography", "httpx"):
    pytest.importorskip(part, reason=f"{part} is not installed")

import exhausted  # noqa: E402
import fuzz  # noqa: E402
import herd  # noqa: E402
import idle_connections  # noqa: E402
import pipelined  # noqa: E402
import rig  # noqa: E402
import sustained_flood  # noqa: E402

FOLDER = Path(rig.__file__).parent


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rig.Serving]:
    with rig.Serving(tmp_path_factory.mktemp("serving")) as new_serving:
        yield new_serving
        new_serving.check_well()


def test_a_thousand_idle_connections_stop_nothing(tmp_path):
    """The run may open 256 files. Each kind of connection is there while honest machines work."""
    figures = idle_connections.attack(tmp_path, connections=350, addresses_used=7, descriptors=256, arrivals=30)
    assert set(figures["arrivals_per_s"]) == {"before", "open_tcp", "open_tls", "ask_without_token", "after"}


def test_one_address_holds_few_places_for_a_few_seconds(serving):
    figures = idle_connections.attack_from_one_address(serving, connections=300)
    assert figures["held"] <= idle_connections.FEW and figures["closed_after_s"] < 15


def test_a_flood_that_comes_again_and_again_stops_nothing(serving):
    figures = sustained_flood.attack(serving, strangers=500, addresses_used=3, seconds=2.0)
    assert figures["strangers"]["refused"] > 0


def test_pipelined_requests_take_no_memory(serving):
    assert pipelined.attack(serving, requests=50_000, connections=2)["requests_sent"] > 0


def test_machines_behind_one_router_come_back_together(serving):
    assert herd.attack(serving, machines=100)["last_in_after_s"] < herd.WITHIN_S


@pytest.mark.skipif(not hasattr(exhausted.resource, "prlimit"), reason="limits of another process cannot be changed here")
@pytest.mark.parametrize("what", [exhausted.DESCRIPTORS, exhausted.MEMORY], ids=["descriptors", "memory"])
def test_without_descriptors_or_memory_requests_are_refused_as_busy_until_there_are_some_again(serving, what):
    answers = exhausted.ask_meanwhile(serving, what)
    assert answers["503 busy"] == 5


def test_changed_requests_are_answered(tmp_path):
    figures = fuzz.attack(tmp_path, requests=400, seed=0)
    assert figures["requests"] == 400 and figures["endpoints"] >= 23
    assert {200, 400, 401, 404, 405, 409} <= figures["statuses"].keys()


def test_make_attack_runs_every_attack():
    """One that is added here must be added there."""
    makefile = (FOLDER.parents[1] / "Makefile").read_text()
    programs = [path for path in FOLDER.glob("*.py") if not path.name.startswith("test_")]
    alone = {path.name for path in programs if 'if __name__ == "__main__"' in path.read_text()}
    assert alone == set(re.findall(r"tests/attack/(\w+\.py)", makefile))
