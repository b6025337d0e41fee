"""A run on a real Ray: workers in processes of their own, faults by SIGKILL, the journal as the witness."""

import contextlib
import itertools
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ray", reason="ray is not installed")

import heloco as package
from heloco.cluster.protocol.link import LinkDown, digest_of
from heloco.cluster.protocol.messages import MachineStatus, ModelCommit, Ticket
from heloco.cluster.protocol.refusals import RefusalCode, Refused
from heloco.cluster.ray import Cluster, RayLink, RaySupervisor, actor, ray_link, start_ray
from heloco.cluster.ray.probe import probe, split
from heloco.cluster.ray.ray_cluster import require_ray
from heloco.cluster.ray.ray_internals import LONGEST_SOCKET
from heloco.cluster.ray.replies import Answer, value_of
from heloco.cluster.ray.workers import WorkerStatus
from heloco.cluster.server.process import spec_of
from heloco.errors import RunStopped, UserError
from heloco.records.events import Abandon, Dispatch, Part
from heloco.run import RunFolder
from heloco.wire.layout import Layout, pieces
from ray_folder import beyond_loopback, family, listening
from support import small_cluster
from support.own_loops import adam, batches, net, step
from support.process_memory import read_peak_bytes
from support.ray_runs import LONGEST_S, check_exact, config, events, until
from support.runs import evals, tape


@pytest.fixture(scope="module")
def cluster(cache: Path) -> Iterator[Cluster]:  # noqa: ARG001 - Ray's processes inherit it
    new_cluster = start_ray(store_bytes=300_000_000)
    yield new_cluster
    new_cluster.stop()


# ---- a run that nothing disturbs, and machines that come over every way


JOINING = """
import sys
import torch
from heloco.cluster.client.worker import Worker, task_of
from heloco.cluster.ray import RayLink
torch.set_num_threads(1)
link = RayLink(sys.argv[1])
info = link.describe()
task, config = task_of(info, device="cpu")
print(Worker(task, config).run(link, sys.argv[2], info.run))
"""


