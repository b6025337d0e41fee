"""How often a machine tries again while its run is out of reach, and what its link to the run offers."""

import inspect
from importlib import import_module

import pytest

from heloco.cluster.client.connect import LINKS
from heloco.cluster.client.run_client import PAUSE_LIMIT_S, pause_after
from heloco.cluster.protocol.link import AdminLink, Link


@pytest.mark.parametrize("down_s", [0.05, 0.5, 3.0, 10.0, 15.0, 60.0, 600.0])
def test_a_run_that_is_back_is_noticed_soon_and_is_not_asked_all_the_time(down_s: float) -> None:
    waited_s, tries = 0.0, 0
    while waited_s < down_s:
        waited_s += pause_after(waited_s)
        tries += 1
    assert waited_s - down_s <= max(0.1, min(PAUSE_LIMIT_S, down_s / 8))
    assert tries <= 50 + down_s / PAUSE_LIMIT_S


@pytest.mark.parametrize("scheme", LINKS)
def test_a_link_offers_every_request_with_the_same_parameters(scheme):
    """`connect` finds the links by name, where no type checker sees them."""
    module, name = LINKS[scheme]
    link = getattr(import_module(module), name)
    requests = {
        n: f for protocol in (Link, AdminLink) for n, f in vars(protocol).items() if inspect.isfunction(f) and n[0] != "_"
    }
    assert len(requests) > 15
    for request, function in requests.items():
        theirs, ours = inspect.signature(function).parameters, inspect.signature(getattr(link, request)).parameters
        assert [(p.name, p.kind) for p in ours.values()] == [(p.name, p.kind) for p in theirs.values()], request
