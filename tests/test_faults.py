"""Real processes over real TLS meet faults from a list, and the run ends with an exact account. More of it: `make soak`."""

import pytest

pytest.importorskip("uvicorn", reason="the gateway's parts are not installed")
pytest.importorskip("cryptography", reason="the gateway's parts are not installed")

from fault_run import KINDS, Fault, check_ledger, faults_of, one


def test_faults_of_every_kind_and_an_exact_account(cache):  # noqa: ARG001 - the children read $HELOCO_CACHE
    faults = [
        Fault(at, kind, worker=i % 3, point=("fetch", "in a round", "hand in", "handed in")[i % 4], seconds=0.3)
        for i, (at, kind) in enumerate(zip(range(10, 200, 20), KINDS, strict=False))
    ]
    account = one(faults, workers=3, arrivals=220, limit_s=240.0)
    assert set(account["faults"]) == set(KINDS)
    assert account["arrivals"] == 220
    assert account["restarts"]["synchronizer"] >= 1 and account["restarts"]["worker"] >= 2


@pytest.mark.long
def test_two_hundred_random_faults():
    account = one(faults_of(0, 200, 4, 4000), workers=4, arrivals=4000, limit_s=3000.0)
    assert sum(account["faults"].values()) == 200
    print(account)


def test_the_account_would_find_a_window_that_was_skipped_or_used_twice():
    books = {"ledger": [{"cursor": 12, "returned": [[8, 4]]}], "held": []}
    used = [{"shard": 0, "spans": [[0, 4]]}, {"shard": 0, "spans": [[4, 4]]}]
    check_ledger(used, books)
    with pytest.raises(AssertionError, match="window 4 was skipped"):
        check_ledger(used[:1], books)
    with pytest.raises(AssertionError, match="window 4 was used twice"):
        check_ledger([*used, used[0]], books)
