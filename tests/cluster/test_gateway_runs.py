"""Whole runs through the HTTPS gateway, over real TLS on loopback: they learn, and compute what they compute in one process."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from support.gateways import SETTINGS, train
from support.local_link import LocalLink
from support.runs import evals, tape

pytest.importorskip("httpx", reason="httpx is not installed")
pytest.importorskip("starlette", reason="starlette is not installed")
pytest.importorskip("uvicorn", reason="uvicorn is not installed")
pytest.importorskip("cryptography", reason="cryptography is not installed")

pytestmark = pytest.mark.usefixtures("one_thread")


def test_machines_train_through_the_gateway_and_the_loss_falls(serve, tiny):
    served = serve()
    with ThreadPoolExecutor(2) as threads:
        ends = list(threads.map(lambda i: train(tiny, served.link(), f"m{i}"), range(2)))
    assert ends == ["The run has ended: all arrivals are in"] * 2
    lines = tape(served.folder)
    assert len(lines) == SETTINGS["arrivals"]
    assert {line["machine"].partition("#")[0] for line in lines} == {"m0", "m1"}
    served.service.finish_evaluations()
    losses = [line["mean"]["loss"] for line in evals(served.folder)]
    assert losses[-1] < losses[0] - 0.5


def test_one_machine_over_https_computes_what_it_computes_here_to_the_bit(serve, tiny):
    local_run, remote_run = serve(arrivals=8), serve(arrivals=8)
    train(tiny, LocalLink(local_run.service), "m")
    train(tiny, remote_run.link(), "m")
    assert [line["digest"] for line in tape(local_run.folder)] == [line["digest"] for line in tape(remote_run.folder)]
    assert local_run.digest() == remote_run.digest()


def test_a_machine_evaluates_over_https_what_the_synchronizer_would_have_found(serve, tiny):
    synchronizers_run, machines_run = serve(arrivals=8, eval_every=2), serve(arrivals=8, eval_every=2)
    for served, evaluates in ((synchronizers_run, False), (machines_run, True)):
        served.service.state.run.finish_evaluations()
        assert train(tiny, served.link(), "m", evaluates=evaluates) == "The run has ended: all arrivals are in"
        served.service.finish_evaluations()
    by_synchronizer, by_machine = evals(synchronizers_run.folder), evals(machines_run.folder)
    assert [line.pop("machine", "")[:2] for line in by_machine] == ["", "m#", "m#", "m#", "m#"]
    for line in (*by_synchronizer, *by_machine):
        del line["time_s"]
    assert by_machine == by_synchronizer
