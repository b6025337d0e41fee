"""Runs of real processes with faults from a list end with an exact account. `make soak` runs more of them."""

import os

import pytest

pytest.importorskip("uvicorn", reason="the gateway's parts are not installed")
pytest.importorskip("cryptography", reason="the gateway's parts are not installed")

from faults.account import check_ledger
from faults.fault_list import KINDS, POINTS, Fault, faults_in_time, faults_of
from faults.run import engine_settings, run_once, run_side_by_side
from heloco.cluster.protocol.link import LinkDown, digest_of
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.ledger import ShardPage
from heloco.wire.layout import pieces
from support.disks import fill_disk
from support.small_cluster import Hand, delta, opened, report
from support.states import books_at


@pytest.fixture(autouse=True)
def path(monkeypatch):
    """Restores PYTHONPATH after the test."""
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))


def listed(kinds, every, workers, seconds=0.3):
    return [Fault(every * (i + 1), kind, i % workers, POINTS[i % 4], seconds) for i, kind in enumerate(kinds)]


@pytest.mark.parametrize("wire", ["fp32", pytest.param("int4", marks=pytest.mark.long)])
def test_faults_of_every_kind_and_an_exact_account(cache, wire):  # noqa: ARG001 - the children read $HELOCO_CACHE
    account = run_once(listed(KINDS, 20, 3), workers=3, arrivals=330, limit_s=240.0, wire=wire)
    assert set(account["faults"]) == set(KINDS)
    assert account["arrivals"] == 330
    assert account["restarts"]["synchronizer"] >= 1 and account["restarts"]["worker"] >= 2


@pytest.mark.long
def test_runs_side_by_side_are_stopped_in_time_and_both_have_an_exact_account(cache):  # noqa: ARG001
    faults = [Fault(1.0, "kill a worker", 1), Fault(1.5, "cut", 0), Fault(2.5, "kill the synchronizer")]
    accounts = run_side_by_side(faults, workers=2, seconds=5.0, step_s=0.05, fresh=False)
    assert sum(accounts["with faults"]["faults"].values()) == 3 and not accounts["without"]["faults"]
    assert 0 < accounts["in the time"]["with faults"] <= accounts["with faults"]["arrivals"]
    assert 0 < accounts["in the time"]["without"] <= accounts["without"]["arrivals"]


RAY_FAULTS = (
    "kill a Ray worker", "corrupt", "kill the synchronizer", "double", "kill the Ray node", "cut", "kill a worker at a point",
)  # fmt: skip


def account_on_ray(kinds, every, step_s):
    pytest.importorskip("ray", reason="ray is not installed")
    run, _, workers, _ = engine_settings("ray")
    account = run_once(listed(kinds, every, workers), workers, every * (len(kinds) + 3), 300.0, run, step_s)
    assert sum(account["faults"].values()) == len(kinds)
    return account


@pytest.mark.long
def test_a_run_on_ray_loses_workers_its_synchronizer_and_a_node(cache):  # noqa: ARG001
    account = account_on_ray(RAY_FAULTS, 15, 0.05)
    assert account["restarts"]["node"] >= 1 and account["restarts"]["worker"] >= 1


@pytest.mark.long
def test_a_run_on_ray_loses_its_head(cache):  # noqa: ARG001
    account = account_on_ray(("kill the Ray head", "kill heloco serve", "kill the Ray head"), 40, 0.1)
    assert account["restarts"]["synchronizer"] >= 1


@pytest.mark.long
@pytest.mark.parametrize("engine", ["https", "ray"])
def test_two_hundred_random_faults(engine):
    run, kinds, workers, step_s = engine_settings(engine)
    account = run_once(faults_of(0, 200, workers, 4000, kinds), workers, 4000, 3000.0, run, step_s)
    assert sum(account["faults"].values()) == 200
    print(account)


# ---- the lists and the account themselves


def test_faults_in_time_are_as_many_as_they_must_be_and_leave_the_end_quiet():
    faults = faults_in_time(2, 125, 4, 3600.0)
    assert len(faults) == 125 and faults == faults_in_time(2, 125, 4, 3600.0)
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert faults[0].at >= 0 and faults[-1].at <= 3590
    assert {fault.kind for fault in faults} == set(KINDS)


def test_the_account_would_find_a_window_that_was_skipped_or_used_twice():
    books = books_at(2, ledger=[ShardPage(20, cursor=12, returned_spans=[(8, 4)])])
    used = [{"shard": 0, "spans": [[0, 4]]}, {"shard": 0, "spans": [[4, 4]]}]
    check_ledger(used, books)
    with pytest.raises(AssertionError, match="window 4 was skipped"):
        check_ledger(used[:1], books)
    with pytest.raises(AssertionError, match="window 4 was used twice"):
        check_ledger([*used, used[0]], books)


# ---- what fault runs have found


def test_a_disk_that_fills_when_a_contribution_is_all_there_makes_its_machine_wait_and_ends_nothing(small_disk):
    """A line could fit into the journal's last block and not into the tape's. That used to end the run for all machines."""
    service = opened(small_disk / "run", arrivals=60, checkpoint_every=0)
    hand, denied = Hand(service, "m"), 0
    for seed in range(40):
        hand.take()
        upload = service.contributions.upload(hand.ticket, hand.key)
        turn = upload.begin(0)
        for piece in pieces(upload.layout, delta(seed)):
            upload.write(turn, piece)
        digest = digest_of(upload.layout, delta(seed))
        fill_disk(small_disk / "ballast")
        try:
            service.contributions.commit(hand.ticket, hand.key, digest, report())
        except Refused as refused:
            assert refused.code is RefusalCode.DISK, refused
            denied += 1
        (small_disk / "ballast").unlink()
        service.contributions.commit(hand.ticket, hand.key, digest, report())
    assert denied and not service.state.has_failed and service.state.run.synchronizer.arrivals == 40
    service.close()


def test_a_node_that_finds_no_synchronizer_for_long_connects_anew(monkeypatch):
    """The head was replaced by another at the same address, and the node's connection never finds an actor again."""
    from heloco.cluster.ray import ray_link as module

    class Heads:
        """Ray, with one head for each connection: only the second has a synchronizer."""

        connections = 0

        def __getattr__(self, name):
            return getattr(module.require_ray(), name)

        def is_initialized(self):
            return self.connections > 0 and not self.is_gone

        def start(self, *_, **__):
            self.connections, self.is_gone = self.connections + 1, False
            return self

        def stop(self):
            self.is_gone = True

        def get_actor(self, *_, **__):
            if self.connections < 2:
                raise ValueError
            return "the synchronizer"

    pytest.importorskip("ray", reason="ray is not installed")
    heads, real = Heads(), module.require_ray
    monkeypatch.setattr(module, "require_ray", lambda: heads)
    monkeypatch.setattr(module, "start_ray", heads.start)
    link = module.RayLink("ray:head:6379")
    monkeypatch.setattr(module, "require_ray", real)
    for _ in range(2):
        with pytest.raises(LinkDown, match="No run is being served"):
            link.actor()
    assert heads.connections == 1
    monkeypatch.setattr(module, "RECONNECT_AFTER_S", 0.0)
    with pytest.raises(LinkDown, match="No run is being served"):
        link.actor()
    assert link.actor() == "the synchronizer" and heads.connections == 2
