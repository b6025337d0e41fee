"""How often a machine tries again while its run is out of reach."""

import pytest

from heloco.cluster.client.run_client import PAUSE_LIMIT_S, pause_after


@pytest.mark.parametrize("down_s", [0.05, 0.5, 3.0, 10.0, 15.0, 60.0, 600.0])
def test_a_run_that_is_back_is_noticed_soon_and_is_not_asked_all_the_time(down_s: float) -> None:
    waited_s, tries = 0.0, 0
    while waited_s < down_s:
        waited_s += pause_after(waited_s)
        tries += 1
    assert waited_s - down_s <= max(0.1, min(PAUSE_LIMIT_S, down_s / 8))
    assert tries <= 50 + down_s / PAUSE_LIMIT_S
