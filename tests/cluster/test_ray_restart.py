"""Ray's own processes are killed: Ray is started again, and the run goes on."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray is not installed")

from heloco.cluster.ray import RaySupervisor
from heloco.cluster.ray.replies import while_restarting
from heloco.cluster.server.process import spec_of
from support.ray_runs import LONGEST_S, check_exact, config, until
from support.small_cluster import opened


def test_while_the_synchronizer_is_down_the_status_says_that_it_restarts(tmp_path):
    """It is no admin's pause: the kind tells them apart."""
    service = opened(tmp_path / "run")
    service.pauses.pause("for a moment")
    status = service.admin.status()
    assert (status.paused.kind, while_restarting(status).paused.kind) == ("admin", "restarting")
    service.close()


@pytest.mark.long
@pytest.mark.parametrize("process", ["raylet/raylet", "gcs_server"])
def test_where_ray_itself_ends_it_is_started_again_and_the_run_goes_on(process, tmp_path):
    """In a process of its own: this one may be connected to another Ray."""
    command = [sys.executable, __file__, process, str(tmp_path / "run")]
    bare = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    bare["PYTHONPATH"] = os.pathsep.join(sys.path)
    result = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=3 * LONGEST_S)
    assert result.returncode == 0, result.stdout + result.stderr
    check_exact(tmp_path / "run", 100)


def lose_ray(process: str, folder: Path) -> None:
    with RaySupervisor(spec_of(config(arrivals=100, inner_steps=30), folder), workers=2) as engine:
        until(lambda: engine.status().arrivals >= 30, "thirty arrivals")
        pids = subprocess.check_output(["pgrep", "-f", f"{process}.*{engine.cluster.folder.path}"], text=True)
        os.kill(int(pids.split()[0]), signal.SIGKILL)
        assert engine.wait(2 * LONGEST_S).kind == "finished"
        assert engine.restarts == 1


if __name__ == "__main__":
    lose_ray(sys.argv[1], Path(sys.argv[2]))
