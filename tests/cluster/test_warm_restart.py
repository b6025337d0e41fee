"""`heloco serve` starts a synchronizer that dies again, ends with its child, and gives up when nothing helps.

Real processes, faults by signals and by an fsync that fails.
"""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from faults.fault_places import children_of, failing_fsync, is_alive
from heloco.cli.warm_restart import LONGEST_PAUSE_S, RESTART_LIMIT, START_AGAIN, RestartLimit, exit_code
from heloco.cli.warm_restart import reason_to_restart as reason
from support.nursery import Nursery
from support.page_processes import page_processes
from support.programs import HERE, SMALL, Programs, Served, assert_whole, get, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc")
AGAIN = "it is started again from its journal"


def ended_with(code: int) -> int:
    return code << 8


# ---- what to do when a child has ended


def test_a_child_that_was_killed_or_asks_for_it_is_started_again() -> None:
    assert reason(signal.SIGKILL) == "was killed by SIGKILL"
    assert reason(signal.SIGSEGV | 0x80) and reason(40)  # with a core dump; a real-time signal
    assert reason(ended_with(START_AGAIN)) == "stopped"


def test_other_ends_are_final() -> None:
    for status, code in (
        (ended_with(0), 0),
        (ended_with(2), 2),
        (ended_with(143), 143),
        (signal.SIGTERM, 143),
        (signal.SIGINT, 130),
    ):
        assert reason(status) is None and exit_code(status) == code


def test_restarts_without_an_arrival_come_ever_later_and_end() -> None:
    limit = RestartLimit()
    pauses = [limit.pause_s(progress=100) for _ in range(RESTART_LIMIT)]
    assert pauses == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, LONGEST_PAUSE_S, LONGEST_PAUSE_S]
    assert limit.pause_s(progress=101) == 0.0  # an arrival: from the start
    assert limit.pause_s(progress=50) == 0.5  # a tape that was cut back is no progress
    assert [limit.pause_s(progress=50) for _ in range(RESTART_LIMIT - 1)][-2:] == [LONGEST_PAUSE_S, None]


# ---- a served run


def child_of(served: Served) -> int:
    [child] = children_of(served.program.process.pid)
    return child


def goes_on(served: Served, times: int) -> None:
    """Until it was started again so many times, and contributions arrive."""
    wait_until(lambda: served.program.out.read_text().count("The run goes on after arrival") == times, "the run goes on")
    arrivals = served.arrivals()
    wait_until(lambda: served.arrivals() > arrivals or served.program.process.poll() is not None, "another arrival")


def workers_of(run: Path, count: int) -> list[int]:
    """Process ids of local workers that are there."""
    pids = [int((run / "workers" / f"{i}.pid").read_text().split()[0]) for i in range(count)]
    return [pid for pid in pids if is_alive(pid)]