@contextlib.contextmanager
def joining(cluster: Cluster, address: str, name: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that is none of Ray's own and takes part."""
    assert cluster.token_file
    bare = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment = bare | {"RAY_AUTH_TOKEN_PATH": str(cluster.token_file), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", JOINING, address, name]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_local_workers_a_node_and_a_client_train_together(cluster, tmp_path, monkeypatch):
    arrivals = 32
    folder = tmp_path / "run"
    spec = spec_of(config(arrivals=arrivals, inner_steps=20, paces=[1.0] * 4, min_workers=4, wire="int4"), folder)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(RaySupervisor(spec, workers=2, cluster=cluster))
        outside = [
            stack.enter_context(joining(cluster, address, name))
            for address, name in ((f"ray:{cluster.address}", "node"), (cluster.client_address, "client"))
        ]
        denied(engine)
        with (
            monkeypatch.context() as patch,
            pytest.raises(UserError, match=r"The cluster's Ray is .* and this machine's is 2\.9\.3"),
        ):
            patch.setattr(require_ray(), "__version__", "2.9.3")
            RayLink().describe()
        with pytest.raises(UserError, match="serves a run already"):
            RaySupervisor(spec_of(config(arrivals=2), tmp_path / "second"), cluster=cluster)
        assert engine.wait(LONGEST_S).kind == "finished"
        outputs = [process.communicate(timeout=LONGEST_S) for process in outside]
        assert all("The run has ended: all arrivals are in" in out for out, _ in outputs), outputs
        until(lambda: len([w for w in engine.workers() if w.ended]) == 2, "the end of the workers")
        assert not any(worker.has_failed for worker in engine.workers())
        assert engine.status().ended.kind == "finished" and not engine.trouble()
    assert {line["machine"].partition("#")[0] for line in tape(folder)} == {"local-0", "local-1", "node", "client"}
    assert all(2 * line["bytes_up"] < line["bytes_down"] for line in tape(folder))
    assert evals(folder)[-1]["mean"]["loss"] < evals(folder)[0]["mean"]["loss"] - 0.5
    check_exact(folder, arrivals)


def test_a_suspended_run_keeps_a_machine_of_the_cluster_which_goes_on_with_its_next_synchronizer(cluster, tmp_path):
    folder = tmp_path / "run"
    spec = spec_of(config(arrivals=24, inner_steps=20, paces=[1.0] * 2, beat_s=0.5), folder)
    with RaySupervisor(spec, cluster=cluster) as engine, joining(cluster, f"ray:{cluster.address}", "node") as outside:
        until(lambda: engine.status().arrivals >= 6, "six arrivals")
        [machine] = engine.status().machines
        engine.suspend("an update")
        assert engine.wait(LONGEST_S).kind == "suspended"
        with pytest.raises(Refused) as refused:
            engine.link.describe()
        assert refused.value.code is RefusalCode.SUSPENDED
        engine.close()
        with RaySupervisor(spec.for_restart(), cluster=cluster) as second:
            assert second.wait(LONGEST_S).kind == "finished"
            output, errors = outside.communicate(timeout=LONGEST_S)
            assert "The run is back." in output and "The run has ended: all arrivals are in" in output, (output, errors)
    assert {line["machine"] for line in tape(folder)} == {machine.machine}
    assert not [event for _, event in events(folder) if isinstance(event, Abandon)]
    check_exact(folder, 24)


def denied(engine: RaySupervisor) -> None:
    """What the service refuses comes back with its code and its sentence."""
    nobody = Ticket(machine="nobody#0", secret="x")
    with pytest.raises(Refused, match="join again") as refused:
        engine.link.next_round(nobody, 0.0)
    assert refused.value.code is RefusalCode.UNKNOWN_MACHINE
    with pytest.raises(Refused) as refused:
        engine.link.beat(nobody, 0)
    assert refused.value.code is RefusalCode.UNKNOWN_MACHINE
    with pytest.raises(Refused, match="run-id") as refused:
        engine.link.read("run-id", 0)
    assert refused.value.code is RefusalCode.PATH


def test_an_internal_error_of_the_supervisor_ends_the_run_and_is_logged_with_its_place(cluster, tmp_path, monkeypatch, caplog):
    spec = spec_of(config(arrivals=1000), tmp_path / "run")
    with RaySupervisor(spec, cluster=cluster) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(cluster, "has_ended", lambda: {}["nothing"])
            with pytest.raises(RunStopped, match=r"internal error \(KeyError"):
                engine.wait(LONGEST_S)
        [record] = [record for record in caplog.records if record.name == "heloco.ray"]
        assert record.exc_info is not None and record.exc_info[0] is KeyError


def test_a_loop_of_ones_own_evaluates_over_ray(cluster, tmp_path):
    model, messages, results = net(), list[str](), iter([1.0, math.nan, 3.0])
    optimizer = adam(model)
    spec = spec_of(small_cluster.config(paces=[1.0], arrivals=4, eval_every=2), tmp_path / "run")
    with RaySupervisor(spec, cluster=cluster) as engine:
        link = RayLink()
        with package.join(link, model, optimizer, tell=messages.append, evaluate=lambda _: next(results)) as run:
            for i, batch in enumerate(batches()):
                if i == 3:
                    run.report_eval(2.0)
                step(model, optimizer, batch)
        assert engine.wait(LONGEST_S).kind == "finished"
    lines = [(line["arrival"], line.get("own_steps", 0), line["mean"]["loss"]) for line in evals(tmp_path / "run")]
    assert lines == [(0, 0, 1.0), (1, 1, 2.0), (4, 0, 3.0)]
    [left_out] = [line for line in messages if "is left out" in line]
    assert left_out.startswith("The evaluation at arrival 2 is left out. The score 'loss' of 'validation' is not finite")


# ---- tensors in pieces


@given(st.lists(st.integers(0, 40), max_size=30))
def test_pieces_are_the_same_bytes_and_none_is_empty_or_too_long(sizes):
    content = bytes(range(256)) * 5
    ends = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    parts = [memoryview(content)[a:b] for a, b in itertools.pairwise(ends)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_link, "PIECE", 40)
        contents = [piece.tobytes() for piece in ray_link.in_pieces(parts)]
    assert b"".join(contents) == content[: ends[-1]]
    assert all(0 < len(piece) <= 40 for piece in contents)


def test_a_contribution_in_pieces_goes_on_where_it_was_cut(cluster, tmp_path, monkeypatch):  # noqa: ARG001 - needs a Ray
    import ray

    monkeypatch.setattr(actor, "PIECE", 1 << 16)
    spec = spec_of(small_cluster.config(paces=[1.0]), tmp_path / "run")
    synchronizer = actor.SynchronizerActor()
    synchronizer.begin(spec, 1)
    try:
        blocks = {"parameter.0": torch.arange(150_000.0) / 1e6}
        layout = Layout.from_tensors(blocks)
        request = small_cluster.join_request("one", layout=layout.entries)
        ticket = value_of(synchronizer.join(request, None)).ticket
        references = [ray.put(piece.copy()) for piece in ray_link.in_pieces(pieces(layout, blocks))]
        commit = ModelCommit(names=("w",), digest=digest_of(layout, blocks))
        assert synchronizer.send_model(ticket, layout, references, commit) == Answer(None)
        contribution = Layout(value_of(synchronizer.join(request, ticket)).contribution_layout)
        key = value_of(synchronizer.next_round(ticket, 5.0)).key
        start = value_of(synchronizer.fetch(ticket, key))
        assert np.concatenate([ray.get(piece) for piece in start]).tobytes() == b"".join(pieces(layout, blocks))

        delta = {"pseudo_gradient.0": torch.linspace(-1, 1, 150_000)}
        whole = b"".join(pieces(contribution, delta))
        upload = synchronizer.service.contributions.upload(ticket, key)
        upload.write(upload.begin(0), whole[:200_000])
        boxed = [ray.put(np.frombuffer(whole[at : at + 65_536], np.uint8)) for at in range(0, len(whole), 65_536)]
        answer = synchronizer.hand_in(ticket, key, boxed, digest_of(contribution, delta), small_cluster.report())
        assert value_of(answer).arrival == 1
        [file] = (tmp_path / "run" / "journal").glob("*.safetensors")
        assert file.read_bytes() == whole
    finally:
        synchronizer.close()


# ---- faults


BEAT_S = 2.0  # whoever stands still for a moment is not taken for lost


def stopped_with_a_round(engine: RaySupervisor, worker: WorkerStatus) -> MachineStatus | None:
    """What the run knows of the worker, which stands still and holds a round; or None, and it goes on."""
    os.kill(worker.pid, signal.SIGSTOP)
    before = engine.status().arrivals
    until(lambda: engine.status().arrivals >= before + 2, "what others send later, so that what it had sent is in")
    machine = next(m for m in engine.status().machines if m.name == worker.name)
    if machine.round:
        return machine
    os.kill(worker.pid, signal.SIGCONT)
    return None


@pytest.fixture(scope="module")
def broken(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run whose worker is killed, and later its synchronizer, each in the middle of everything."""
    folder = tmp_path_factory.mktemp("broken") / "run"
    arrivals = 120
    messages: list[str] = []
    with RaySupervisor(
        spec_of(config(arrivals=arrivals, inner_steps=30, beat_s=BEAT_S), folder),
        workers=3,
        cluster=cluster,
        tell=messages.append,
    ) as e:
        until(lambda: len({m.name for m in e.status().machines if m.arrivals}) == 3, "three contributors")
        worker = e.workers()[0]
        victim = until(lambda: stopped_with_a_round(e, worker), "a round under way")
        os.kill(worker.pid, signal.SIGKILL)
        struck_s = e.status().time_s
        until(lambda: any("another takes its place" in text for text in messages), "the worker's death")
        until(lambda: e.status().arrivals >= arrivals // 2, "half of the run")
        first = e.pid
        os.kill(first, signal.SIGKILL)
        until(lambda: e.restarts == 1, "the restart")
        assert e.wait(LONGEST_S).kind == "finished"
        until(lambda: len([w for w in e.workers() if w.ended]) == 3, "the end of the workers")
        assert e.pid != first
        workers = e.workers()
    return {
        "folder": folder,
        "arrivals": arrivals,
        "victim": victim,
        "struck_s": struck_s,
        "workers": workers,
        "messages": messages,
    }


def test_the_round_of_a_worker_that_is_killed_goes_to_another_at_once(broken):
    happened = events(broken["folder"])
    victim = broken["victim"].machine
    number, part = next((n, event) for n, event in happened if isinstance(event, Part) and event.machine == victim)
    assert (part.kind, part.text) == ("lost", "its process died")
    abandonment = next((n, event) for n, event in happened if isinstance(event, Abandon) and n > number - 3)
    assert abandonment[1].worker == broken["victim"].round.worker and abandonment[1].text == "its process died"
    patience_s = BEAT_S * 10
    assert part.time_s - broken["struck_s"] < patience_s / 2, "it was noticed by the time-out"
    dispatched = [event for n, event in happened if n > abandonment[0] and isinstance(event, Dispatch)]
    second_dispatch = next(event for event in dispatched if event.worker == abandonment[1].worker)
    assert second_dispatch.machine != victim
    assert not [event for _, event in happened if isinstance(event, Part) and "no progress" in event.text]


def test_a_synchronizer_that_is_killed_goes_on_from_its_journal_and_counts_every_acknowledged_contribution_once(broken):
    assert any("started again from its journal" in text for text in broken["messages"])
    check_exact(broken["folder"], broken["arrivals"])
    lines = tape(broken["folder"])
    for worker in broken["workers"]:
        assert not worker.has_failed, worker
        line_count = sum(line["machine"].partition("#")[0] == worker.name for line in lines)
        assert line_count == worker.rounds, "what it had acknowledged is what counts"


def test_a_recipe_that_cannot_be_served_is_a_sentence_and_leaves_the_cluster_as_it_was(cluster, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "something").touch()
    for _ in range(2):
        with pytest.raises(UserError, match="no empty folder"):
            RaySupervisor(spec_of(config(arrivals=2), tmp_path / "run"), cluster=cluster)
    assert not cluster.has_ended()
    with pytest.raises(LinkDown, match="No run is being served"):
        RayLink().describe()


# ---- closed


def test_ray_answers_nobody_without_its_token(cluster):
    assert cluster.token_file and cluster.token_file.stat().st_mode & 0o777 == 0o600
    for address, client in ((cluster.address, False), (cluster.client_address.removeprefix("ray://"), True)):
        probe(address, cluster.token_file.read_text(), None, client=client)
        for token, says in (("", "is missing"), ("wrong", "was refused")):
            with pytest.raises(UserError, match=f"wants its token, and ours {says}"):
                probe(address, token, None, client=client)


def test_a_client_without_the_token_is_told_so(cluster):
    command = [sys.executable, "-c", JOINING, cluster.client_address, "nobody"]
    bare = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"HOME": "/nonexistent"}
    result = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=LONGEST_S)
    assert "UserError" in result.stderr and "wants its token, and ours is missing" in result.stderr


def test_no_process_of_ray_listens_beyond_loopback(cluster):
    """All of them, also those of workers and of Ray's own helpers."""
    import ray

    def nothing() -> None: ...

    ray.get(ray.remote(nothing).remote(), timeout=LONGEST_S)
    addresses = listening(family(os.getpid()))
    ports = {int(where.rpartition(":")[2]) for where in addresses}
    assert {split(cluster.address)[1], split(cluster.client_address.removeprefix("ray://"))[1]} <= ports
    assert len(addresses) >= 5 and not beyond_loopback(addresses), addresses


def test_rays_files_are_this_users_alone(cluster):
    assert cluster.folder is not None
    cluster.folder.check()
    assert cluster.folder.path.stat().st_mode & 0o777 == 0o700
    assert cluster.token_file.parent == cluster.folder.path and (cluster.folder.rays_own / "session_latest").exists()


def test_rays_sockets_have_no_longer_paths_than_the_folder_was_checked_for(cluster):
    assert cluster.folder is not None
    sockets = [path.relative_to(cluster.folder.rays_own) for path in cluster.folder.rays_own.rglob("*") if path.is_socket()]
    assert len(sockets) >= 2, "Ray has its sockets elsewhere: LONGEST_SOCKET is of no use"
    longest_pid = LONGEST_SOCKET.partition("/")[0].rpartition("_")[2]
    for path in sockets:
        session, pid = path.parts[0].rsplit("_", 1)
        assert pid.isdecimal() and len(pid) <= len(longest_pid), path
        path_of_longest_pid = Path(f"{session}_{longest_pid}", *path.parts[1:])
        assert len(str(path_of_longest_pid)) <= len(LONGEST_SOCKET), f"{path} is longer than LONGEST_SOCKET"


# ---- long ones


def peak_of(cluster: Cluster, folder: Path, workers: int, **settings: Any) -> tuple[int, int]:
    """(most memory of the synchronizer's process, Ray's store included as far as it sees it; the model's bytes), in a run of six
    arrivals each."""
    arrivals, peak = 6 * workers, 0
    settings |= {"inner_steps": 1, "checkpoint_every": 0, "eval_every": 0, "assign": "flexible"}
    small = config(arrivals=arrivals, paces=[1.0] * workers, **settings)
    with RaySupervisor(spec_of(small, folder), workers=workers, cluster=cluster) as engine:
        end = time.monotonic() + LONGEST_S
        while engine.status().ended is None and time.monotonic() < end:
            peak = max(peak, read_peak_bytes(engine.pid))
        assert engine.wait(10).kind == "finished"
    return peak, 4 * RunFolder.open(folder).facts().parameters


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 6])
def test_the_synchronizers_memory_is_four_models_at_most_whatever_the_number_of_workers(cluster, tmp_path, workers):
    nothing, _ = peak_of(cluster, tmp_path / "tiny", workers)
    peak, model = peak_of(cluster, tmp_path / "large", workers, width=832, layers=2)
    assert model > 60_000_000
    assert peak - nothing <= 4 * model, f"{(peak - nothing) / model:.2f} models"