def test_a_run_goes_on_after_its_synchronizer_was_killed_and_after_an_fsync_that_failed(
    programs: Programs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library, order = failing_fsync(tmp_path), tmp_path / "order"
    if library is not None:
        monkeypatch.setenv("LD_PRELOAD", str(library))
        monkeypatch.setenv("FAULT_FSYNC", str(order))
    run = tmp_path / "run"
    served = programs.serve(run, *SMALL, "--seats", "2", "--workers", "1", "--arrivals", "200")
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    guest = programs.join(served, "--name", "guest")
    wait_until(lambda: {m["name"] for m in served.status()["machines"]} == {"local-0", "guest"}, "two machines are here")
    before, local = child_of(served), workers_of(run, 1)
    get(served, f"/page/?key={served.key}")
    pages = page_processes(run)
    assert len(pages) == len(local) == 1

    os.kill(before, signal.SIGKILL)
    goes_on(served, 1)
    assert "was killed by SIGKILL: it is started again from its journal.\n" in served.program.out.read_text()
    assert child_of(served) != before and workers_of(run, 1) == local, "its local worker was taken over"
    wait_until(lambda: not is_alive(pages[0]), "its page's process is gone")
    assert get(served, f"/page/?key={served.key}")[0] == 200

    if library is not None:
        before = child_of(served)
        order.write_text("28")  # ENOSPC
        goes_on(served, 2)
        assert "could not be made durable (No space left on device)" in served.program.err.read_text()
        assert child_of(served) != before and workers_of(run, 1) == local

    serve_result, guest_result = served.program.end(), guest.end()
    assert serve_result.code == 0 and guest_result.code == 0, (serve_result, guest_result)
    assert serve_result.out.count("HELOCO_TOKEN=heloco-worker") == 1, "the addresses are announced once"
    assert "The run is back." in guest_result.out and guest_result.out.endswith("The run has ended: all arrivals are in\n")
    wait_until(lambda: not workers_of(run, 1), "the local worker is gone")
    assert_whole(run, 200)


def test_parent_and_child_end_together(programs: Programs, tmp_path: Path) -> None:
    run = tmp_path / "run"
    served = programs.serve(run, *SMALL, "--seats", "1", "--workers", "1", "--arrivals", "100000", "--patience", "1000")
    wait_until(lambda: served.arrivals() >= 3, "three arrivals")
    child, workers = child_of(served), workers_of(run, 1)
    os.kill(child, signal.SIGSTOP)  # the system ends it all the same
    served.program.signal(signal.SIGKILL)
    assert served.program.end().code == -signal.SIGKILL
    wait_until(lambda: not is_alive(child), "the child is gone", 5.0)
    wait_until(lambda: not any(map(is_alive, workers)), "the local worker is gone", 5.0)

    for number, to_both in ((signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGINT, True)):
        second_service = programs.serve(run, port="")
        assert second_service.address == served.address and second_service.token == served.token
        child = child_of(second_service)
        if to_both:  # as Ctrl-C on a terminal does
            os.kill(child, number)
        second_service.program.signal(number)
        result = second_service.program.end()
        assert result.code == 128 + number and result.out.endswith(f"wait for it. `heloco serve {run}` goes on.\n"), result
        assert not is_alive(child) and AGAIN not in result.out and not result.err


# ---- a machine


def test_a_machine_whose_process_is_killed_comes_back_as_the_same_machine(programs: Programs, tmp_path: Path) -> None:
    served = programs.serve(tmp_path / "run", *SMALL, "--seats", "1", "--arrivals", "100000", "--patience", "1000")
    machine = programs.join(served, "--name", "m")
    wait_until(lambda: served.arrivals() >= 3, "three arrivals")
    [before] = served.status()["machines"]
    for kills in (1, 2):
        [child] = children_of(machine.process.pid)
        os.kill(child, signal.SIGKILL)
        arrivals = served.arrivals()
        wait_until(lambda arrivals=arrivals: served.arrivals() >= arrivals + 3, "three more")
        [after] = served.status()["machines"]
        assert after["machine"] == before["machine"] and children_of(machine.process.pid) != {child: ""}
        output = machine.out.read_text()
        assert (
            output.count("The worker was killed by SIGKILL: it is started again, and comes back as the same machine.\n") == kills
        )
        assert output.count("Joined ") == kills + 1
    [child] = children_of(machine.process.pid)
    machine.signal(signal.SIGTERM)
    result = machine.end()
    assert result.code == 0 and "Left the run (stopped by SIGTERM)" in result.out and not is_alive(child), result
    wait_until(lambda: not served.status()["machines"], "it has left")


def test_a_machine_ends_with_its_parent(programs: Programs, tmp_path: Path) -> None:
    served = programs.serve(tmp_path / "run", *SMALL, "--seats", "1", "--arrivals", "100000", "--patience", "1000")
    machine = programs.join(served, "--name", "m")
    wait_until(lambda: served.arrivals() >= 1, "an arrival")
    [child] = children_of(machine.process.pid)
    os.kill(child, signal.SIGSTOP)
    machine.signal(signal.SIGKILL)
    assert machine.end().code == -signal.SIGKILL
    wait_until(lambda: not is_alive(child), "the child is gone", 5.0)


# ---- when nothing helps, and before it serves


NEW = ("serve", *SMALL, "--seats", "1", "--arrivals", "9", *HERE, "--port", "0", "--out")
IMPATIENT = "import heloco.cli.warm_restart as warm; warm.SHORTEST_PAUSE_S = warm.LONGEST_PAUSE_S = 0.0"


def test_a_synchronizer_that_always_dies_is_given_up(tmp_path: Path, nursery: Nursery) -> None:
    run = tmp_path / "run"
    dies = "import heloco.cli.warm_serve as serving, os; serving.carry_on = lambda *_: os.abort()"
    result = nursery.run(*NEW, run, patch=f"{IMPATIENT}\n{dies}")
    assert result.code == 2 and result.out.count(AGAIN) == RESTART_LIMIT, result
    sentence = f"{RESTART_LIMIT + 1} times without an arrival in between. What was done is kept: `heloco serve {run}` goes on.\n"
    assert result.err.endswith(f"heloco: The synchronizer was killed by SIGABRT, {sentence}"), result.err


def test_a_worker_that_always_dies_is_given_up(nursery: Nursery) -> None:
    dies = "import heloco.cli.join as joining, os; joining.train = lambda *_: os.abort()"
    result = nursery.run("join", "https://127.0.0.1:9", patch=f"{IMPATIENT}\n{dies}")
    assert result.code == 2 and result.out.count("it is started again") == RESTART_LIMIT, result
    sentence = f"The worker was killed by SIGABRT, {RESTART_LIMIT + 1} times without a round in between.\n"
    assert result.err.endswith(f"heloco: {sentence}"), result.err


@pytest.mark.parametrize("text", ["", "ended well"], ids=["empty", "another"])
def test_a_child_is_started_again_whatever_the_reason_says(nursery: Nursery, text: str) -> None:
    dies = "import heloco.cli.join as joining, os; joining.train = lambda *_: os.abort()"
    reworded = f"reason = warm.reason_to_restart; warm.reason_to_restart = lambda s: None if reason(s) is None else {text!r}"
    result = nursery.run("join", "https://127.0.0.1:9", patch=f"{IMPATIENT}\n{dies}\n{reworded}")
    assert result.code == 2 and result.out.count("it is started again") == RESTART_LIMIT, result


def test_what_is_wrong_at_the_first_start_is_final(tmp_path: Path, nursery: Nursery) -> None:
    full = """
        import heloco.cluster.server.process as process, errno
        def full(*_): raise OSError(errno.ENOSPC, "No space left on device")
        process.raise_descriptor_limit = full
    """
    result = nursery.run(*NEW, tmp_path / "run", patch=full)
    assert result.code == 1 and "No space left on device" in result.err and AGAIN not in result.out


def test_all_that_a_child_needs_is_imported_ahead(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    """Else each restart takes as much longer."""
    patch = """
        import sys, heloco.cli.warm_serve as serving
        serve = serving.carry_on
        def counted(*arguments):
            before = set(sys.modules)
            try:
                return serve(*arguments)
            finally:
                print("IMPORTED", *sorted(set(sys.modules) - before))
        serving.carry_on = counted
    """
    few = ("--min-workers", "1", "--give-up-after-s", "0.1")
    code = f"{textwrap.dedent(patch)}\nfrom heloco.cli.main import main\nmain()"
    command = [sys.executable, "-c", code, *NEW, str(tmp_path / "run"), *few]
    result = subprocess.run(command, capture_output=True, text=True, timeout=90, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == 2 and "0 of at least 1 machines are here" in result.stderr, result
    late = re.search(r"^IMPORTED(.*)$", result.stdout, re.M)
    assert late and len(late[1].split()) < 12 and "heloco" not in late[1], late and late[1]
